"""Loading a LingBot model: sizes of the published one, random ones for benchmarks, and what is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

import worldmodel
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.random_checkpoint import RandomCheckpoint
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import build_empty, random_checkpoint
from worldmodel.lingbot.published import FULL, TINY, published_model
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import read_transformer_config
from worldmodel.lingbot.weights import load_model
from worldmodel.messages import ImageSize, LoadStage, MediaFormat, OpenSession, RequestId, SessionId, StartWorker, Tick
from worldmodel.runtime import Runtime
from worldmodel.wan.precision import precision_plan
from worldmodel.wan.umt5 import UMT5Encoder, parse_umt5_config
from worldmodel.wan.vae import WanVAE

CPU = torch.device("cpu")
MODULES = ("transformer", "vae", "text_encoder")


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_the_full_model_has_the_published_size() -> None:
    with torch.device("meta"):
        transformer = LingBotTransformer(read_transformer_config(FULL.transformer))
        text_encoder = UMT5Encoder(parse_umt5_config(FULL.text_encoder))
        vae = WanVAE.from_config(FULL.vae)
    assert num_parameters(transformer) == 18_544_332_864
    assert len(transformer.state_dict()) == 1421
    assert num_parameters(vae) == pytest.approx(126.9e6, rel=1e-3)
    assert len(vae.state_dict()) == 194
    assert num_parameters(text_encoder) == pytest.approx(5.68e9, rel=1e-3)
    assert len({id(tensor) for tensor in text_encoder.state_dict(keep_vars=True).values()}) == 242


def test_a_model_without_weights_takes_no_memory() -> None:
    empty = build_empty(random_checkpoint("lingbot-world-v2", 0), LingBotOptions())
    for module in (empty.transformer, empty.vae, empty.text_encoder):
        assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert empty.vae.latents_std.tolist() == pytest.approx(FULL.vae["latents_std"])


def test_a_random_model_is_the_same_for_the_same_seed() -> None:
    def load(checkpoint: str) -> dict[str, torch.Tensor]:
        model = load_model(checkpoint, LingBotOptions(), precision_plan("fp32"), CPU, lambda *_: None)
        return {**model.transformer.state_dict(), **model.vae.state_dict()}

    first, again, other = (load(f"random:lingbot-world-v2-tiny:{seed}") for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_random_model_serves_and_says_that_it_is_random(caplog: pytest.LogCaptureFixture) -> None:
    stages: list[LoadStage] = []
    start = StartWorker(
        model="lingbot_world_v2",
        checkpoint="random:lingbot-world-v2-tiny",
        width=48,
        height=32,
        fps=16,
        memory_bytes=2**30,
    )
    with caplog.at_level(logging.WARNING):
        runtime = Runtime.load(start, lambda stage, fraction, detail: stages.append(stage))
    assert "RANDOM WEIGHTS" in caplog.text
    assert "random weights, for benchmarks only" in runtime.info("lingbot_world_v2").checkpoint_digest
    session_id = SessionId("s")
    outputs = (MediaFormat.LATENT, MediaFormat.RGB24)
    opening = OpenSession(
        request_id=RequestId("open"),
        session_id=session_id,
        prompt="a town",
        seed=1,
        image=ImageSize(width=48, height=32),
        outputs=outputs,
    )
    runtime.open(opening, np.full((32, 48, 3), 90, dtype=np.uint8))
    for index in range(3):
        chunk = runtime.tick(Tick(request_id=RequestId(f"t{index}"), session_id=session_id, chunk_index=index))
        message, (latents, pixels) = chunk.to_host()
        assert message.parts[0].format is MediaFormat.LATENT
        values = np.frombuffer(latents, dtype=np.float32)
        assert np.isfinite(values).all()
        # Weights whose activations blow up or die would measure nothing.
        assert 0.3 < values.std() < 5.0
        assert np.frombuffer(pixels, dtype=np.uint8).std() > 2.0


def test_a_tokenizer_that_does_not_fit_stops_the_load_before_the_first_weight() -> None:
    checkpoint = Path(worldmodel.__file__).parent / "data" / "demo_world"
    stages: list[LoadStage] = []

    def refuse(*_: object) -> NoReturn:
        raise CheckpointError("tokenizer", "has too many tokens")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worldmodel.lingbot.weights.load_tokenizer", refuse)
        with pytest.raises(CheckpointError, match="has too many tokens"):
            load_model(
                checkpoint,
                LingBotOptions(),
                precision_plan("fp32"),
                CPU,
                lambda stage, *_: stages.append(stage),
            )
    assert set(stages) == {LoadStage.CHECKPOINT}


def changed(part: str, **config: object) -> RandomCheckpoint:
    """The tiny model with other values in the config of a part."""
    checkpoint = random_checkpoint("lingbot-world-v2-tiny", 0)
    component = checkpoint.component(part)
    others = {name: checkpoint.component(name) for name in (*MODULES, "tokenizer", "scheduler")}
    return RandomCheckpoint("tiny", 0, others | {part: replace(component, config={**component.config, **config})})


@pytest.mark.parametrize(
    ("part", "config", "message"),
    [
        ("scheduler", {"prediction_type": "epsilon"}, "prediction_type must be 'flow_prediction', got 'epsilon'"),
        ("scheduler", {"use_flow_sigmas": False}, "use_flow_sigmas must be true, got false"),
        ("scheduler", {"use_dynamic_shifting": True}, "use_dynamic_shifting must be false, got true"),
        ("scheduler", {"use_karras_sigmas": True}, "use_karras_sigmas must be false, got true"),
        ("scheduler", {"use_exponential_sigmas": True}, "use_exponential_sigmas must be false, got true"),
        ("scheduler", {"use_beta_sigmas": True}, "use_beta_sigmas must be false, got true"),
        ("scheduler", {"num_train_timesteps": 500}, "num_train_timesteps must be 1000, got 500"),
        ("transformer", {"_class_name": "WanModel"}, "must be 'CausalLingBotWorldTransformer3DModel', got 'WanModel'"),
        ("vae", {"_class_name": 3}, "vae config: _class_name must be 'AutoencoderKLWan', got 3"),
        ("vae", {"temperal_downsample": [False, False, True]}, r"4 media frames .* temperal_downsample gives 2"),
    ],
)
def test_a_part_of_another_kind_of_model_is_refused(part: str, config: dict[str, object], message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        build_empty(changed(part, **config), LingBotOptions(flow_shift=5.0))


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"latent_frames_per_chunk": 20}, "latent_frames_per_chunk", "visible_latent_frames = 18 must hold"),
        ({"sink_latent_frames": 16}, "sink_latent_frames", "sink_latent_frames = 16 and latent_frames_per_chunk = 3"),
        ({"visible_latent_frames": 11}, "visible_latent_frames", "visible_latent_frames = 11 must hold"),
    ],
)
def test_a_window_without_room_for_a_chunk_names_the_options(options: dict[str, int], field: str, text: str) -> None:
    with pytest.raises(LoadFailed, match=text) as caught:
        build_empty(
            random_checkpoint("lingbot-world-v2-tiny", 0), LingBotOptions.from_json(json.dumps(options).encode())
        )
    assert caught.value.field == field


def test_an_unknown_random_model_names_the_known_ones_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        LoadFailed, match="unknown model 'other': expected one of lingbot-world-v2, lingbot-world-v2-tiny"
    ):
        load_model("random:other", LingBotOptions(), precision_plan("fp32"), CPU, lambda *_: None)
    assert caplog.text == ""


def test_models_are_found_by_name() -> None:
    assert published_model("lingbot-world-v2") is FULL
    assert published_model("lingbot-world-v2-tiny") is TINY
