"""What the published model needs of memory, from its sizes alone: shapes on the meta device, nothing allocated."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvcache.errors import BudgetTooSmall
from kvcache.spec import KVSpec
from tests.support.fake_model import image, keys, open_session, tick
from tests.support.lingbot_tiny import cache_of, tiny_adapter
from worldmodel.lingbot.camera import CameraBasis
from worldmodel.lingbot.config import NoiseLayout
from worldmodel.lingbot.memory import MAX_BASES, num_camera_bases, plan_kv
from worldmodel.lingbot.transformer import CameraModulation, Layer
from worldmodel.lingbot.transformer_config import read_transformer_config
from worldmodel.messages import MediaFormat, SessionId
from worldmodel.runtime import Runtime
from worldmodel.wan.precision import precision_plan
from worldmodel.wan.vae import WanVAE

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
def published(precision: str, *, recache_on_prompt: bool = False, width: int = 832, height: int = 480) -> KVSpec:
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
    # The decoder's widest activations, which are more than scale and shift of 40 layers, two bases of 288 MB, and the
    # VAE caches of the chunk in flight.
    decode_bytes = 6 * 12 * 96 * 480 * 832 * 2
    assert spec.worker_owned_bytes == decode_bytes + 2 * 9 * 1560 * 5120 * 4 + vae_caches
    assert 35e9 < spec.required_bytes(1) < 36e9


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

    def keep(layer: Layer, camera_TD: torch.Tensor) -> CameraModulation:
        made.append(original(layer, camera_TD))
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
