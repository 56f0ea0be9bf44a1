"""What the golden cases do not show: names, refusals, splits of the forward, number formats. Sizes are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from kvcache.cache import KVCache
from kvcache.transaction import ChunkTransaction
from worldmodel.lingbot.transformer import TEXT_STORE, ChunkInputs, LingBotTransformer, kv_geometry
from worldmodel.lingbot.transformer_config import TransformerConfig, read_transformer_config
from worldmodel.wan.precision import precision_plan

CONFIG = TransformerConfig(
    num_layers=2,
    num_heads=2,
    head_dim=12,
    ffn_dim=40,
    in_channels=36,
    out_channels=16,
    text_dim=10,
    freq_dim=8,
    eps=1e-6,
    latent_frames_per_chunk=2,
    sink_latent_frames=1,
    window_latent_frames=3,
    text_rows=9,
)
HEIGHT, WIDTH = 4, 6
PUBLISHED = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 36,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "qk_norm": "rms_norm_across_heads",
    "sink_size": 9,
    "num_frames_per_block": 3,
    "sliding_window_num_frames": 18,
    "local_attn_size": -1,
}
"""The published `transformer/config.json`, as far as it is read."""


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def build(precision: str = "fp32", seed: int = 0) -> LingBotTransformer:
    generator = torch.Generator().manual_seed(seed)
    model = LingBotTransformer(CONFIG)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.apply_precision(precision_plan(precision))
    return model


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def begun(model: LingBotTransformer) -> Iterator[ChunkTransaction]:
    spec = kv_geometry(model.config, model.plan, latent_height=HEIGHT, latent_width=WIDTH)
    cache = KVCache(spec, capacity=1, device="cpu", dtype=model.plan.linear)
    cache.open("s")
    with cache.lease("s") as lease:
        chunk = lease.begin_chunk()
        model.publish_text(drawn(4, CONFIG.text_dim), chunk)
        yield chunk


def inputs_of(model: LingBotTransformer, first_latent_frame: int = 0) -> ChunkInputs:
    camera = model.project_rays(drawn(CONFIG.camera_channels, 2, HEIGHT, WIDTH, seed=2))
    return model.chunk_inputs(drawn(20, 2, HEIGHT, WIDTH, seed=3), camera, first_latent_frame)


def test_the_published_sizes_give_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = LingBotTransformer(read_transformer_config(PUBLISHED))
    names = model.state_dict()
    assert len(names) == 35 * 40 + 21
    assert sum(tensor.numel() for tensor in names.values()) == 18_544_332_864
    assert names["blocks.39.cross_attn.norm_k.weight"].shape == (5120,)
    assert names["head.modulation"].shape == (1, 2, 5120)


def test_the_window_excludes_the_sink() -> None:
    config = read_transformer_config(PUBLISHED)
    assert (config.sink_latent_frames, config.window_latent_frames, config.latent_frames_per_chunk) == (9, 9, 3)


@pytest.mark.parametrize("key", sorted(set(PUBLISHED) - {"image_dim", "added_kv_proj_dim", "patch_size", "qk_norm"}))
def test_a_value_of_another_type_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        read_transformer_config({**PUBLISHED, key: "many"})


@pytest.mark.parametrize("key", ["num_layers", "eps", "sink_size", "sliding_window_num_frames"])
def test_a_missing_value_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is missing"):
        read_transformer_config({name: value for name, value in PUBLISHED.items() if name != key})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"patch_size": [1, 1, 1]}, "patch_size"),
        ({"image_dim": 1280}, "image_dim"),
        ({"qk_norm": None}, "qk_norm"),
        ({"local_attn_size": 12}, "local_attn_size"),
        ({"in_channels": 16}, "in_channels"),
        ({"sliding_window_num_frames": 11}, "window_latent_frames"),
        ({"sink_size": -1}, "sink_size must be an integer from 0 to 4096, got -1"),
        ({"num_frames_per_block": 0}, "num_frames_per_block must be an integer from 1 to 4096"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_layers": 10**9}, "num_layers must be an integer from 1 to 512, got 1000000000"),
        ({"num_attention_heads": 10**12}, "num_attention_heads must be an integer from 1 to 512"),
        ({"ffn_dim": 2**62}, "ffn_dim must be an integer from 1 to 1048576"),
        ({"text_len": 10**12}, "text_len must be an integer from 1 to 65536, got 1000000000000"),
        ({"freq_dim": 10**400}, "freq_dim must be an integer from 1 to 65536, got a huge integer"),
        ({"attention_head_dim": 4}, "head_dim must be even and at least 6, got 4"),
        ({"attention_head_dim": 7}, "head_dim must be even and at least 6, got 7"),
        ({"freq_dim": 255}, "freq_dim must be even, got 255"),
        ({"eps": 10**400}, "eps must be a finite number from 1e-30 to 1, got a huge integer"),
        ({"eps": float("nan")}, "eps must be a finite number from 1e-30 to 1, got nan"),
    ],
)
def test_another_structure_is_refused_by_name(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_transformer_config({**PUBLISHED, **change})


def test_an_unlimited_window_is_passed_on() -> None:
    spec = kv_geometry(
        replace(CONFIG, window_latent_frames=None), precision_plan("bf16"), latent_height=HEIGHT, latent_width=WIDTH
    )
    assert spec.window_latent_frames is None
    assert spec.element_bytes == 2
    assert spec.tokens_per_latent_frame == 6


def test_storing_clean_latents_writes_the_same_history_as_a_whole_forward() -> None:
    model = build()
    x0 = drawn(16, 2, HEIGHT, WIDTH, seed=4)
    time = model.time_constants(0.0)
    histories = []
    for run in (model.flow, model.store_clean):
        with begun(model) as chunk:
            run(x0, time, inputs_of(model), chunk)
            histories.append([tensor.clone() for layer in range(CONFIG.num_layers) for tensor in chunk.visible(layer)])
    assert all(torch.equal(*pair) for pair in zip(*histories, strict=True))


def test_a_second_step_sees_nothing_of_the_first() -> None:
    model = build()
    x_t, time = drawn(16, 2, HEIGHT, WIDTH, seed=4), model.time_constants(500.0)
    with begun(model) as chunk:
        inputs = inputs_of(model)
        expected = model.flow(x_t, time, inputs, chunk)
        model.flow(drawn(16, 2, HEIGHT, WIDTH, seed=5), model.time_constants(1000.0), inputs, chunk)
        assert torch.equal(model.flow(x_t, time, inputs, chunk), expected)


def test_time_camera_and_condition_all_matter() -> None:
    model = build()
    x_t = drawn(16, 2, HEIGHT, WIDTH, seed=4)
    condition, rays = drawn(20, 2, HEIGHT, WIDTH, seed=3), drawn(CONFIG.camera_channels, 2, HEIGHT, WIDTH, seed=2)

    def flow(timestep: float, condition: torch.Tensor, rays: torch.Tensor) -> torch.Tensor:
        with begun(model) as chunk:
            inputs = model.chunk_inputs(condition, model.project_rays(rays), 0)
            return model.flow(x_t, model.time_constants(timestep), inputs, chunk)

    base = flow(500.0, condition, rays)
    assert torch.equal(flow(500.0, condition, rays), base)
    assert not torch.allclose(flow(501.0, condition, rays), base, atol=1e-6)
    assert not torch.allclose(flow(500.0, condition + 0.1, rays), base, atol=1e-6)
    assert not torch.allclose(flow(500.0, condition, rays + 0.1), base, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "num_stored"), [(4, 5), (8, 9), (9, 9)])
def test_padding_takes_one_row_or_none(num_rows: int, num_stored: int) -> None:
    model = build()
    with begun(model) as chunk:
        model.publish_text(drawn(num_rows, CONFIG.text_dim), chunk)
        keys, _, bias = chunk.cross_store(TEXT_STORE).read(0)
    assert keys.shape[0] == num_stored
    assert (bias is None) == (CONFIG.text_rows - num_rows <= 1)


def test_text_that_is_too_long_is_refused() -> None:
    model = build()
    with begun(model) as chunk, pytest.raises(ValueError, match=r"10 rows.*at most 9"):
        model.publish_text(drawn(10, CONFIG.text_dim), chunk)


@pytest.mark.parametrize(
    ("precision", "linear", "residual"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("official", torch.bfloat16, torch.float32),
    ],
)
def test_number_formats_of_a_plan(precision: str, linear: torch.dtype, residual: torch.dtype) -> None:
    model = build(precision)
    layer, time = model.layers[0], model.time_constants(937.5)
    assert layer.ffn[0].weight.dtype == layer.self_attn.norm_q.weight.dtype == linear
    assert model.time_embedding[0].weight.dtype == model.head.head.weight.dtype == torch.float32
    assert layer.modulation.dtype == layer.norm3.weight.dtype == torch.float32
    assert time.layers[0].attention_scale.dtype == torch.float32
    assert time.layers[0].attention_gate.dtype == residual
    with begun(model) as chunk:
        inputs = inputs_of(model)
        h_TD = model.embed_latents(drawn(16, 2, HEIGHT, WIDTH), inputs)
        assert h_TD.dtype == residual
        assert model.run_layer(0, h_TD, time, inputs, chunk).dtype == residual
        assert model.flow(drawn(16, 2, HEIGHT, WIDTH), time, inputs, chunk).dtype == torch.float32
        assert chunk.visible(0)[0].dtype == linear


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int4.*fp32, bf16, official"):
        precision_plan("int4")
