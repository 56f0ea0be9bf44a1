"""Byte arithmetic and the checks of `KVSpec`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcache.errors import BudgetTooSmall
from kvcache.spec import AtWindow, Branch, CrossStoreSpec, KVSpec, Storage
from tests.support.kv_geometry import tiny_spec

LINGBOT_832X480 = KVSpec(
    num_layers=40,
    num_kv_heads=40,
    head_dim=128,
    tokens_per_latent_frame=1560,
    latent_frames_per_chunk=3,
    sink_latent_frames=9,
    window_latent_frames=9,
    element_bytes=2,
    cross_stores=(CrossStoreSpec(name="text", num_tokens=512, num_heads=40),),
    requested_sessions=8,
)


def test_published_lingbot_session_takes_23_gb() -> None:
    assert LINGBOT_832X480.kv_bytes_per_token == 819_200
    assert LINGBOT_832X480.storage_bytes(1) == 23_003_136_000
    assert LINGBOT_832X480.cross_attention_bytes == 419_430_400


def test_required_bytes_is_worker_plus_storage_plus_sessions() -> None:
    spec = replace(LINGBOT_832X480, model_owned_bytes=3_000, worker_owned_bytes=50_000)
    staging = 419_430_400
    for n in (1, 2, 5):
        assert spec.required_bytes(n) == 50_000 + staging + n * (23_003_136_000 + 419_430_400 + 3_000)


@pytest.mark.parametrize(
    ("free_gb", "fraction", "sessions"),
    [
        (24, 0.9, 1),  # 90 % hold none, but one fits in what is free
        (47, 1.0, 1),
        (47.3, 1.0, 2),
        (80, 0.9, 3),
        (140, 0.9, 5),
        (1000, 0.9, 8),  # requested_sessions
    ],
)
def test_capacity_is_the_largest_number_that_fits(free_gb: float, fraction: float, sessions: int) -> None:
    free_bytes = int(free_gb * 1e9)
    assert LINGBOT_832X480.capacity(free_bytes, fraction) == sessions
    if 1 < sessions < 8:
        assert LINGBOT_832X480.required_bytes(sessions) <= free_bytes * fraction
        assert LINGBOT_832X480.required_bytes(sessions + 1) > free_bytes * fraction


@pytest.mark.parametrize("storage", Storage)
def test_capacity_equals_a_linear_search(storage: Storage) -> None:
    spec = replace(tiny_spec(storage=storage, registers=2, num_branches=2), requested_sessions=20, model_owned_bytes=77)
    for free_bytes in range(spec.required_bytes(1), spec.required_bytes(4), 501):
        budget = max(int(free_bytes * 0.8), spec.required_bytes(1))
        expected = max(n for n in range(1, 21) if spec.required_bytes(n) <= budget)
        assert spec.capacity(free_bytes, 0.8) == expected


def test_too_little_memory_is_an_error_with_the_numbers() -> None:
    need = LINGBOT_832X480.required_bytes(1)
    assert LINGBOT_832X480.capacity(need, 0.1) == 1
    with pytest.raises(BudgetTooSmall, match=rf"{need} bytes .*but {need - 1} bytes") as caught:
        LINGBOT_832X480.capacity(need - 1, 0.9)
    assert caught.value.required_bytes == need
    assert caught.value.free_bytes == need - 1


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        LINGBOT_832X480.capacity(10**12, fraction)


def test_pages_count_history_one_chunk_in_flight_and_two_reserved() -> None:
    spec = tiny_spec(storage=Storage.PAGES, num_branches=2)  # sink 3, window 6, chunk 3
    assert spec.num_pages(4) == 2 * (4 * 9 + 3)
    page_bytes = spec.tokens_per_latent_frame * spec.kv_bytes_per_token
    assert spec.storage_bytes(4) == (2 * (4 * 9 + 3) + 2) * page_bytes
    assert replace(spec, scratch_pages=5).num_pages(4) == 2 * (4 * 9 + 3 + 5)


def test_extents_count_registers_once_per_branch() -> None:
    spec = tiny_spec(num_branches=2, registers=5, tokens=4)
    assert spec.storage_bytes(3) == 3 * 2 * ((3 + 6) * 4 + 5) * spec.kv_bytes_per_token


def test_branches_of_other_ranks_take_no_storage() -> None:
    both = tiny_spec(num_branches=2)
    one = replace(both, branches=(Branch(name="positive", local_slot=None), Branch(name="negative", local_slot=0)))
    assert both.storage_bytes(1) == 2 * one.storage_bytes(1)
    assert one.local_slot(1) == 0
    with pytest.raises(ValueError, match=r"branch 0 \('positive'\) is not on this worker"):
        one.local_slot(0)
    with pytest.raises(ValueError, match=r"branch must be 0\.\.1, got 2"):
        one.local_slot(2)


def test_shared_cross_store_is_counted_once() -> None:
    own = CrossStoreSpec(name="image", num_tokens=7, num_heads=3, head_dim=16)
    spec = tiny_spec(num_branches=2, cross_stores=(own,))
    shared = replace(spec, cross_stores=(replace(own, shared_between_branches=True),))
    assert spec.cross_attention_bytes == 2 * shared.cross_attention_bytes
    assert shared.cross_attention_bytes == 2 * 2 * 7 * 3 * 16 * 4


def test_storage_follows_the_window() -> None:
    assert tiny_spec(window=6).effective_storage is Storage.EXTENTS
    assert tiny_spec(window=None).effective_storage is Storage.PAGES
    assert tiny_spec(window=6, storage=Storage.PAGES).effective_storage is Storage.PAGES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_latent_frames": 2}, r"window_latent_frames must be at least 3 \(latent_frames_per_chunk\), got 2"),
        ({"window_latent_frames": 6.0}, "window_latent_frames must be an integer, got 6.0"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_layers": True}, "num_layers must be an integer, got True"),
        ({"sink_latent_frames": -1}, "sink_latent_frames must be at least 0, got -1"),
        ({"worker_owned_bytes": -1}, "worker_owned_bytes must be at least 0, got -1"),
        ({"scratch_pages": -1}, "scratch_pages must be at least 0, got -1"),
        ({"window_latent_frames": None, "max_latent_frames": 2}, "max_latent_frames must be at least 3"),
        ({"window_latent_frames": None, "storage": Storage.EXTENTS}, "'extents' needs a bounded window"),
        ({"window_latent_frames": None, "at_window": AtWindow.RESTART}, "'restart' needs a bounded window"),
        ({"branches": ()}, "branches: local slots"),
        ({"branches": (Branch(name="a", local_slot=None),)}, "branches: local slots"),
        ({"branches": (Branch(name="a", local_slot=1),)}, "branches: local slots"),
        ({"branches": (Branch(name="a", local_slot=0), Branch(name="b", local_slot=0))}, "branches: local slots"),
        ({"branches": (Branch(name="a", local_slot=0), Branch(name="a", local_slot=1))}, "branches: names must differ"),
        ({"cross_stores": (CrossStoreSpec(name="t", num_tokens=0, num_heads=1),)}, r"cross_stores\[t\].num_tokens"),
        ({"cross_stores": (CrossStoreSpec(name="t", num_tokens=1, num_heads=0),)}, r"cross_stores\[t\].num_heads"),
        (
            {"cross_stores": (CrossStoreSpec(name="t", num_tokens=1, num_heads=1, head_dim=0),)},
            r"cross_stores\[t\].head_dim",
        ),
        ({"cross_stores": (CrossStoreSpec(name="t", num_tokens=1, num_heads=1),) * 2}, "cross_stores: names"),
    ],
)
def test_impossible_geometry_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(tiny_spec(), **changes)
