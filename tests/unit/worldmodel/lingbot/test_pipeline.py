"""The sampler's contract with its caller, and the session's noise. Numbers are in the golden tests."""

from __future__ import annotations

import pytest
import torch

from tests.support.lingbot_network import SESSION, main_geometry, open_cache, transformer, transformer_config
from worldmodel.lingbot.noise import PerChunkNoise
from worldmodel.lingbot.pipeline import ChunkSampler
from worldmodel.wan.flow_scheduler import nominal_table, official_table

SHAPE = (16, 3, 4, 6)
CPU = torch.device("cpu")


def test_as_many_noises_as_steps_are_needed() -> None:
    model = transformer(transformer_config())
    sampler = ChunkSampler(model, nominal_table(5.0))
    with open_cache(model, *main_geometry()["latent_hw"]).lease(SESSION) as lease:
        chunk = lease.begin_chunk()
        inputs = model.chunk_inputs(torch.zeros(20, *SHAPE[1:]), torch.zeros(3 * 6, model.config.width), 0)
        with pytest.raises(ValueError, match="expected 4 tensors, one per step, got 3"):
            sampler.denoise([torch.zeros(SHAPE)] * 3, inputs, chunk)


def test_the_number_of_steps_is_that_of_the_table() -> None:
    model = transformer(transformer_config())
    assert ChunkSampler(model, official_table(5.0, [0, 500])).num_steps == 2


def test_noise_is_one_stream_cut_into_chunks() -> None:
    source = PerChunkNoise(device=CPU, num_draws=4)
    first, state = source.draw(source.start(7), SHAPE)
    second, _ = source.draw(state, SHAPE)
    generator = torch.Generator().manual_seed(7)
    expected = [torch.randn((1, *SHAPE), generator=generator)[0] for _ in range(8)]
    assert all(torch.equal(*pair) for pair in zip((*first, *second), expected, strict=True))


def test_a_state_gives_its_noise_again_and_again() -> None:
    source = PerChunkNoise(device=CPU, num_draws=2)
    start = source.start(7)
    first, _ = source.draw(start, SHAPE)
    torch.randn(100)
    again, _ = source.draw(start, SHAPE)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def test_drawing_leaves_the_global_generator_alone() -> None:
    source = PerChunkNoise(device=CPU, num_draws=1)
    before = torch.get_rng_state()
    source.draw(source.start(7), SHAPE)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_any_seed_of_63_bits_is_taken(seed: int) -> None:
    source = PerChunkNoise(device=CPU, num_draws=1)
    (noise,), _ = source.draw(source.start(seed), SHAPE)
    assert torch.isfinite(noise).all()
