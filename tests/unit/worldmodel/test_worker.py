"""The worker process end to end over its socket, with the deterministic test model."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from offload.host_registration import EXIT_STUCK
from server.worker_process import describe_exit, worker_environment
from tests.support.fake_model import bad_event, close_session, image, keys, open_session, start_fake, tick
from tests.support.worker_nursery import ForkedWorker, Nursery
from worldmodel import worker
from worldmodel.framing import Frame, FrameReader, Message, receive_frame, send_frame
from worldmodel.messages import (
    ChunkMedia,
    FailureOutcome,
    LoadProgress,
    RequestFailed,
    SessionClosed,
    SessionOpened,
    StartWorker,
    StopWorker,
    TickCommitted,
    WorkerFailed,
    WorkerReady,
)

EXIT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    process: subprocess.Popen[bytes] | ForkedWorker
    sock: socket.socket
    reader: FrameReader

    def send(self, message: Message, payload: bytes = b"") -> None:
        send_frame(self.sock, message, [payload])

    def receive(self) -> Frame:
        frame = receive_frame(self.sock, self.reader)
        assert frame is not None, "the worker closed its socket"
        return frame

    def until_loaded(self) -> Message:
        """Skip the progress messages."""
        while isinstance(message := self.receive().message, LoadProgress):
            continue
        return message

    def exit_code(self) -> int:
        return self.process.wait(timeout=EXIT_TIMEOUT_S)


LEAKING_WORKER = (
    "-c",
    "from kvcache.page_table import PageTable; PageTable.clear = lambda table: None;"
    "from worldmodel.worker import main; raise SystemExit(main())",
)
"""The worker with a fault in its bookkeeping: closed sessions keep their pages."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as it:
        yield it


@contextlib.contextmanager
def spawned(*program: str) -> Iterator[RunningWorker]:
    """Run a program of its own, by default the real one."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *(program or ("-m", "worldmodel.worker")), "--socket-fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=worker_environment(1),
                start_new_session=True,
            )
        try:
            yield RunningWorker(process=process, sock=ours, reader=FrameReader())
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def forked(nursery: Nursery) -> Iterator[RunningWorker]:
    """Run the same `main` in a process that need not load torch."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = nursery.spawn(theirs)
        try:
            yield RunningWorker(process=process, sock=ours, reader=FrameReader())
        finally:
            process.end()


@contextlib.contextmanager
def ready(nursery: Nursery, **options: object) -> Iterator[RunningWorker]:
    with forked(nursery) as running:
        running.send(start_fake(**options))  # type: ignore[arg-type]
        assert isinstance(running.until_loaded(), WorkerReady)
        yield running


def hang(running: RunningWorker) -> None:
    """Start a chunk that never ends, and return once the worker has taken its message from the socket."""
    running.send(tick("a", 0, prompt="!hang"))
    unread = array.array("i", [1])
    while unread[0]:
        fcntl.ioctl(running.sock, termios.TIOCOUTQ, unread)


@pytest.fixture
def channel() -> Iterator[tuple[worker.Channel, socket.socket]]:
    """A worker's channel in this process, and the server's end of it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield worker.Channel(theirs), ours
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_session_lives_from_open_to_close_and_stop_ends_the_process() -> None:
    with spawned() as running:
        running.send(start_fake())
        assert isinstance(running.until_loaded(), WorkerReady)
        running.send(open_session("a"), image().tobytes())
        opened = running.receive().message
        assert isinstance(opened, SessionOpened)
        assert opened.memory.sessions == 1
        running.send(tick("a", 0, keys(5, "w")))
        committed = running.receive().message
        assert isinstance(committed, TickCommitted)
        assert committed.applied_event_ids == (5,)
        frame = running.receive()
        assert isinstance(frame.message, ChunkMedia)
        assert frame.message.request_id == committed.request_id
        assert len(frame.payload) == 9 * 32 * 24
        running.send(tick("a", 1, bad_event(6)))
        failed = running.receive().message
        assert isinstance(failed, RequestFailed)
        assert (failed.outcome, failed.code) == (FailureOutcome.REFUSED, "bad_control")
        running.send(close_session("a"))
        closed = running.receive().message
        assert isinstance(closed, SessionClosed)
        assert closed.memory.free_pages == closed.memory.total_pages
        running.send(StopWorker())
        assert running.exit_code() == 0


def test_failures_say_what_is_left_and_nothing_of_their_cause(nursery: Nursery) -> None:
    with ready(nursery, failures=[{"kind": "late", "chunk_index": 0}, {"kind": "media", "chunk_index": 1}]) as running:
        running.send(open_session("a"), image().tobytes()[:-1])
        short = running.receive().message
        assert isinstance(short, RequestFailed)
        assert (short.outcome, short.field) == (FailureOutcome.REFUSED, "image")
        running.send(open_session("a"), image().tobytes())
        assert isinstance(running.receive().message, SessionOpened)
        running.send(tick("a", 0))
        rolled_back = running.receive().message
        assert isinstance(rolled_back, RequestFailed)
        assert rolled_back.outcome is FailureOutcome.ROLLED_BACK
        assert rolled_back.message == "chunk 0 failed and was rolled back"
        running.send(tick("a", 0))
        assert isinstance(running.receive().message, TickCommitted)
        assert isinstance(running.receive().message, ChunkMedia)
        running.send(tick("a", 1))
        assert isinstance(running.receive().message, TickCommitted)
        lost = running.receive().message
        assert isinstance(lost, RequestFailed)
        assert (lost.outcome, lost.code) == (FailureOutcome.UNKNOWN, "media_lost")


def test_a_model_that_can_not_be_loaded_is_reported_and_ends_the_process(nursery: Nursery) -> None:
    with forked(nursery) as running:
        running.send(start_fake(load_error="the checkpoint lacks vae/config.json"))
        failed = running.until_loaded()
        assert failed == WorkerFailed(code="load_failed", message="the checkpoint lacks vae/config.json")
        assert running.exit_code() == 3


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "early",
            "warm-up: chunk 0 failed and was rolled back: RuntimeError: the chunk fails early, as ordered",
        ),
        ("refuse", "warm-up: refused, as ordered"),
        (
            "not_finite",
            "warm-up: chunk 0 failed and was rolled back: the model gave latents and pictures that are not finite "
            "numbers",
        ),
        ("media", "warm-up: the media of chunk 0 is lost: RuntimeError: the media is lost, as ordered"),
    ],
)
def test_a_warm_up_that_fails_is_reported_and_ends_the_process(kind: str, text: str, nursery: Nursery) -> None:
    with forked(nursery) as running:
        running.send(start_fake(warm_up_failure=kind))
        assert running.until_loaded() == WorkerFailed(code="warm_up_failed", message=text)
        assert running.exit_code() == 3


def test_a_warm_up_that_leaves_pages_is_reported_and_ends_the_process() -> None:
    with spawned(*LEAKING_WORKER) as running:
        running.send(start_fake(sessions=2))
        failed = running.until_loaded()
        assert failed == WorkerFailed(code="warm_up_failed", message="warm-up left 9 of 18 pages and 0 sessions behind")
        assert running.exit_code() == 3


def test_a_process_that_dies_in_its_warm_up_is_not_taken_for_ready(nursery: Nursery) -> None:
    with forked(nursery) as running:
        running.send(start_fake(warm_up_failure="crash"))
        with pytest.raises(AssertionError, match="the worker closed its socket"):
            running.until_loaded()
        assert running.exit_code() == -signal.SIGKILL


def test_an_unforeseen_error_while_loading_is_reported_too(nursery: Nursery) -> None:
    with forked(nursery) as running:
        running.send(StartWorker(model="fake", checkpoint="", width=32, height=16, fps=12, cpu_threads=0))
        failed = running.until_loaded()
        assert isinstance(failed, WorkerFailed)
        assert failed.code == "load_failed"
        assert "RuntimeError" in failed.message
        assert running.exit_code() == 3


@pytest.mark.parametrize("when", ["before the start", "loading", "idle", "computing"])
def test_the_process_ends_when_the_server_is_gone(when: str, nursery: Nursery) -> None:
    with forked(nursery) as running:
        if when == "loading":
            running.send(start_fake(load_ms=600_000.0))
            running.receive()
        elif when != "before the start":
            running.send(start_fake(prompt_commands=True))
            running.until_loaded()
        if when == "computing":
            running.send(open_session("a"), image().tobytes())
            running.receive()
            hang(running)
        running.sock.close()
        assert running.exit_code() == 0


@pytest.mark.parametrize("when", ["loading", "idle"])
def test_sigterm_ends_a_process_that_waits_or_loads(when: str, nursery: Nursery) -> None:
    with forked(nursery) as running:
        running.send(start_fake(load_ms=600_000.0 if when == "loading" else 0.0))
        if when == "loading":
            running.receive()
        else:
            running.until_loaded()
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == 0


def test_sigterm_lets_the_current_message_end(channel: tuple[worker.Channel, socket.socket]) -> None:
    ours, server = channel
    send_frame(server, tick("a", 0))
    send_frame(server, tick("a", 1))
    assert ours.receive() is not None
    os.kill(os.getpid(), signal.SIGTERM)
    ours.send(WorkerFailed(code="x", message="still able to answer"))
    with pytest.raises(SystemExit) as caught:
        ours.receive()
    assert caught.value.code == 0


def test_sigint_is_the_servers(nursery: Nursery) -> None:
    with ready(nursery) as running:
        running.process.send_signal(signal.SIGINT)
        running.send(open_session("a"), image().tobytes())
        assert isinstance(running.receive().message, SessionOpened)


def test_bytes_that_are_no_message_end_the_process(nursery: Nursery) -> None:
    with ready(nursery) as running:
        running.sock.sendall(b"\xff" * 64)
        assert running.exit_code() == 1


def test_the_server_says_what_an_exit_code_without_a_message_means() -> None:
    assert describe_exit(worker.EXIT_DEVICE_LOST).endswith("exit code 4: its device is lost")
    assert "page-locked memory can't be unlocked" in describe_exit(EXIT_STUCK)
    assert describe_exit(worker.EXIT_ERROR).endswith("exit code 1")
