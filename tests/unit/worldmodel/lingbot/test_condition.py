"""The image condition: stream against whole clip, mask, and the detected fixed point."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from worldmodel.lingbot.condition import ConditionState, encode_clip_condition, next_condition, start_condition
from worldmodel.wan.vae import ConvPath, VAECache, WanVAE

FRAMES = 3


def make_vae(path: ConvPath, num_latents: int = 16) -> WanVAE:
    config = {
        "base_dim": 4,
        "z_dim": num_latents,
        "dim_mult": [1, 2, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1] * num_latents,
        "latents_std": [2.0] * num_latents,
    }
    vae = WanVAE.from_config(config)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            parameter.data.fill_(1)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.1, generator=generator)
        else:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    vae.fold_weights(path)
    return vae


@pytest.fixture(scope="module", params=list(ConvPath))
def vae(request: pytest.FixtureRequest) -> WanVAE:
    return make_vae(request.param)


@pytest.fixture(scope="module")
def image() -> Tensor:
    return torch.rand(3, 16, 24, generator=torch.Generator().manual_seed(5)) * 2 - 1


def stream(vae: WanVAE, image: Tensor, num_chunks: int) -> tuple[list[Tensor], list[ConditionState]]:
    states = [start_condition(image)]
    conditions = []
    for _ in range(num_chunks):
        condition, state = next_condition(vae, states[-1], FRAMES)
        conditions.append(condition)
        states.append(state)
    return conditions, states


def test_the_stream_equals_the_whole_clip(vae: WanVAE, image: Tensor) -> None:
    conditions, _ = stream(vae, image, 12)
    whole = encode_clip_condition(vae, image, 12 * FRAMES)
    torch.testing.assert_close(torch.cat(conditions, dim=1), whole, atol=1e-6, rtol=0)


def test_the_mask_marks_the_first_latent_frame_only(vae: WanVAE, image: Tensor) -> None:
    conditions, _ = stream(vae, image, 2)
    mask = torch.cat(conditions, dim=1)[:4]
    assert mask[:, 0].eq(1).all()
    assert not mask[:, 1:].any()


def test_the_opening_frame_is_the_encoded_image(vae: WanVAE, image: Tensor) -> None:
    latent, _ = vae.encode(image[None, :, None])
    condition = encode_clip_condition(vae, image, FRAMES)
    assert condition.shape == (20, FRAMES, 2, 3)
    torch.testing.assert_close(condition[4:, :1], latent[0], atol=1e-6, rtol=0)


def test_the_fixed_point_is_found_and_does_not_depend_on_the_image(vae: WanVAE, image: Tensor) -> None:
    conditions, states = stream(vae, image, 12)
    others, other_states = stream(vae, -image, 12)
    assert not states[1].is_fixed
    assert states[-1].is_fixed
    assert other_states[-1].is_fixed
    assert (conditions[0] - others[0]).abs().max() > 1e-2
    assert torch.equal(conditions[-1], others[-1])


def test_after_the_fixed_point_nothing_is_encoded_and_the_cache_is_let_go(vae: WanVAE, image: Tensor) -> None:
    _, states = stream(vae, image, 12)
    fixed = next(state for state in states if state.is_fixed)
    before = states[states.index(fixed) - 1]
    assert fixed.num_bytes < before.num_bytes
    condition, state = next_condition(vae, fixed, FRAMES)
    assert state is fixed
    assert condition is fixed.fixed_condition_20FHW
    # The same as if the last cache were encoded again, and however often it is.
    assert before.cache is not None
    latent, cache = vae.encode(torch.zeros(1, 3, 4 * FRAMES, *image.shape[1:]), before.cache)
    assert cache.equals(before.cache)
    assert torch.equal(condition[4:], latent[0])


def test_a_stream_that_still_changes_is_never_taken_for_fixed(vae: WanVAE, image: Tensor) -> None:
    _, states = stream(vae, image, 12)
    first_fixed = next(index for index, state in enumerate(states) if state.is_fixed)
    caches = [state.cache for state in states[1:first_fixed]]
    assert len(caches) >= 2
    for earlier, later in itertools.pairwise(caches):
        assert earlier is not None
        assert later is not None
        assert not later.equals(earlier)


def test_one_bit_of_the_cache_that_changes_is_no_fixed_point(vae: WanVAE, image: Tensor) -> None:
    """However small the change is and however often the stream has gone on: nothing says that it ends."""
    encode, calls = vae.encode, itertools.count(1)

    def unsteady(clip: Tensor, cache: VAECache | None = None) -> tuple[Tensor, VAECache]:
        latents, after = encode(clip, cache)
        first, *others = after.tensors
        marked = first.clone()
        marked.view(-1)[:1].view(torch.int32).fill_(next(calls))
        return latents, VAECache(tensors=(marked, *others))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vae, "encode", unsteady)
        _, states = stream(vae, image, 16)
    assert not any(state.is_fixed for state in states)


def test_a_state_can_be_used_again(vae: WanVAE, image: Tensor) -> None:
    conditions, states = stream(vae, image, 3)
    for condition, state in zip(conditions, states, strict=False):
        again, _ = next_condition(vae, state, FRAMES)
        assert torch.equal(again, condition)


def test_num_bytes_counts_what_is_kept(vae: WanVAE, image: Tensor) -> None:
    _, states = stream(vae, image, 1)
    assert states[0].num_bytes == image.numel() * 4
    assert states[1].num_bytes == vae.encoder_cache_bytes(16, 24, torch.float32)


def test_another_chunk_length_after_the_fixed_point_is_refused(vae: WanVAE, image: Tensor) -> None:
    _, states = stream(vae, image, 12)
    with pytest.raises(ValueError, match="expected 3 as in the chunks before, got 4"):
        next_condition(vae, states[-1], 4)


def test_empty_chunks_and_odd_images_are_refused(vae: WanVAE, image: Tensor) -> None:
    with pytest.raises(ValueError, match="num_latent_frames: expected at least 1, got 0"):
        next_condition(vae, start_condition(image), 0)
    with pytest.raises(ValueError, match=r"image: expected \[3, height, width\], got \[1, 3, 16, 24\]"):
        start_condition(image[None])


def test_a_state_without_an_image_is_refused(vae: WanVAE) -> None:
    with pytest.raises(ValueError, match="expected an image before the first chunk"):
        next_condition(vae, ConditionState(), FRAMES)
