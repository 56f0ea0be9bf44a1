"""The worker process: `python -m worldmodel.worker --socket-fd N`. One model, one socket, one message at a time.

Exit codes: 0 told to stop, or the server is gone; 1 a failure of ours; 3 the model can't be served (`WorkerFailed` was
sent); 4 the device is lost; 5 page-locked memory can't be unlocked (`offload/host_registration.py`). Tracebacks go to
the log on standard error only.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from worldmodel.errors import LoadFailed, RequestRefused, TickRolledBack, WorldModelError
from worldmodel.framing import Frame, FrameReader, FramingError, receive_frame, send_frame
from worldmodel.messages import (
    CloseSession,
    FailureOutcome,
    LoadProgress,
    LoadStage,
    OpenSession,
    RequestFailed,
    ResetSession,
    StartWorker,
    StopWorker,
    Tick,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
)
from worldmodel.observations import unpack_arrays
from worldmodel.packages import check_package_origin
from worldmodel.start_image import read_image

if TYPE_CHECKING:
    from worldmodel.runtime import Runtime


EXIT_STOPPED = 0
EXIT_ERROR = 1
EXIT_LOAD_FAILED = 3
EXIT_DEVICE_LOST = 4

logger = logging.getLogger("worldmodel.worker")

Request = OpenSession | ResetSession | CloseSession | Tick


class ServerGone(Exception):
    """Report that the socket to the server broke."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker on an inherited socket and return its exit code."""
    parser = argparse.ArgumentParser(prog="worldmodel.worker", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True, help="inherited file descriptor of the server's socket")
    socket_fd = parser.parse_args(argv).socket_fd
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s worker[{os.getpid()}] %(levelname)s %(message)s", force=True
    )
    # Programs that a model starts (compilers) must not keep the server's socket open.
    os.set_inheritable(socket_fd, False)
    with socket.socket(fileno=socket_fd) as sock:
        channel = Channel(sock)
        _watch_server(sock)
        try:
            return _run(channel)
        except ServerGone as error:
            logger.info("%s", error)
            return EXIT_STOPPED
        except FramingError as error:
            logger.error("the server sent bytes that are no message: %s", error)
            return EXIT_ERROR


class Channel:
    """Messages to and from the server, and the signals that end the wait for one.

    SIGTERM ends the process at once while it waits or loads, otherwise before the next message. SIGINT is the server's
    to handle.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._terminated = False
        self.may_interrupt = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True
        if self.may_interrupt:
            raise SystemExit(EXIT_STOPPED)

    def receive(self) -> Frame | None:
        """Wait for a message; None if the server closed. Raises `ServerGone`, `FramingError`, SystemExit."""
        self.may_interrupt = True
        if self._terminated:
            raise SystemExit(EXIT_STOPPED)
        try:
            frame = receive_frame(self._sock, self._reader)
        except OSError as error:
            raise ServerGone(f"the server is gone: {error}") from error
        self.may_interrupt = False
        return frame

    def send(self, message: WorkerMessage, payload: Sequence[memoryview] = ()) -> None:
        """Send a message. Raises `ServerGone`, `FrameTooLarge`."""
        try:
            send_frame(self._sock, message, payload)
        except OSError as error:
            raise ServerGone(f"the server is gone: {error}") from error


def _watch_server(sock: socket.socket) -> None:
    """End the process the moment the server's end of the socket closes, whatever it computes: no orphan stays."""

    def watch() -> None:
        poller = select.poll()
        poller.register(sock.fileno(), 0)
        while not any(events & select.POLLHUP for _, events in poller.poll()):
            continue
        os._exit(EXIT_STOPPED)

    threading.Thread(target=watch, name="server watcher", daemon=True).start()


def _run(channel: Channel) -> int:
    frame = channel.receive()
    if frame is None:
        return EXIT_STOPPED
    start = frame.message
    if not isinstance(start, StartWorker):
        logger.error("expected StartWorker first, got %s", type(start).__name__)
        return EXIT_ERROR
    channel.may_interrupt = True
    try:
        check_package_origin()
        runtime = _load(channel, start)
    except LoadFailed as error:
        # Why is the server's to say: it logs what it is sent, and its exit repeats that.
        logger.error("the model could not be loaded")
        channel.send(WorkerFailed(code=error.code, message=error.message))
        return EXIT_LOAD_FAILED
    return _serve(channel, runtime)


def _load(channel: Channel, start: StartWorker) -> Runtime:
    """Load the model and report it. Raises `LoadFailed`, whatever went wrong, or `ServerGone`."""

    def progress(stage: LoadStage, fraction: float, detail: str) -> None:
        channel.send(LoadProgress(stage=stage, fraction=fraction, detail=detail))

    progress(LoadStage.SPAWN, 0.5, "")
    try:
        # Imported here, so that the server hears of the process before torch has loaded.
        import torch

        from worldmodel.runtime import Runtime

        torch.set_num_threads(start.cpu_threads)
        progress(LoadStage.SPAWN, 1.0, "")
        runtime = Runtime.load(start, progress)
    except (LoadFailed, ServerGone):
        raise
    except WorldModelError as error:
        raise LoadFailed(error.message, code=error.code, field=error.field) from error
    except Exception as error:
        # Nobody has turned this one into a sentence, so the log gets the whole of it.
        logger.exception("loading broke")
        raise LoadFailed(f"{type(error).__name__}: {error}") from error
    channel.send(WorkerReady(info=runtime.info(start.model), memory=runtime.memory()))
    return runtime


def _serve(channel: Channel, runtime: Runtime) -> int:
    from worldmodel.runtime import DeviceLost

    while True:
        frame = channel.receive()
        if frame is None or isinstance(frame.message, StopWorker):
            return EXIT_STOPPED
        request = frame.message
        if not isinstance(request, OpenSession | ResetSession | CloseSession | Tick):
            logger.error("unexpected %s from the server", type(request).__name__)
            return EXIT_ERROR
        try:
            _answer(channel, request, frame.payload, runtime)
        except ServerGone:
            raise
        except DeviceLost:
            logger.exception("session %s request %s: the device is lost", request.session_id, request.request_id)
            return EXIT_DEVICE_LOST
        except Exception as error:
            _report(channel, request, error, runtime)


def _answer(channel: Channel, request: Request, payload: memoryview, runtime: Runtime) -> None:
    """Carry out one request and send what it gives; a tick is answered as soon as it is committed, then with media."""
    match request:
        case OpenSession():
            image = None if request.image is None else read_image(request.image, payload)
            channel.send(runtime.open(request, image))
        case ResetSession():
            image = None if request.image is None else read_image(request.image, payload)
            channel.send(runtime.reset(request, image))
        case CloseSession():
            channel.send(runtime.close(request))
        case Tick():
            chunk = runtime.tick(request, unpack_arrays(request.arrays, payload))
            channel.send(chunk.committed)
            media, parts = chunk.to_host()
            channel.send(media, parts)


def _report(channel: Channel, request: Request, error: Exception, runtime: Runtime) -> None:
    """Log a failure with its traceback and tell the server what is left, without details of ours."""
    code, field, transient = "internal_error", None, False
    text = f"{type(request).__name__} failed in a way that was not foreseen"
    outcome = FailureOutcome.UNKNOWN
    if isinstance(error, WorldModelError):
        code, field, text = error.code, error.field, error.message
    if isinstance(error, RequestRefused):
        outcome = FailureOutcome.REFUSED
    elif isinstance(error, TickRolledBack):
        outcome, transient = FailureOutcome.ROLLED_BACK, error.transient
    where = f"session {request.session_id} request {request.request_id}"
    if outcome is FailureOutcome.REFUSED:
        logger.info("%s: refused: %s", where, text)
    else:
        logger.error("%s: %s: %s", where, outcome, text, exc_info=error)
    channel.send(
        RequestFailed(
            request_id=request.request_id,
            session_id=request.session_id,
            outcome=outcome,
            code=code,
            message=text,
            memory=runtime.memory(),
            field=field,
            transient=transient,
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
