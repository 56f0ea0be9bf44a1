"""The tick transaction: every failure point leaves the session as it was, and sessions do not see each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pytest

from kvcache.cache import KVCache
from kvcache.cross_store import CrossStores
from kvcache.errors import IntegrityError
from kvcache.lease import Lease
from kvcache.page_table import PageTable
from kvcache.transaction import ChunkTransaction
from tests.support.fake_model import (
    bad_event,
    close_session,
    ignore_progress,
    image,
    keys,
    load_fake,
    open_session,
    pixels,
    reset_session,
    start_fake,
    tick,
)
from worldmodel.errors import LoadFailed, OutcomeUnknown, RequestRefused, TickRolledBack
from worldmodel.fake import FakeAdapter
from worldmodel.messages import LoadStage, MediaFormat, StartWorker
from worldmodel.observations import describe_array
from worldmodel.runtime import Runtime

SINK_AND_WINDOW_CHUNKS = 3
CHUNKS_BEFORE_FAILURE = (0, 1, SINK_AND_WINDOW_CHUNKS, SINK_AND_WINDOW_CHUNKS + 2)
"""Failures are injected with an empty, partial, full and slid window."""


class Injected(RuntimeError):
    """What the tests raise inside a tick."""


def fail(*_: object, **__: object) -> NoReturn:
    raise Injected


def play(runtime: Runtime, name: str, chunks: range) -> list[bytes]:
    """Run chunks with keys that differ from chunk to chunk."""
    return [pixels(runtime, tick(name, index, keys(index, "wasdijkl"[index % 8]))) for index in chunks]


def undisturbed(num_chunks: int) -> list[bytes]:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    return play(runtime, "a", range(num_chunks))


# ---------------------------------------------------------------- failures of a tick


@pytest.mark.parametrize("num_before", CHUNKS_BEFORE_FAILURE)
@pytest.mark.parametrize("kind", ["early", "late", "incomplete", "wrong_events"])
def test_a_model_failure_leaves_the_session_as_it_was(kind: str, num_before: int) -> None:
    runtime = load_fake(failures=[{"kind": kind, "chunk_index": num_before}])
    runtime.open(open_session("a"), image())
    shown = play(runtime, "a", range(num_before))
    before = runtime.memory()
    with pytest.raises(TickRolledBack, match=f"chunk {num_before} failed and was rolled back") as caught:
        runtime.tick(tick("a", num_before, keys(99, "d")))
    assert not caught.value.transient
    after = runtime.memory()
    assert (after.free_pages, after.sessions) == (before.free_pages, before.sessions)
    shown += play(runtime, "a", range(num_before, num_before + 3))
    assert shown == undisturbed(num_before + 3)


@pytest.mark.parametrize("num_before", CHUNKS_BEFORE_FAILURE)
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (KVCache, "lease"),
        (Lease, "begin_chunk"),
        (PageTable, "stage"),
        (FakeAdapter, "generate"),
        (ChunkTransaction, "write"),
        (ChunkTransaction, "cross_store"),
        (ChunkTransaction, "visible"),
        (ChunkTransaction, "commit"),
    ],
)
def test_a_failure_at_each_step_leaves_the_session_as_it_was(
    owner: type, method: str, num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    shown = play(runtime, "a", range(num_before))
    before = runtime.memory()
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        with pytest.raises(TickRolledBack) as caught:
            runtime.tick(tick("a", num_before, keys(99, "d")))
    assert isinstance(caught.value.__cause__, Injected)
    assert runtime.memory().free_pages == before.free_pages
    shown += play(runtime, "a", range(num_before, num_before + 3))
    assert shown == undisturbed(num_before + 3)


@pytest.mark.parametrize(("owner", "method"), [(PageTable, "commit"), (CrossStores, "commit"), (PageTable, "rollback")])
def test_a_failure_inside_commit_or_rollback_is_an_unknown_outcome(
    owner: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = load_fake(failures=[{"kind": "late", "chunk_index": 1}] if method == "rollback" else [])
    runtime.open(open_session("a"), image())
    play(runtime, "a", range(1))
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        with pytest.raises(OutcomeUnknown, match="could not be rolled back"):
            runtime.tick(tick("a", 1))
    with pytest.raises(RequestRefused, match="reset or close it") as caught:
        runtime.tick(tick("a", 1))
    assert caught.value.code == "session_failed"


def leave(*_: object) -> None:
    """Do nothing in place of a rollback, and say nothing about it."""


@pytest.mark.parametrize("blind_to", ["integrity", "footprint"])
def test_a_rollback_that_left_something_behind_is_an_unknown_outcome(
    blind_to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that stay taken are noticed by either check alone."""
    runtime = load_fake(failures=[{"kind": "late", "chunk_index": 1}])
    runtime.open(open_session("a"), image())
    play(runtime, "a", range(1))
    with monkeypatch.context() as patch:
        patch.setattr(PageTable, "rollback", leave)
        if blind_to == "integrity":
            patch.setattr(KVCache, "check_integrity", leave)
        else:
            patch.setattr(Runtime, "_footprint", leave)
        with pytest.raises(OutcomeUnknown, match="could not be rolled back"):
            runtime.tick(tick("a", 1))
    with pytest.raises(RequestRefused, match="reset or close it"):
        runtime.tick(tick("a", 1))


def test_an_error_that_names_its_outcome_is_passed_on() -> None:
    runtime = load_fake(
        failures=[
            {"kind": "transient", "chunk_index": 0, "times": 2},
            {"kind": "refuse", "chunk_index": 1},
        ]
    )
    runtime.open(open_session("a"), image())
    for _ in range(2):
        with pytest.raises(TickRolledBack, match="for this once") as transient:
            runtime.tick(tick("a", 0))
        assert transient.value.transient
    runtime.tick(tick("a", 0))
    with pytest.raises(RequestRefused, match="as ordered") as refused:
        runtime.tick(tick("a", 1))
    assert refused.value.field == "prompt"
    runtime.tick(tick("a", 1))


def test_a_control_that_the_model_refuses_changes_nothing() -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    shown = play(runtime, "a", range(2))
    with pytest.raises(RequestRefused) as caught:
        runtime.tick(tick("a", 2, bad_event(50)))
    assert caught.value.code == "bad_control"
    assert shown + play(runtime, "a", range(2, 4)) == undisturbed(4)


@pytest.mark.parametrize("num_before", CHUNKS_BEFORE_FAILURE)
def test_a_chunk_that_is_not_finite_is_rolled_back_by_name(num_before: int) -> None:
    runtime = load_fake(failures=[{"kind": "not_finite", "chunk_index": num_before}])
    runtime.open(open_session("a"), image())
    shown = play(runtime, "a", range(num_before))
    with pytest.raises(TickRolledBack, match=f"chunk {num_before} failed .* gave latents and pictures that") as caught:
        runtime.tick(tick("a", num_before, keys(99, "d")))
    assert (caught.value.code, caught.value.transient) == ("not_finite", False)
    shown += play(runtime, "a", range(num_before, num_before + 3))
    assert shown == undisturbed(num_before + 3)


def test_lost_media_is_unknown_and_the_chunk_stays_committed() -> None:
    runtime = load_fake(failures=[{"kind": "media", "chunk_index": 0}])
    runtime.open(open_session("a"), image())
    chunk = runtime.tick(tick("a", 0))
    with pytest.raises(OutcomeUnknown, match="media of chunk 0 is lost"):
        chunk.to_host()
    assert runtime.tick(tick("a", 1)).committed.chunk_index == 1


# ---------------------------------------------------------------- what a tick gives


def test_a_committed_tick_repeats_the_identities_of_its_request() -> None:
    runtime = load_fake()
    runtime.open(open_session("a", outputs=(MediaFormat.YUV420, MediaFormat.LATENT)), image())
    request = tick("a", 0, keys(3, "w"), keys(7, "w", "d"))
    chunk = runtime.tick(request)
    committed = chunk.committed
    assert (committed.request_id, committed.session_id, committed.chunk_index) == ("tick-a-0", "a", 0)
    assert committed.applied_event_ids == (3, 7)
    assert committed.pose is not None
    assert len(committed.pose) == 16
    media, parts = chunk.to_host()
    assert (media.request_id, media.session_id, media.chunk_index) == ("tick-a-0", "a", 0)
    assert [(part.format, part.shape) for part in media.parts] == [
        (MediaFormat.YUV420, (9, 24, 32)),
        (MediaFormat.LATENT, (16, 3, 2, 4)),
    ]
    assert [part.num_bytes for part in media.parts] == [part.nbytes for part in parts]


@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_chunk_out_of_turn_is_refused(index: int) -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    runtime.tick(tick("a", 0))
    with pytest.raises(RequestRefused, match=f"chunk_index {index} in session a: expected 1") as caught:
        runtime.tick(tick("a", index))
    assert (caught.value.code, caught.value.field) == ("bad_chunk_index", "chunk_index")
    runtime.tick(tick("a", 1))


def test_sessions_that_take_turns_do_not_see_each_other() -> None:
    alone: dict[str, list[bytes]] = {}
    for name, seed in (("a", 1), ("b", 2)):
        runtime = load_fake()
        runtime.open(open_session(name, seed=seed), image(seed))
        alone[name] = play(runtime, name, range(7))
    runtime = load_fake()
    runtime.open(open_session("a", seed=1), image(1))
    runtime.open(open_session("b", seed=2), image(2))
    taking_turns: dict[str, list[bytes]] = {"a": [], "b": []}
    for index in range(7):
        for name in ("a", "b"):
            taking_turns[name] += play(runtime, name, range(index, index + 1))
    assert taking_turns == alone


# ---------------------------------------------------------------- open, reset, close


def test_more_sessions_than_fit_are_refused_until_one_is_closed() -> None:
    runtime = load_fake(sessions=2)
    runtime.open(open_session("a"), image())
    runtime.open(open_session("b"), image())
    with pytest.raises(RequestRefused, match="all 2 session places") as caught:
        runtime.open(open_session("c"), image())
    assert caught.value.code == "capacity"
    assert runtime.close(close_session("a")).memory.sessions == 1
    runtime.open(open_session("c"), image())
    assert play(runtime, "c", range(2)) == undisturbed(2)


def test_memory_limits_the_capacity() -> None:
    kv = FakeAdapter(start_fake()).kv_spec()
    assert load_fake(sessions=8, memory_bytes=kv.required_bytes(3)).info("fake").capacity_sessions == 3
    assert load_fake(sessions=8, memory_bytes=None).info("fake").capacity_sessions == 8
    with pytest.raises(LoadFailed, match=r"one session needs \d+ bytes") as caught:
        load_fake(memory_bytes=kv.required_bytes(1) - 1)
    assert caught.value.code == "out_of_memory"


def test_close_frees_every_page_and_may_be_repeated() -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    play(runtime, "a", range(6))
    for _ in range(2):
        closed = runtime.close(close_session("a"))
        assert (closed.memory.free_pages, closed.memory.sessions) == (closed.memory.total_pages, 0)
    with pytest.raises(RequestRefused, match="session a is not open"):
        runtime.tick(tick("a", 6))


def test_reset_frees_every_page_and_starts_the_same_world_again() -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    first_run = play(runtime, "a", range(6))
    reset = runtime.reset(reset_session("a"), None)
    assert reset.memory.free_pages == reset.memory.total_pages
    assert play(runtime, "a", range(6)) == first_run


def test_reset_revives_a_session_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    with monkeypatch.context() as patch:
        patch.setattr(CrossStores, "commit", fail)
        with pytest.raises(OutcomeUnknown):
            runtime.tick(tick("a", 0))
    with pytest.raises(RequestRefused, match="reset or close it"):
        runtime.tick(tick("a", 1))
    reset = runtime.reset(reset_session("a"), None)
    assert reset.memory.free_pages == reset.memory.total_pages
    assert play(runtime, "a", range(2)) == undisturbed(2)


def test_a_reset_that_fails_keeps_the_old_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_fake()
    runtime.open(open_session("a"), image())
    shown = play(runtime, "a", range(2))
    with monkeypatch.context() as patch:
        patch.setattr(FakeAdapter, "reset_state", fail)
        with pytest.raises(TickRolledBack, match="could not reset"):
            runtime.reset(reset_session("a"), None)
    assert shown + play(runtime, "a", range(2, 4)) == undisturbed(4)


def test_an_open_that_fails_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_fake(sessions=1)
    with monkeypatch.context() as patch:
        patch.setattr(FakeAdapter, "open_state", fail)
        with pytest.raises(TickRolledBack, match="could not open"):
            runtime.open(open_session("a"), image())
    assert runtime.memory().sessions == 0
    runtime.open(open_session("a"), image())
    with pytest.raises(RequestRefused, match="open already"):
        runtime.open(open_session("a"), image())


@pytest.mark.parametrize("outputs", [(), (MediaFormat.YUV420, MediaFormat.YUV420)])
def test_outputs_are_checked(outputs: tuple[MediaFormat, ...]) -> None:
    with pytest.raises(RequestRefused, match="at least one format, each once"):
        load_fake().open(open_session("a", outputs=outputs), image())


def test_a_world_model_wants_an_image_makes_no_actions_and_takes_no_observations() -> None:
    runtime = load_fake()
    with pytest.raises(RequestRefused, match="this model makes no actions"):
        runtime.open(open_session("a", outputs=(MediaFormat.ACTIONS,)), image())
    with pytest.raises(RequestRefused, match="expected a start image"):
        runtime.open(replace(open_session("a"), image=None), None)
    runtime.open(open_session("a"), image())
    arrays = {"joints": np.zeros(7)}
    request = replace(tick("a", 0), arrays=(describe_array("joints", arrays["joints"]),))
    with pytest.raises(RequestRefused, match="takes no observations"):
        runtime.tick(request, arrays)
    assert runtime.tick(tick("a", 0)).committed.chunk_index == 0


# ---------------------------------------------------------------- load


def test_load_reports_its_stages_and_leaves_every_page_free() -> None:
    seen: list[tuple[LoadStage, float]] = []
    runtime = Runtime.load(start_fake(), lambda stage, fraction, detail: seen.append((stage, fraction)))
    stages = list(dict.fromkeys(stage for stage, _ in seen))
    assert stages == [stage for stage in LoadStage if stage not in (LoadStage.SPAWN, LoadStage.READY)]
    assert seen[-1] == (LoadStage.WARM_UP, 1.0)
    memory = runtime.memory()
    assert (memory.sessions, memory.free_pages) == (0, memory.total_pages)
    info = runtime.info("fake")
    assert (info.width, info.height, info.sink_latent_frames, info.window_latent_frames) == (32, 16, 3, 6)
    assert info.total_pages == memory.total_pages


def test_an_adapter_is_told_once_that_the_warm_up_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last chunk, and before a session of anybody's: this is what keeps captures out of sessions."""
    seen: list[str] = []
    generate = FakeAdapter.generate

    def note(self: FakeAdapter, *args: Any, **kwargs: Any) -> Any:
        seen.append("chunk")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(FakeAdapter, "generate", note)
    monkeypatch.setattr(FakeAdapter, "end_warm_up", lambda _: seen.append("over"))
    load_fake()
    assert seen[0] == "chunk"
    assert seen.index("over") == len(seen) - 1


def test_an_option_in_the_way_of_the_warm_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LoadFailed("graphs: a step can't be captured", field="graphs")

    monkeypatch.setattr(FakeAdapter, "generate", refuse)
    with pytest.raises(LoadFailed, match=r"^graphs: a step can't be captured$") as failed:
        load_fake()
    assert failed.value.field == "graphs"


def test_pages_left_by_the_warm_up_stop_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "close", lambda *_: None)
    with pytest.raises(LoadFailed, match=r"warm-up left \d+ of \d+ pages and 1 sessions behind"):
        load_fake()


def test_a_session_left_by_the_warm_up_stops_the_load_even_without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    ((opening, _), *_) = FakeAdapter(start_fake()).warm_up_openings()
    monkeypatch.setattr(FakeAdapter, "warm_up_openings", lambda _: [(opening, 0)])
    monkeypatch.setattr(KVCache, "close", lambda *_: None)
    with pytest.raises(LoadFailed, match=r"warm-up left 0 of \d+ pages and 1 sessions behind"):
        load_fake()


def test_accounting_that_does_not_add_up_after_the_warm_up_stops_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def finds_a_leak(_: KVCache) -> None:
        raise IntegrityError("page 3 belongs to nobody")

    monkeypatch.setattr(KVCache, "check_integrity", finds_a_leak)
    with pytest.raises(LoadFailed, match="warm-up: page 3 belongs to nobody"):
        load_fake()


def test_a_model_that_misstates_its_frames_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldmodel.fake.CHUNK_MEDIA_FRAMES", 11)
    monkeypatch.setattr("worldmodel.fake.FIRST_CHUNK_MEDIA_FRAMES", 9)
    load_fake()
    monkeypatch.setattr(FakeAdapter, "spec", FakeAdapter(start_fake()).spec)
    monkeypatch.setattr("worldmodel.fake.CHUNK_MEDIA_FRAMES", 12)
    with pytest.raises(LoadFailed, match="chunk 1 has 12 media frames, the model says 11"):
        load_fake()


def test_an_unknown_model_does_not_load() -> None:
    start = StartWorker(model="nope", checkpoint="x", width=8, height=8, fps=1)
    with pytest.raises(LoadFailed, match="unknown model 'nope'"):
        Runtime.load(start, ignore_progress)
