"""Worker processes that do not each load torch: one process has imported it, and is forked for each of them.

A fork runs `worldmodel.worker.main`, in a session of its own and with the environment of a worker. What
`python -m worldmodel.worker` does beyond that (the interpreter's start) is tested where one is spawned.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
from types import TracebackType

from server.worker_process import worker_environment

NUMBER = struct.Struct("!i")
"""What a worker's keeper sends: first the process id, and when the process has ended its exit code."""


class ForkedWorker:
    """A worker process; the names are those of `subprocess.Popen`."""

    def __init__(self, keeper: socket.socket) -> None:
        self._keeper = keeper
        self._code: int | None = None
        (self.pid,) = NUMBER.unpack(keeper.recv(NUMBER.size))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code, negative for a signal. Raises TimeoutError."""
        if self._code is None:
            self._keeper.settimeout(timeout)
            (self._code,) = NUMBER.unpack(self._keeper.recv(NUMBER.size))
            self._keeper.close()
        return self._code

    def end(self) -> None:
        """Kill the process if it still runs, and wait until it is gone."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


class Nursery:
    """The process that is forked, for as long as the context lasts."""

    def __enter__(self) -> Nursery:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.worker_nursery", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=worker_environment(1),
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait()

    def spawn(self, server: socket.socket) -> ForkedWorker:
        """Start a worker on this end of a socket pair, of which the caller keeps no copy open."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"w"], [server.fileno(), theirs.fileno()])
        return ForkedWorker(ours)


def be_worker(socket_fd: int) -> int:
    from worldmodel import worker

    os.setsid()
    try:
        return worker.main(["--socket-fd", str(socket_fd)])
    except SystemExit as exit:
        return int(exit.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1


def keep_worker(worker_fd: int, keeper: socket.socket) -> None:
    """Fork a worker, and say its id and how it ended."""
    pid = os.fork()
    if pid == 0:
        keeper.close()
        os._exit(be_worker(worker_fd))
    os.close(worker_fd)
    keeper.send(NUMBER.pack(pid))
    _, status = os.waitpid(pid, 0)
    keeper.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def main(socket_fd: int) -> None:
    import worldmodel.fake
    import worldmodel.runtime

    assert worldmodel.fake, worldmodel.runtime
    # The kernel removes keepers that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=socket_fd) as requests:
        while True:
            message, fds, _, _ = socket.recv_fds(requests, 1, 2)
            if not message:
                return
            worker_fd, keeper_fd = fds
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                keep_worker(worker_fd, socket.socket(fileno=keeper_fd))
                os._exit(0)
            os.close(worker_fd)
            os.close(keeper_fd)


if __name__ == "__main__":
    main(int(sys.argv[1]))
