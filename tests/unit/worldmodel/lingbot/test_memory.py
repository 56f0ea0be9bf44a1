"""What the published model needs of memory, from its sizes alone: shapes on the meta device, nothing allocated."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcache.errors import BudgetTooSmall
from kvcache.spec import KVSpec
from tests.support.fake_model import image, keys, open_session, tick
from tests.support.lingbot_tiny import cache_of, tiny_adapter
from tests.support.live_bytes import LiveBytes
from worldmodel.kernels.vae_ops import PlainVaeOps
from worldmodel.lingbot.camera import CameraBasis
from worldmodel.lingbot.config import NoiseLayout
from worldmodel.lingbot.memory import MAX_BASES, VAE_ACTIVATIONS, VAE_HISTORY_FRAMES, num_camera_bases, plan_kv
from worldmodel.lingbot.transformer import CameraModulation, Layer
from worldmodel.lingbot.transformer_config import read_transformer_config
from worldmodel.messages import MediaFormat, SessionId
from worldmodel.runtime import Runtime
from worldmodel.wan import vae_layers
from worldmodel.wan.captured import GRAPH_BASE_BYTES
from worldmodel.wan.precision import precision_plan
from worldmodel.wan.vae import ConvPath, WanVAE

TRANSFORMER = {
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 36,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "eps": 1e-6,
    "sink_size": 9,
    "num_frames_per_block": 3,
    "sliding_window_num_frames": 18,
    "local_attn_size": -1,
}
VAE = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 16,
    "latents_std": [1.0] * 16,
}
"""The published sizes; statistics do not matter here."""

NUM_PARAMETERS = {"transformer": 18_544_332_864, "vae": 126_892_531, "text_encoder": 5_680_910_336}

CUDA_CONTEXT_BYTES = 2**30

GIB = 2**30


@cache
def published(
    precision: str,
    *,
    recache_on_prompt: bool = False,
    is_captured: bool = False,
    width: int = 832,
    height: int = 480,
) -> KVSpec:
    with torch.device("meta"):
        vae = WanVAE.from_config(VAE)
    assert sum(parameter.numel() for parameter in vae.parameters()) == NUM_PARAMETERS["vae"]
    return plan_kv(
        read_transformer_config(TRANSFORMER),
        vae,
        precision_plan(precision),
        width=width,
        height=height,
        requested_sessions=8,
        recache_on_prompt=recache_on_prompt,
        is_captured=is_captured,
    )


def free_bytes(device_gib: int, precision: str) -> int:
    """Return what is left of a device beside the weights of all parts."""
    plan = precision_plan(precision)
    weights = (
        NUM_PARAMETERS["transformer"] * plan.linear.itemsize
        + NUM_PARAMETERS["vae"] * plan.vae.itemsize
        + NUM_PARAMETERS["text_encoder"] * plan.text_encoder.itemsize
    )
    return device_gib * GIB - CUDA_CONTEXT_BYTES - weights


def test_a_published_session_in_bytes() -> None:
    spec = published("bf16")
    assert spec.storage_bytes(1) == 23_003_136_000
    assert spec.cross_attention_bytes == spec.staging_bytes == 419_430_400
    # Both VAE caches as the official layers keep them, and a few megabytes.
    vae_caches = (944_286_720 + 560_701_440) * 2
    assert 0 < spec.model_owned_bytes - vae_caches < 20e6
    # The decoder's widest activations, which are more than scale and shift of 40 layers and the streams of one, two
    # bases of 288 MB, and the VAE caches of the chunk in flight.
    denoise_bytes = ((2 * 40 + 12) * 4680 * 5120 + 2 * 4680 * 13824) * 2
    decode_bytes = (5 * 12 + 2) * 96 * 480 * 832 * 2
    assert 4.6e9 < denoise_bytes < decode_bytes
    assert spec.worker_owned_bytes == decode_bytes + 2 * 9 * 1560 * 5120 * 4 + vae_caches
    assert 35e9 < spec.required_bytes(1) < 36e9
    document = (Path(__file__).parents[4] / "docs/models/lingbot_world.md").read_text(encoding="utf-8")
    table = document.split("## Memory at 832x480", 1)[1]
    told = dict(re.findall(r"^\| (.+?)[:,] .* \| ([\d.]+)(?: each)? \|$", table, re.M))
    assert float(told["worker"]) == round((spec.worker_owned_bytes - vae_caches) / 1e9, 1)
    assert float(told["VAE caches of a session"]) == round(vae_caches / 1e9, 1)
    assert float(told["K/V of a session"]) == round(spec.storage_bytes(1) / 1e9, 1)
    assert float(told["text K/V of a session"]) == round(spec.staging_bytes / 1e9, 2)


@pytest.mark.parametrize(
    ("precision", "recache", "device_gib", "sessions"),
    [
        ("bf16", False, 80, 1),
        ("bf16", False, 141, 3),
        ("bf16", False, 192, 4),
        ("bf16", True, 141, 2),
        ("official", False, 141, 2),
        ("official", True, 141, 1),
    ],
)
def test_capacity_of_published_devices_at_the_default_fraction(
    precision: str, recache: bool, device_gib: int, sessions: int
) -> None:
    spec = published(precision, recache_on_prompt=recache)
    assert spec.capacity(free_bytes(device_gib, precision), 0.9) == sessions


def test_graphs_hold_the_inputs_of_a_chunk_beside_what_decodes_it() -> None:
    """Scale and shift of 40 layers, the condition and the rotations, a layer's streams, and the constants of seven."""
    grown = published("bf16", is_captured=True).worker_owned_bytes - published("bf16").worker_owned_bytes
    inputs_bytes = 4680 * (((2 * 40 + 1) * 5120 + 20 * 4) * 2 + 64 * 8)
    layer_bytes = 4680 * (12 * 5120 + 2 * 13824) * 2
    assert grown == GRAPH_BASE_BYTES + inputs_bytes + layer_bytes + 7 * 6 * 40 * 5120 * 4
    assert 4.8e9 < grown < 4.9e9
    without_text_encoder = free_bytes(141, "bf16") + 2 * NUM_PARAMETERS["text_encoder"]
    assert published("bf16", is_captured=True).capacity(without_text_encoder, 0.9) == 3


def test_a_session_of_704x1280_fits_141_gb() -> None:
    spec = published("bf16", width=1280, height=704)
    assert spec.storage_bytes(1) == 18 * (44 * 80) * 40 * (2 * 5120 * 2)
    assert spec.capacity(free_bytes(141, "bf16"), 0.9) == 1


def test_80_gb_hold_one_session_only_above_the_fraction() -> None:
    spec, free = published("bf16"), free_bytes(80, "bf16")
    assert 0.9 * free < spec.required_bytes(1) <= free


@pytest.mark.parametrize(("precision", "recache"), [("official", False), ("bf16", True)])
def test_what_does_not_fit_80_gb_is_refused(precision: str, recache: bool) -> None:
    spec, free = published(precision, recache_on_prompt=recache), free_bytes(80, precision)
    with pytest.raises(BudgetTooSmall, match=f"one session needs {spec.required_bytes(1)} bytes"):
        spec.capacity(free, 0.9)


def test_encoding_history_anew_takes_one_more_session_of_kv_and_small_change() -> None:
    plain, recaching = published("bf16"), published("bf16", recache_on_prompt=True)
    assert recaching.storage_bytes(1) == 2 * plain.storage_bytes(1)
    assert recaching.storage_bytes(3) == 4 * plain.storage_bytes(1)
    assert recaching.model_owned_bytes - plain.model_owned_bytes == (18 + 3) * 36 * 60 * 104 * 4


def test_the_adapter_declares_what_its_parts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's bytes, counted on a chunk as it runs."""
    adapter = tiny_adapter()
    runtime = Runtime(adapter, cache_of(adapter))
    runtime.open(open_session("a", outputs=(MediaFormat.YUV420,)), image())
    made: list[CameraModulation] = []
    original = Layer.camera_modulation

    def keep(layer: Layer, camera_TD: torch.Tensor, into: CameraModulation | None = None) -> CameraModulation:
        made.append(original(layer, camera_TD, into))
        return made[-1]

    monkeypatch.setattr(Layer, "camera_modulation", keep)
    runtime.tick(tick("a", 0, keys(1, "w")))
    modulation_bytes = sum(each.scale.nbytes + each.shift.nbytes for each in made)
    (basis,) = adapter._camera._bases.values()
    assert isinstance(basis, CameraBasis)
    state = runtime._sessions[SessionId("a")].state
    caches = state.decoder_cache.num_bytes + state.condition.num_bytes
    bases_bytes = MAX_BASES * basis._rotation_9PD.nbytes
    assert adapter.kv_spec().worker_owned_bytes >= modulation_bytes + bases_bytes + state.decoder_cache.num_bytes
    assert adapter.kv_spec().model_owned_bytes >= caches


def test_the_noise_of_a_whole_clip_is_counted_for_each_session() -> None:
    plain, with_clip = (
        tiny_adapter().kv_spec(),
        tiny_adapter(noise_layout=NoiseLayout.OFFICIAL_WHOLE_CLIP, noise_clip_latent_frames=21).kv_spec(),
    )
    assert with_clip.model_owned_bytes - plain.model_owned_bytes == 21 * 16 * 4 * 6 * 4


def test_the_official_plan_keeps_no_camera_basis() -> None:
    assert num_camera_bases(precision_plan("official")) == 0
    assert num_camera_bases(precision_plan("bf16")) == num_camera_bases(precision_plan("fp32")) == MAX_BASES


class ShapeOps(PlainVaeOps):
    """What the fused kernels allocate, and nothing else."""

    def norm_silu(self, x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out_BTHWC: Tensor) -> None: ...

    def norm_silu_taps(self, x_BTHWC: Tensor, bias_C: Tensor | None, gamma_C: Tensor, out_BTHWK: Tensor) -> None: ...

    def add_bias_and_skip(self, y_BTHWC: Tensor, bias_C: Tensor, skip_BTHWC: Tensor) -> Tensor:
        return y_BTHWC

    def join_doubled(self, y_BTHWO: Tensor, bias_C: Tensor) -> Tensor:
        batch, time, height, width, channels = y_BTHWO.shape
        return y_BTHWO.new_empty(batch, time, 2 * (height - 1), 2 * (width - 1), channels // 4)


def shape_of_conv2d(x_BTHWC: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Return the result of a convolution as a device has it, which torch's meta kernel would copy into order."""
    sides = (
        (side + 2 * padding - kernel) // stride + 1
        for side, kernel in zip(x_BTHWC.shape[2:4], weight.shape[2:], strict=True)
    )
    return x_BTHWC.new_empty(*x_BTHWC.shape[:2], *sides, weight.shape[0])


@pytest.mark.parametrize("takes_single_frames", [False, True])
def test_the_vae_keeps_no_more_activations_than_are_planned(
    monkeypatch: pytest.MonkeyPatch, takes_single_frames: bool
) -> None:
    """The second chunk of the published size in the form that a CUDA device computes, by shapes alone."""
    monkeypatch.setattr(vae_layers, "create_vae_ops", lambda device: ShapeOps())
    monkeypatch.setattr(vae_layers, "_conv2d", shape_of_conv2d)
    with torch.device("meta"), torch.no_grad():
        vae = WanVAE.from_config(VAE).to(torch.bfloat16)
        vae.fold_weights(ConvPath.FUSED)
        vae.takes_single_frames = takes_single_frames
        latent, frames = torch.empty(1, 16, 3, 60, 104), torch.empty(1, 3, 12, 480, 832)
        _, decoder_cache = vae.decode(latent[:, :, :1])
        _, encoder_cache = vae.encode(frames[:, :, :1])
        with LiveBytes() as decoding:
            vae.decode(latent, decoder_cache)
        with LiveBytes() as encoding:
            vae.encode(frames, encoder_cache)
    num_frames = 4 if takes_single_frames else 12
    planned_bytes = (VAE_ACTIVATIONS * num_frames + VAE_HISTORY_FRAMES) * 96 * 480 * 832 * 2
    # Frames in three channels, as they come, as the network takes them and joined: part of the working memory.
    frames_bytes = 3 * (3 * 12 * 480 * 832 * 2)
    for found, kept in ((decoding, decoder_cache), (encoding, encoder_cache)):
        assert found.peak_bytes <= planned_bytes + kept.num_bytes + frames_bytes
    assert decoding.peak_bytes > 0.9 * (planned_bytes + decoder_cache.num_bytes)
