"""One socket's reader and outbox: who sends or is sent too much slows nobody but himself."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import pairwise
from typing import Any, cast

import pytest
from starlette.websockets import WebSocket

from server.endpoint import MAX_KEPT_FRAMES, MAX_QUEUED_FRAMES, BinaryFrame, CloseFrame, Outbox, TextFrame, serve_socket
from server.errors import CloseCode, ErrorCode, ServerError
from server.limits import NUM_FRAGMENTS
from tests.support.virtual_time import now, run_virtual, settle


class FloodedSocket:
    """A socket whose messages are all there at once and which is lost then, with `takes` not before `is_lost`.

    It reads what it is sent once `reads` is set; the operating system has room for binary frames once `takes` is.
    """

    def __init__(
        self, texts: list[str], *, reads: asyncio.Event | None = None, takes: asyncio.Event | None = None
    ) -> None:
        self._messages: deque[dict[str, Any]] = deque({"type": "websocket.receive", "text": text} for text in texts)
        self._reads = reads
        self._takes = takes
        self.is_lost = asyncio.Event()
        if takes is None:
            self.is_lost.set()
        self.sent: list[str] = []
        self.close_code: int | None = None

    def cut(self, num_fragments: int) -> None:
        """Have each message come in so many fragments."""
        for message in self._messages:
            message[NUM_FRAGMENTS] = num_fragments

    @property
    def num_unread(self) -> int:
        return len(self._messages)

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.popleft()
        await self.is_lost.wait()
        return {"type": "websocket.disconnect"}

    async def send_text(self, text: str) -> None:
        if self._reads is not None:
            await self._reads.wait()
        self.sent.append(text)

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append(data.decode())

    async def send(self, message: dict[str, Any]) -> None:
        assert message == {"type": "websocket.send"}
        if self._takes is not None:
            await self._takes.wait()

    async def close(self, code: int, reason: str) -> None:
        self.close_code = code


class Echo:
    """Answers every message, and closes after some."""

    def __init__(self, outbox: Outbox, *, closes_after: int | None = None) -> None:
        self.outbox = outbox
        self._closes_after = closes_after
        self.heard_at: list[float] = []
        self.is_lost = False

    async def on_text(self, text: str) -> None:
        self.heard_at.append(now())
        self.outbox.put(TextFrame(text=text))
        if len(self.heard_at) == self._closes_after:
            self.outbox.close(CloseCode.DONE, "enough")

    async def on_binary(self, data: bytes) -> None:
        raise AssertionError(data)

    def send_error(self, error: ServerError) -> None:
        raise AssertionError(error)

    def on_lost(self) -> None:
        self.is_lost = True


async def serve(socket: FloodedSocket, dialog: Echo, *, rate: float) -> None:
    await serve_socket(
        cast("WebSocket", socket), dialog, dialog.outbox, stall_timeout_s=1000.0, max_messages_per_second=rate
    )


class Broken(Echo):
    """Has a bug that only some messages meet."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(outbox)
        self.errors: list[ServerError] = []

    async def on_text(self, text: str) -> None:
        if text == "bug":
            raise KeyError("a secret of ours")
        await super().on_text(text)

    def send_error(self, error: ServerError) -> None:
        self.errors.append(error)


def test_of_a_bug_the_client_hears_one_sentence_and_the_log_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        dialog = Broken(Outbox())
        await serve(FloodedSocket(["x", "bug", "x"]), dialog, rate=1e6)
        assert len(dialog.heard_at) == 2
        assert [(error.code, error.message) for error in dialog.errors] == [
            (ErrorCode.INTERNAL, "the server failed to handle this message")
        ]
        assert "KeyError: 'a secret of ours'" in caplog.text

    run_virtual(main())


def test_others_have_a_turn_after_every_message() -> None:
    async def main() -> None:
        dialog = Echo(Outbox())
        turns: list[int] = []

        async def take_turns() -> None:
            while not dialog.is_lost:
                turns.append(len(dialog.heard_at))
                await asyncio.sleep(0)

        other = asyncio.create_task(take_turns())
        await serve(FloodedSocket(["x"] * 100), dialog, rate=1e6)
        await other
        assert max(after - before for before, after in pairwise(turns)) == 1

    run_virtual(main())


def test_messages_are_read_no_faster_than_allowed_and_long_ones_count_as_several() -> None:
    async def main() -> None:
        dialog = Echo(Outbox())
        began_at = now()
        await serve(FloodedSocket(["x"] * 30 + ["x" * 9 * 16 * 1024, "x"]), dialog, rate=10.0)
        waits = [at - began_at for at in dialog.heard_at]
        assert waits[9] == 0, "a second's worth may come at once"
        assert waits[29] == pytest.approx(1.9)
        assert waits[31] - waits[30] == pytest.approx(1.0)

    run_virtual(main())


def test_a_message_counts_as_often_as_it_has_fragments() -> None:
    async def main() -> None:
        dialog, socket = Echo(Outbox()), FloodedSocket(["x"] * 30)
        socket.cut(num_fragments=5)
        began_at = now()
        await serve(socket, dialog, rate=10.0)
        assert dialog.heard_at[29] - began_at == pytest.approx((29 * 5 - 10) / 10.0)

    run_virtual(main())


def test_who_does_not_read_is_not_read() -> None:
    async def main() -> None:
        reads = asyncio.Event()
        dialog = Echo(Outbox())
        socket = FloodedSocket(["x"] * 3 * MAX_QUEUED_FRAMES, reads=reads)
        serving = asyncio.create_task(serve(socket, dialog, rate=1e9))
        await asyncio.sleep(1)
        # One frame is on its way; the reader holds the message that comes next.
        assert len(dialog.heard_at) == MAX_QUEUED_FRAMES + 1
        assert socket.num_unread == 2 * MAX_QUEUED_FRAMES - 1
        reads.set()
        await serving
        assert len(dialog.heard_at) == 3 * MAX_QUEUED_FRAMES

    run_virtual(main())


def test_a_chunk_counts_as_sent_once_the_system_took_it() -> None:
    async def main() -> None:
        socket = FloodedSocket([], takes=(taken := asyncio.Event()))
        dialog, sent = Echo(Outbox()), list[int]()
        dialog.outbox.put(BinaryFrame(build=lambda: b"chunk", sent=sent.append))
        serving = asyncio.create_task(serve(socket, dialog, rate=1e6))
        await settle()
        assert (socket.sent, sent) == (["chunk"], [])
        taken.set()
        await settle()
        assert sent == [5]
        socket.is_lost.set()
        await serving

    run_virtual(main())


def test_nothing_is_heard_after_a_close() -> None:
    async def main() -> None:
        dialog = Echo(Outbox(), closes_after=2)
        await serve(FloodedSocket(["x"] * 5), dialog, rate=1e6)
        assert len(dialog.heard_at) == 2

    run_virtual(main())


def test_who_lets_too_much_wait_is_closed() -> None:
    async def main() -> None:
        outbox = Outbox()
        for _ in range(MAX_KEPT_FRAMES):
            outbox.put(TextFrame(text="x"))
        assert not outbox.closed
        outbox.put(TextFrame(text="one more"))
        outbox.put(TextFrame(text="and another"))
        assert outbox.closed
        assert len(outbox) == MAX_KEPT_FRAMES + 1
        frames = [await outbox.get() for _ in range(len(outbox))]
        assert frames[-1] == CloseFrame(code=CloseCode.TRY_LATER, reason="too slow")
        await settle()

    run_virtual(main())
