"""The UMT5 encoder against transformers' class, its config checks, and its layers streamed from the host."""

from __future__ import annotations

import pytest
import torch
from transformers import UMT5Config as TwinConfig
from transformers import UMT5EncoderModel

from offload.host_registration import PAGE_BYTES
from tests.support.offload_cuda import FakeCudaRuntime
from worldmodel.checkpoint.random_weights import RandomWeights, fill_random
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.published import RANDOM_GAINS, TINY
from worldmodel.wan.layer_stream import LayerStream
from worldmodel.wan.umt5 import UMT5Config, UMT5Encoder, UMT5Layer, distance_buckets, parse_umt5_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoder() -> UMT5Encoder:
    with torch.device("meta"):
        model = UMT5Encoder(parse_umt5_config(TINY.text_encoder))
    weights = RandomWeights(seed=2, gains=RANDOM_GAINS["text_encoder"])
    fill_random(model, weights, dtype=torch.float32, device=CPU)
    return model.eval()


def twin_of(model: UMT5Encoder) -> UMT5EncoderModel:
    twin = UMT5EncoderModel(TwinConfig.from_dict(dict(TINY.text_encoder)))
    twin.load_state_dict(model.state_dict(), strict=True)
    return twin.eval()


@pytest.mark.parametrize("num_tokens", [1, 2, 40, 300])
@torch.no_grad()
def test_rows_equal_those_of_transformers(encoder: UMT5Encoder, num_tokens: int) -> None:
    ids = torch.randint(0, 512, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    expected = twin_of(encoder)(input_ids=ids[None], attention_mask=torch.ones(1, num_tokens)).last_hidden_state[0]
    torch.testing.assert_close(encoder(ids), expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_equal_those_of_transformers_in_bf16(encoder: UMT5Encoder) -> None:
    ids = torch.arange(60) * 7 % 512
    reduced = UMT5Encoder(encoder.config)
    reduced.load_state_dict(encoder.state_dict())
    reduced.bfloat16()
    twin = twin_of(encoder).bfloat16()
    expected = twin(input_ids=ids[None], attention_mask=torch.ones(1, 60)).last_hidden_state[0]
    exact = encoder(ids)
    # Two roundings of the same computation: as far from each other as from the exact rows, not further.
    own, other = (float((rows.float() - exact).square().mean().sqrt()) for rows in (reduced(ids), expected))
    assert own < 1.2 * other


def test_distance_buckets_equal_those_of_transformers(encoder: UMT5Encoder) -> None:
    attention = twin_of(encoder).encoder.block[0].layer[0].SelfAttention
    positions = torch.arange(512)
    expected = attention._relative_position_bucket(positions[None, :] - positions[:, None])
    assert torch.equal(distance_buckets(512, encoder.config), expected)


def test_the_embedding_has_two_names_and_one_tensor(encoder: UMT5Encoder) -> None:
    assert encoder.encoder.embed_tokens.weight is encoder.shared.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "model_type must be 'umt5', got 't5'"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj must be 'gated-gelu', got 'relu'"),
        ({"d_model": 0}, "d_model must be an integer from 1 to 65536, got 0"),
        ({"num_layers": True}, "num_layers must be an integer from 1 to 512, got true"),
        ({"num_layers": 10**9}, "num_layers must be an integer from 1 to 512, got 1000000000"),
        ({"num_heads": 10**400}, "num_heads must be an integer from 1 to 512, got a huge integer"),
        ({"relative_attention_num_buckets": 2**40}, "relative_attention_num_buckets must be an integer from 1 to"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be at least 4, got 3"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance must be above 8, .*, got 8"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon must be a finite number from 1e-30 to 1, got 'small'"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be a finite number from 1e-30 to 1, got nan"),
    ],
)
def test_a_config_of_another_structure_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"text encoder config: {message}"):
        parse_umt5_config({**TINY.text_encoder, **change})


def test_missing_sizes_are_named_together() -> None:
    with pytest.raises(ValueError, match="missing d_kv, num_heads"):
        parse_umt5_config({key: value for key, value in TINY.text_encoder.items() if key not in ("d_kv", "num_heads")})


def many_layers(num_layers: int) -> tuple[UMT5Encoder, UMT5Encoder]:
    """Return two equal encoders of some layers."""
    config = UMT5Config(d_model=24, d_ff=20, d_kv=6, num_heads=3, num_layers=num_layers, vocab_size=50)
    models = []
    for _ in range(2):
        with torch.device("meta"):
            model = UMT5Encoder(config)
        fill_random(model, RandomWeights(seed=1), dtype=torch.float32, device=CPU)
        models.append(model)
    return models[0], models[1]


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@torch.no_grad()
def test_streamed_layers_equal_resident_ones(num_layers: int) -> None:
    plain, streamed = many_layers(num_layers)

    def make_layer() -> UMT5Layer:
        with torch.device("meta"):
            return UMT5Layer(streamed.config)

    layers = LayerStream(streamed.layers, make_layer, CPU)
    ids = torch.arange(9)
    for _ in range(2):
        assert torch.equal(streamed.finish(streamed.run(streamed.embed(ids), layers)), plain(ids))
    assert len(layers) == num_layers
    # The host's copies are the model's own parameters still.
    assert torch.equal(streamed(ids), plain(ids))


def test_a_streamed_layer_is_one_of_two_places_on_the_device() -> None:
    model, _ = many_layers(5)
    with torch.device("meta"):
        spare = [UMT5Layer(model.config) for _ in range(2)]
    layers = LayerStream(model.layers, lambda: spare.pop(), CPU)
    seen = [(id(layer), layer.steps[0].SelfAttention.q.weight.clone()) for layer in layers]
    assert len({key for key, _ in seen}) == 2
    for (_, weight), layer in zip(seen, model.layers, strict=True):
        assert torch.equal(weight, layer.steps[0].SelfAttention.q.weight)
    assert layers.host_bytes >= sum(parameter.nbytes for layer in model.layers for parameter in layer.parameters())


def layer_stream(runtime: FakeCudaRuntime) -> LayerStream[UMT5Layer]:
    model, _ = many_layers(3)

    def make_layer() -> UMT5Layer:
        with torch.device("meta"):
            return UMT5Layer(model.config)

    return LayerStream(model.layers, make_layer, CPU, runtime)


def test_the_host_memory_of_layers_is_locked_whole_while_they_are_streamed() -> None:
    runtime = FakeCudaRuntime()
    layers = layer_stream(runtime)

    assert len(runtime.locked) == len(layers) == 3
    assert sum(runtime.locked.values()) >= layers.host_bytes
    assert all(address % PAGE_BYTES == size % PAGE_BYTES == 0 for address, size in runtime.locked.items())
    assert runtime.read_only == [False] * 3
    del layers
    assert runtime.locked == {}


def test_layers_that_cannot_all_be_locked_are_not_locked_at_all() -> None:
    runtime = FakeCudaRuntime()
    runtime.refuse_register = {2}

    with pytest.raises(LoadFailed, match=r"text_encoder = 'streamed': .* can't be page-locked .*CUDA error") as failed:
        layer_stream(runtime)

    assert failed.value.field == "text_encoder"
    assert len(runtime.calls) > 2
    assert runtime.locked == {}
