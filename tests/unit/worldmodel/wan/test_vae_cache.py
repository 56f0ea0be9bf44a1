"""Equality of VAE caches: bits, not values."""

from __future__ import annotations

import pytest
import torch

from worldmodel.wan.vae_cache import CacheCursor, VAECache


def cache(*tensors: torch.Tensor) -> VAECache:
    return VAECache(tensors=tensors)


def one(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((1, 2, 2, 2, 3), value, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_bits_are_equal(dtype: torch.dtype) -> None:
    assert cache(one(0.5, dtype), one(3, dtype)).equals(cache(one(0.5, dtype), one(3, dtype)))


def test_nan_equals_itself() -> None:
    assert cache(one(float("nan"))).equals(cache(one(float("nan"))))


def test_the_last_bit_matters() -> None:
    changed = one()
    changed[0, 1, 1, 1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert not cache(one(), one()).equals(cache(one(), changed))


def test_signed_zeros_differ() -> None:
    assert not cache(one(0.0)).equals(cache(one(-0.0)))


def test_other_shapes_types_and_counts_differ() -> None:
    assert not cache(one()).equals(cache(one()[:, :1]))
    assert not cache(one()).equals(cache(one(dtype=torch.float64)))
    assert not cache(one()).equals(cache(one(), one()))


def test_num_bytes() -> None:
    assert cache(one(), one(dtype=torch.bfloat16)).num_bytes == 24 * 4 + 24 * 2


def test_a_stream_starts_with_zeros_and_keeps_copies() -> None:
    cursor = CacheCursor(None)
    frames = one()
    history = cursor.take(frames, 2)
    assert history.shape == (1, 2, 2, 2, 3)
    assert not history.any()
    cursor.keep(frames)
    frames.fill_(9)
    assert cursor.finish().equals(cache(one()))
