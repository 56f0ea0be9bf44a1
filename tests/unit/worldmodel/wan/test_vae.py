"""The VAE against diffusers' class, its convolution paths against each other, and streams against whole clips."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import AutoencoderKLWan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import worldmodel
from worldmodel.checkpoint.diffusers import open_checkpoint
from worldmodel.wan.image import prepare_image
from worldmodel.wan.vae import ConvPath, VAECache, WanVAE
from worldmodel.wan.vae_layers import best_path

DEMO = Path(worldmodel.__file__).parent / "data" / "demo_world"
FAST_PATHS = [path for path in ConvPath if path is not ConvPath.PLAIN]
HEIGHT, WIDTH = 16, 24


def tiny_config(num_res_blocks: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": num_res_blocks,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "dropout": 0.0,
        "latents_mean": [0.1, -0.2, 0.3, 0.0],
        "latents_std": [1.5, 2.0, 0.5, 1.0],
        **changes,
    }


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def diffusers_twin(config: dict[str, Any]) -> AutoencoderKLWan:
    """Build diffusers' model with weights that keep activations near one, and norm factors that are not all equal."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        twin = AutoencoderKLWan(**config).eval()
        for name, parameter in twin.named_parameters():
            if name.endswith("gamma"):
                parameter.data.uniform_(0.5, 1.5)
    return twin


def make_vae(config: dict[str, Any], path: ConvPath = ConvPath.PLAIN) -> WanVAE:
    vae = WanVAE.from_config(config)
    vae.load_state_dict(diffusers_twin(config).state_dict())
    vae.fold_weights(path)
    return vae


@pytest.fixture(scope="module")
def vae() -> WanVAE:
    return make_vae(tiny_config())


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


# ---------------------------------------------------------------- against diffusers


@pytest.mark.parametrize("num_res_blocks", [1, 2])
@pytest.mark.parametrize("path", list(ConvPath))
def test_equals_diffusers(num_res_blocks: int, path: ConvPath) -> None:
    config = tiny_config(num_res_blocks)
    twin, vae = diffusers_twin(config), make_vae(config, path)
    mean = torch.tensor(config["latents_mean"]).view(1, -1, 1, 1, 1)
    std = torch.tensor(config["latents_std"]).view(1, -1, 1, 1, 1)
    video, latent = noise(1, 2, 3, 13, HEIGHT, WIDTH), noise(2, 2, 4, 4, 2, 3)
    with torch.no_grad():
        expected_latent = (twin.encode(video).latent_dist.mode() - mean) / std
        expected_frames = twin.decode(latent * std + mean).sample
    close(vae.encode(video)[0], expected_latent)
    close(vae.decode(latent)[0].clamp(-1, 1), expected_frames)


@pytest.mark.parametrize(
    "changes",
    [
        {"dim_mult": [1, 2], "temperal_downsample": [True]},
        {"dim_mult": [1, 1, 2], "temperal_downsample": [True, False]},
        {"decoder_base_dim": 8},
    ],
)
def test_other_geometries_equal_diffusers(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    twin, vae = diffusers_twin(config), make_vae(config)
    step = vae.config.temporal_factor
    factor = vae.config.spatial_factor
    latent = noise(4, 1, 4, 3, HEIGHT // factor, WIDTH // factor)
    frames, _ = vae.decode(latent)
    assert frames.shape[2:] == (1 + 2 * step, HEIGHT, WIDTH)
    mean = torch.tensor(config["latents_mean"]).view(1, -1, 1, 1, 1)
    std = torch.tensor(config["latents_std"]).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        expected = twin.decode(latent * std + mean).sample
    close(frames.clamp(-1, 1), expected)


def test_parameter_names_are_the_checkpoints() -> None:
    config = tiny_config(2)
    assert {name: t.shape for name, t in WanVAE.from_config(config).state_dict().items()} == {
        name: t.shape for name, t in diffusers_twin(config).state_dict().items()
    }


# ---------------------------------------------------------------- convolution paths


@pytest.mark.parametrize("path", FAST_PATHS)
def test_fast_paths_equal_the_plain_one(vae: WanVAE, path: ConvPath) -> None:
    fast = make_vae(tiny_config(), path)
    video, latent = noise(3, 1, 3, 9, HEIGHT, WIDTH), noise(4, 1, 4, 3, 2, 3)
    for got, want in ((fast.encode(video), vae.encode(video)), (fast.decode(latent), vae.decode(latent))):
        close(got[0], want[0])
        for ours, theirs in zip(got[1].tensors, want[1].tensors, strict=True):
            close(ours, theirs)


def test_taps_stacked_by_the_norm_equal_the_plain_path() -> None:
    """At a width between 64 and 128, where the fused path stacks; frames come one by one or many at once."""
    plain, fused = (make_vae(tiny_config(base_dim=72), path) for path in (ConvPath.PLAIN, ConvPath.FUSED))
    assert any(getattr(layer, "stacks_taps", False) for layer in fused.modules())
    splits = [1, 1, 3]
    latent = noise(4, 1, 4, sum(splits), 1, 2)
    caches: dict[bool, VAECache | None] = {True: None, False: None}
    for part in latent.split(splits, dim=2):
        want, caches[False] = plain.decode(part, caches[False])
        got, caches[True] = fused.decode(part, caches[True])
        close(got, want)


@pytest.mark.parametrize("path", FAST_PATHS)
def test_folding_keeps_the_parameters_and_can_be_repeated(path: ConvPath) -> None:
    vae = make_vae(tiny_config(), path)
    expected = diffusers_twin(tiny_config()).state_dict()
    assert set(vae.state_dict()) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in vae.state_dict().items())
    before, _ = vae.decode(noise(5, 1, 4, 1, 2, 3))
    vae.fold_weights(path)
    assert torch.equal(vae.decode(noise(5, 1, 4, 1, 2, 3))[0], before)


def test_without_a_choice_a_fast_path_is_taken() -> None:
    vae = make_vae(tiny_config())
    vae.fold_weights()
    assert vae.encoder.conv_in.path in FAST_PATHS


@pytest.mark.parametrize(
    ("machine", "device", "dtype", "path"),
    [
        ("x86_64", "cpu", torch.float32, ConvPath.ONEDNN),
        ("AMD64", "cpu", torch.float32, ConvPath.ONEDNN),
        ("x86_64", "cpu", torch.bfloat16, ConvPath.FOLDED),
        ("aarch64", "cpu", torch.float32, ConvPath.FOLDED),
        ("x86_64", "cuda", torch.float32, ConvPath.FOLDED),
    ],
)
def test_onednn_is_chosen_only_where_it_is_known_to_be_fast(
    monkeypatch: pytest.MonkeyPatch, machine: str, device: str, dtype: torch.dtype, path: ConvPath
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert best_path(torch.device(device), dtype) is path


# ---------------------------------------------------------------- streams


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_any_split_of_a_clip_decodes_to_the_same_frames(vae: WanVAE, sizes: list[int]) -> None:
    latent = noise(6, 1, 4, sum(sizes), 2, 3)
    whole, whole_cache = vae.decode(latent)
    parts, cache = [], None
    for piece in latent.split(sizes, dim=2):
        frames, cache = vae.decode(piece, cache)
        parts.append(frames)
    assert [part.shape[2] for part in parts] == [
        4 * size - (3 if index == 0 else 0) for index, size in enumerate(sizes)
    ]
    close(torch.cat(parts, dim=2), whole)
    assert cache is not None
    for ours, theirs in zip(cache.tensors, whole_cache.tensors, strict=True):
        close(ours, theirs)


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_any_split_of_a_clip_encodes_to_the_same_latents(vae: WanVAE, sizes: list[int]) -> None:
    frame_counts = [4 * size - (3 if index == 0 else 0) for index, size in enumerate(sizes)]
    video = noise(7, 1, 3, sum(frame_counts), HEIGHT, WIDTH)
    whole, _ = vae.encode(video)
    parts, cache = [], None
    for piece in video.split(frame_counts, dim=2):
        latent, cache = vae.encode(piece, cache)
        parts.append(latent)
    assert [part.shape[2] for part in parts] == sizes
    close(torch.cat(parts, dim=2), whole)


def test_the_future_does_not_change_the_past(vae: WanVAE) -> None:
    latent = noise(8, 1, 4, 4, 2, 3)
    changed = latent.clone()
    changed[:, :, 3] += 1
    frames, changed_frames = vae.decode(latent)[0], vae.decode(changed)[0]
    close(changed_frames[:, :, :9], frames[:, :, :9])
    assert (changed_frames[:, :, 9:] - frames[:, :, 9:]).abs().max() > 1e-3


@pytest.mark.parametrize("path", list(ConvPath))
def test_a_call_leaves_its_cache_as_it_was_and_can_be_repeated(path: ConvPath) -> None:
    vae = make_vae(tiny_config(), path)
    latent, video = noise(9, 1, 4, 3, 2, 3), noise(10, 1, 3, 9, HEIGHT, WIDTH)
    _, decoded = vae.decode(latent)
    _, encoded = vae.encode(video)
    for run, cache in (
        (lambda cache: vae.decode(latent, cache), decoded),
        (lambda cache: vae.encode(video[:, :, :4], cache), encoded),
    ):
        copy = VAECache(tensors=tuple(tensor.clone() for tensor in cache.tensors))
        first, first_cache = run(cache)
        second, second_cache = run(cache)
        assert cache.equals(copy)
        assert torch.equal(first, second)
        assert first_cache.equals(second_cache)
        assert not first_cache.equals(cache)


@pytest.mark.parametrize("path", list(ConvPath))
def test_a_cache_holds_no_more_memory_than_its_tensors(path: ConvPath) -> None:
    _, cache = make_vae(tiny_config(), path).decode(noise(11, 1, 4, 3, 2, 3))
    assert sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors) == cache.num_bytes


# ---------------------------------------------------------------- sizes and refusals


def test_cache_bytes_are_what_a_session_holds(vae: WanVAE) -> None:
    _, decoded = vae.decode(noise(12, 1, 4, 2, 2, 3))
    _, encoded = vae.encode(noise(13, 1, 3, 5, HEIGHT, WIDTH))
    assert vae.decoder_cache_bytes(HEIGHT, WIDTH, torch.float32) == decoded.num_bytes
    assert vae.encoder_cache_bytes(HEIGHT, WIDTH, torch.float32) == encoded.num_bytes
    assert vae.cache_bytes(HEIGHT, WIDTH, torch.bfloat16) * 2 == decoded.num_bytes + encoded.num_bytes


def test_cache_bytes_of_the_published_model() -> None:
    config = tiny_config(2, base_dim=96, z_dim=16, latents_mean=[0.0] * 16, latents_std=[1.0] * 16)
    with torch.device("meta"):
        vae = WanVAE.from_config(config)
    assert sum(parameter.numel() for parameter in vae.parameters()) == 126_892_531
    assert vae.decoder_cache_bytes(480, 832, torch.bfloat16) == 944_286_720 * 2
    assert vae.encoder_cache_bytes(480, 832, torch.bfloat16) == 560_701_440 * 2


@pytest.mark.parametrize(
    ("num_frames", "is_start", "message"),
    [
        (0, True, r"the first call of a stream takes 1 \+ 4n frames, got 0"),
        (4, True, r"the first call of a stream takes 1 \+ 4n frames, got 4"),
        (5, False, "later calls take 4n frames, got 5"),
        (0, False, "later calls take 4n frames, got 0"),
    ],
)
def test_wrong_frame_counts_are_refused(vae: WanVAE, num_frames: int, is_start: bool, message: str) -> None:
    cache = None if is_start else vae.encode(torch.zeros(1, 3, 1, HEIGHT, WIDTH))[1]
    with pytest.raises(ValueError, match=message):
        vae.encode(torch.zeros(1, 3, num_frames, HEIGHT, WIDTH), cache)


def test_sizes_that_do_not_divide_are_refused(vae: WanVAE) -> None:
    with pytest.raises(ValueError, match="must be divisible by 8, got 16 x 20"):
        vae.encode(torch.zeros(1, 3, 1, 16, 20))


@pytest.mark.parametrize("shape", [(4, 1, 2, 3), (1, 5, 1, 2, 3), (1, 4, 0, 2, 3)])
def test_wrong_latent_shapes_are_refused(vae: WanVAE, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[batch, 4, latent frames >= 1, height, width\], got"):
        vae.decode(torch.zeros(shape))


def test_a_cache_of_another_size_or_network_is_refused(vae: WanVAE) -> None:
    _, decoded = vae.decode(torch.zeros(1, 4, 1, 2, 3))
    with pytest.raises(ValueError, match=r"layer 0 expected \(1, 2, 3, 3, 4\), found \(1, 2, 2, 3, 4\)"):
        vae.decode(torch.zeros(1, 4, 1, 3, 3), decoded)
    with pytest.raises(ValueError, match="VAE cache of another model"):
        vae.encode(torch.zeros(1, 3, 4, HEIGHT, WIDTH), decoded)
    shortened = VAECache(tensors=decoded.tensors[:-1])
    with pytest.raises(ValueError, match="found nothing"):
        vae.decode(torch.zeros(1, 4, 1, 2, 3), shortened)
    lengthened = VAECache(tensors=(*decoded.tensors, decoded.tensors[0]))
    with pytest.raises(ValueError, match="it has more than"):
        vae.decode(torch.zeros(1, 4, 1, 2, 3), lengthened)


# ---------------------------------------------------------------- the demo checkpoint


@pytest.mark.parametrize("name", ["day", "night"])
def test_the_demo_checkpoint_reconstructs_a_start_image(name: str) -> None:
    reader = open_checkpoint(DEMO).component("vae")
    vae = WanVAE.from_config(reader.config)
    reader.load_into(vae, dtype=torch.float32)
    vae.fold_weights()
    pixels = np.asarray(PIL.Image.open(DEMO / f"examples/{name}.png").convert("RGB"))
    image = prepare_image(pixels, *pixels.shape[:2])
    latent, _ = vae.encode(image[None, :, None])
    frames, _ = vae.decode(latent)
    squared_error = (frames[0, :, 0].clamp(-1, 1) - image).square().mean()
    peak_signal_to_noise_db = 10 * torch.log10(4 / squared_error)
    assert peak_signal_to_noise_db > 20


def test_reduced_precision_stays_near_float32() -> None:
    reader = open_checkpoint(DEMO).component("vae")
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        vae = WanVAE.from_config(json.loads((DEMO / "vae/config.json").read_text()))
        reader.load_into(vae, dtype=dtype)
        vae.fold_weights()
        frames, cache = vae.decode(noise(14, 1, 16, 2, 2, 3))
        assert frames.dtype == dtype
        assert all(tensor.dtype == dtype for tensor in cache.tensors)
        outputs.append(frames.float())
    assert (outputs[0] - outputs[1]).abs().mean() < 0.02


def test_single_frames_are_the_stream_in_pieces(vae: WanVAE) -> None:
    """A call that takes one latent frame after the other gives what as many calls give, bit for bit."""
    generator = torch.Generator().manual_seed(4)
    latents = torch.randn(1, vae.config.z_dim, 6, 4, 4, generator=generator)
    clip = torch.randn(1, 3, 1 + 5 * vae.config.temporal_factor, 32, 32, generator=generator)
    sizes = [1] + [vae.config.temporal_factor] * 5
    pieces, encoded, decoder_cache, encoder_cache = [], [], None, None
    for latent in latents.split(1, dim=2):
        frames, decoder_cache = vae.decode(latent, decoder_cache)
        pieces.append(frames)
    for part in clip.split(sizes, dim=2):
        latent, encoder_cache = vae.encode(part, encoder_cache)
        encoded.append(latent)

    vae.takes_single_frames = True
    try:
        first, cache = vae.decode(latents[:, :, :3])
        kept = [tensor.clone() for tensor in cache.tensors]
        second, last = vae.decode(latents[:, :, 3:], cache)
        opening, between = vae.encode(clip[:, :, : sum(sizes[:3])])
        rest, end = vae.encode(clip[:, :, sum(sizes[:3]) :], between)
    finally:
        vae.takes_single_frames = False

    assert torch.equal(torch.cat([first, second], dim=2), torch.cat(pieces, dim=2))
    assert torch.equal(torch.cat([opening, rest], dim=2), torch.cat(encoded, dim=2))
    assert decoder_cache is not None
    assert encoder_cache is not None
    assert last.equals(decoder_cache)
    assert end.equals(encoder_cache)
    assert all(torch.equal(a, b) for a, b in zip(kept, cache.tensors, strict=True))
