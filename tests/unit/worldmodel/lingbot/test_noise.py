"""The two orders in which a session's noise is drawn."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.support.lingbot_golden import DEFAULT_ROOT
from worldmodel.lingbot.noise import NoiseSource, NoiseState, PerChunkNoise, WholeClipNoise

CPU = torch.device("cpu")
SHAPE = (4, 3, 2, 6)
GOLDEN_SEED = 1234
"""Seed of golden case 9 in this tree; the sets of other folders may have another."""
SOURCES = (
    PerChunkNoise(device=CPU, num_draws=4),
    WholeClipNoise(device=CPU, num_draws=4, clip_latent_frames=7),
)


def draw_chunks(source: NoiseSource, state: NoiseState, num_chunks: int) -> tuple[list[torch.Tensor], NoiseState]:
    """Return the draws of chunks, stacked [step, C, F, Y, X] each, and the state after them."""
    chunks = []
    for _ in range(num_chunks):
        draws, state = source.draw(state, SHAPE)
        chunks.append(torch.stack(draws))
    return chunks, state


def test_the_whole_clip_comes_before_all_that_renoises() -> None:
    generator = torch.Generator().manual_seed(9)
    clip = torch.randn(4, 6, 2, 6, generator=generator)
    renoise = [torch.stack([torch.randn(SHAPE, generator=generator) for _ in range(3)]) for _ in range(2)]
    source = WholeClipNoise(device=CPU, num_draws=4, clip_latent_frames=6)
    chunks, _ = draw_chunks(source, source.start(9), 2)
    for index, chunk in enumerate(chunks):
        assert torch.equal(chunk[0], clip[:, 3 * index : 3 * index + 3])
        assert torch.equal(chunk[1:], renoise[index])


def test_the_official_layout_gives_the_stored_noise_of_golden_case_9() -> None:
    case = load_file(DEFAULT_ROOT / "lingbot" / "case9_end_to_end_official.safetensors")
    clip, renoise = case["noise_all"], case["renoise"]
    num_frames = renoise.shape[2]
    source = WholeClipNoise(device=CPU, num_draws=4, clip_latent_frames=clip.shape[1])
    state = source.start(GOLDEN_SEED)
    for index, first in enumerate(clip.split(num_frames, dim=1)):
        draws, state = source.draw(state, tuple(first.shape))
        assert torch.equal(draws[0], first)
        assert torch.equal(torch.stack(draws[1:]), renoise[3 * index : 3 * index + 3])


def test_the_layout_per_chunk_draws_in_the_order_of_use() -> None:
    generator = torch.Generator().manual_seed(9)
    expected = [torch.stack([torch.randn((1, *SHAPE), generator=generator)[0] for _ in range(4)]) for _ in range(2)]
    source = PerChunkNoise(device=CPU, num_draws=4)
    chunks, _ = draw_chunks(source, source.start(9), 2)
    assert all(torch.equal(got, want) for got, want in zip(chunks, expected, strict=True))


@pytest.mark.parametrize("source", SOURCES)
def test_a_state_gives_its_noise_again_whatever_was_drawn_since(source: NoiseSource) -> None:
    start = source.start(1)
    first, middle = draw_chunks(source, start, 2)
    later, _ = draw_chunks(source, middle, 3)
    draw_chunks(source, source.start(2), 4)
    torch.manual_seed(0)
    again, _ = draw_chunks(source, start, 5)
    assert all(torch.equal(got, want) for got, want in zip(again, [*first, *later], strict=True))


@pytest.mark.parametrize("source", SOURCES)
def test_chunks_and_seeds_differ(source: NoiseSource) -> None:
    chunks, _ = draw_chunks(source, source.start(1), 5)
    other, _ = draw_chunks(source, source.start(2), 1)
    tensors = [tensor for chunk in (*chunks, *other) for tensor in chunk]
    assert not any(torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


def test_a_session_goes_on_beyond_its_clip() -> None:
    """Seven frames are two chunks of three; the third draws its own first noise."""
    source = WholeClipNoise(device=CPU, num_draws=4, clip_latent_frames=7)
    generator = torch.Generator().manual_seed(3)
    torch.randn(4, 7, 2, 6, generator=generator)
    for _ in range(6):
        torch.randn(SHAPE, generator=generator)
    expected = torch.stack([torch.randn(SHAPE, generator=generator) for _ in range(4)])
    chunks, _ = draw_chunks(source, source.start(3), 3)
    assert torch.equal(chunks[2], expected)
