"""Random lives of sessions on one worker: pages add up, nothing is owned twice, and all is free at the end.

The test model checks in every chunk that it sees exactly what it wrote, so a mix-up of pages fails a tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache.cache import KVCache
from kvcache.spec import Storage
from tests.support.fake_model import (
    bad_event,
    close_session,
    image,
    keys,
    open_session,
    pixels,
    reset_session,
    start_fake,
    tick,
)
from worldmodel.errors import OutcomeUnknown, RequestRefused, TickRolledBack
from worldmodel.fake import FakeAdapter
from worldmodel.residency import KV_DTYPES
from worldmodel.runtime import Adapter, Runtime

SESSIONS = 3
NAMES = "abcd"
"""One more than fit."""

FAILURES = ("early", "late", "transient", "incomplete", "wrong_events", "refuse")


@dataclass(frozen=True, slots=True)
class Step:
    act: str
    name: str
    repeats: int
    failure: str


steps = st.lists(
    st.builds(
        Step,
        act=st.sampled_from(["tick"] * 6 + ["fail"] * 3 + ["bad_control", "open", "open", "reset", "close"]),
        name=st.sampled_from(NAMES),
        repeats=st.integers(1, 4),
        failure=st.sampled_from(FAILURES),
    ),
    min_size=8,
    max_size=40,
)


def check_history(steps: Sequence[Step], storage: Storage, sink: int, window: int) -> None:
    adapter = FakeAdapter(
        start_fake(sessions=SESSIONS, sink_latent_frames=sink, window_latent_frames=window, prompt_commands=True)
    )
    spec = replace(adapter.kv_spec(), storage=storage, requested_sessions=SESSIONS)
    cache = KVCache(spec, capacity=SESSIONS, device="cpu", dtype=KV_DTYPES[spec.element_bytes])
    runtime = Runtime(cast("Adapter", adapter), cache)
    chunks: dict[str, int] = {}
    shown: dict[str, bytes] = {}
    for step in steps:
        act(runtime, step, chunks, shown)
        cache.check_integrity()
        owned = sum(min(3 * count, sink + window) for count in chunks.values())
        assert cache.free_pages + owned == cache.total_pages
        memory = runtime.memory()
        assert (memory.sessions, memory.free_pages) == (len(chunks), cache.free_pages)
    for name in NAMES:
        runtime.close(close_session(name))
    assert cache.free_pages == cache.total_pages
    cache.check_integrity()


def act(runtime: Runtime, step: Step, chunks: dict[str, int], shown: dict[str, bytes]) -> None:
    """Do one step; `chunks` counts what each open session committed, `shown` remembers pictures by chunk."""
    name, is_open = step.name, step.name in chunks
    if step.act == "open":
        if is_open or len(chunks) == SESSIONS:
            with pytest.raises(RequestRefused, match="open already" if is_open else "all 3 session places"):
                runtime.open(open_session(name), image())
        else:
            runtime.open(open_session(name), image())
            chunks[name] = 0
    elif step.act == "close":
        runtime.close(close_session(name))
        chunks.pop(name, None)
    elif not is_open:
        with pytest.raises(RequestRefused, match="is not open"):
            runtime.tick(tick(name, 0))
    elif step.act == "reset":
        runtime.reset(reset_session(name), None)
        chunks[name] = 0
    elif step.act == "bad_control":
        with pytest.raises(RequestRefused):
            runtime.tick(tick(name, chunks[name], keys(1, "w"), bad_event(2), prompt="another world"))
    elif step.act == "fail":
        for _ in range(step.repeats):
            with pytest.raises((TickRolledBack, RequestRefused)) as caught:
                runtime.tick(tick(name, chunks[name], keys(1, "d"), prompt=f"!{step.failure}"))
            assert not isinstance(caught.value, OutcomeUnknown)
    else:
        for _ in range(step.repeats):
            # Chunk k of every session, and of every life of it, is the same: they are opened alike.
            index = chunks[name]
            picture = pixels(runtime, tick(name, index, keys(index, "wasd"[index % 4])))
            assert shown.setdefault(str(index), picture) == picture
            chunks[name] += 1


geometry = {
    "storage": st.sampled_from(Storage),
    "sink": st.integers(0, 7),
    "window": st.integers(3, 10),
}


@given(steps=steps, **geometry)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_random_lives_of_sessions_keep_the_pages_in_order(
    steps: list[Step], storage: Storage, sink: int, window: int
) -> None:
    check_history(steps, storage, sink, window)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(steps=steps, **geometry)
@settings(max_examples=1500, deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
def test_many_random_lives_of_sessions_keep_the_pages_in_order(
    steps: list[Step], storage: Storage, sink: int, window: int
) -> None:
    check_history(steps, storage, sink, window)
