"""Frames that are no whole messages: how many of them a socket may send, and what they count as."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from server.config import LimitsSection
from server.connection_config import ConnectionConfig
from server.limits import NUM_FRAGMENTS
from server.websocket_connection import DISCARD_MESSAGES, DISCARD_S, QUIET_S, BoundedWebSocket
from tests.support.virtual_time import run_virtual, settle
from tests.support.wires import Wire

LIMITS = LimitsSection(max_fragments=4, max_control_frames_per_second=10.0)
MAX_BYTES = 4096


class Peer:
    """A client whose bytes are handed over by hand, and an application that keeps what it receives."""

    def __init__(self, limits: LimitsSection, *, ping_s: float | None = None) -> None:
        self.received: list[dict[str, Any]] = []
        config = ConnectionConfig(
            self._serve,
            limits=limits,
            interface="asgi3",
            log_config=None,
            ws_ping_interval=ping_s,
            ws_ping_timeout=ping_s,
            ws_max_size=MAX_BYTES,
        )
        config.load()
        self.wire = Wire()
        self.server = BoundedWebSocket(config, ServerState(), {}, asyncio.get_running_loop())
        self.server.connection_made(self.wire)
        self._client = ClientProtocol(parse_uri("ws://here/"))

    async def _serve(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while not self.received or self.received[-1]["type"] != "websocket.disconnect":
            self.received.append(await receive())

    def connect(self) -> None:
        self._client.send_request(self._client.connect())
        self.server.data_received(b"".join(self._client.data_to_send()))

    def send(self, *frames: Frame) -> None:
        self.server.data_received(b"".join(frame.serialize(mask=True) for frame in frames))

    @property
    def close(self) -> tuple[int, str] | None:
        """What the server's close frame says, if it sent one."""
        if self.wire.written:
            self._client.receive_data(self.wire.written)
            self.wire.written = b""
        close = self._client.close_rcvd
        return None if close is None else (close.code, close.reason)


@asynccontextmanager
async def connected(limits: LimitsSection = LIMITS) -> AsyncIterator[Peer]:
    peer = Peer(limits)
    peer.connect()
    await settle()
    yield peer
    peer.server.connection_lost(None)
    await settle()
    assert not peer.server.tasks
    assert peer.received[-1]["type"] == "websocket.disconnect"


@asynccontextmanager
async def pinged(ping_s: float) -> AsyncIterator[Peer]:
    """A peer that is pinged, and answers nothing by itself."""
    peer = Peer(LIMITS, ping_s=ping_s)
    peer.connect()
    await settle()
    yield peer
    peer.server.connection_lost(None)
    await settle()


def test_a_peer_without_a_pong_is_lost_but_not_while_it_takes_a_frame() -> None:
    async def main() -> None:
        async with pinged(5.0) as peer:
            peer.server.pause_writing()
            await asyncio.sleep(47)
            assert not peer.wire.is_closed
            peer.server.resume_writing()
            await asyncio.sleep(4.9)
            assert not peer.wire.is_closed, "the pong has its time from the end of the frame on"
            await asyncio.sleep(0.2)
            assert peer.wire.is_closed
            assert peer.close == (1011, "keepalive ping timeout")

    run_virtual(main())


def test_pings_go_on_after_a_pong_that_came_late() -> None:
    async def main() -> None:
        async with pinged(5.0) as peer:
            peer.server.pause_writing()
            await asyncio.sleep(12)
            peer.server.resume_writing()
            peer.send(Frame(Opcode.PONG, peer.wire.written[-4:]))
            # The next ping goes at once, since the last one took longer than their distance.
            await asyncio.sleep(4.9)
            assert not peer.wire.is_closed
            await asyncio.sleep(0.2)
            assert peer.wire.is_closed

    run_virtual(main())


def test_a_peer_that_vanished_is_lost_within_twice_the_ping_time() -> None:
    async def main() -> None:
        async with pinged(5.0) as peer:
            await asyncio.sleep(9.9)
            assert not peer.wire.is_closed
            await asyncio.sleep(0.2)
            assert peer.wire.is_closed

    run_virtual(main())


class RefusedPeer(Peer):
    """A client that the application answers with an HTTP status, its body in parts, where others are accepted."""

    parts = (b"for", b"bidden")

    async def _serve(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await receive()
        await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
        for part in self.parts:
            is_last = part is self.parts[-1]
            await send({"type": "websocket.http.response.body", "body": part, "more_body": not is_last})
        self.received.append(await receive())


def fragments(number: int, data: bytes = b"x") -> list[Frame]:
    """One text message in as many fragments."""
    opcodes = [Opcode.TEXT, *[Opcode.CONT] * (number - 1)]
    return [Frame(opcode, data, fin=index == number - 1) for index, opcode in enumerate(opcodes)]


@pytest.mark.parametrize("data", [b"x", b""], ids=["filled", "empty"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_message_says_in_how_many_fragments_it_came(number: int, data: bytes) -> None:
    async def main() -> None:
        async with connected() as peer:
            peer.send(*fragments(number, data), *fragments(1))
            await settle()
            texts = [(message["text"], message[NUM_FRAGMENTS]) for message in peer.received]
            assert texts == [(data.decode() * number, number), ("x", 1)]
            assert peer.close is None

    run_virtual(main())


@pytest.mark.parametrize("data", [b"x", b""], ids=["filled", "empty"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_message_in_too_many_fragments_closes_the_socket(at_once: bool, data: bytes) -> None:
    async def main() -> None:
        async with connected() as peer:
            frames = [*fragments(1000, data)[:999], Frame(Opcode.CONT, b"", fin=True), *fragments(1)]
            if at_once:
                peer.send(*frames)
            else:
                for frame in frames[:5]:
                    peer.send(frame)
            await settle()
            assert peer.close == (1009, "a message has more than 4 fragments (limits.max_fragments)")
            assert [message["type"] for message in peer.received] == ["websocket.disconnect"]
            assert len(peer.server.frames) <= 4

    run_virtual(main())


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.PONG])
def test_a_second_has_so_many_control_frames_and_no_more(opcode: Opcode) -> None:
    async def main() -> None:
        async with connected() as peer:
            for _ in range(3):
                peer.send(*[Frame(opcode, b"")] * 10)
                assert peer.close is None
                await asyncio.sleep(1)
            peer.send(*[Frame(opcode, b"")] * 500, *fragments(1))
            await settle()
            reason = "more than 10 pings and pongs a second (limits.max_control_frames_per_second)"
            assert peer.close == (1008, reason)
            assert [message["type"] for message in peer.received] == ["websocket.disconnect"]

    run_virtual(main())


@pytest.mark.parametrize("number", [1, 2])
def test_text_that_is_not_utf_8_closes_the_socket_and_leaves_no_traceback(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with connected() as peer:
            good = "grüße".encode()
            peer.send(*fragments(1, good), Frame(Opcode.TEXT, good[:3], fin=False), Frame(Opcode.CONT, good[3:]))
            await settle()
            assert [message["text"] for message in peer.received] == ["grüße", "grüße"]
            peer.send(*fragments(number, b"\xc3"), *fragments(1))
            await settle()
            assert peer.close == (1007, "a text frame is not UTF-8")
            assert [message["type"] for message in peer.received[2:]] == ["websocket.disconnect"]

    run_virtual(main())
    assert caplog.text == ""


def too_large() -> bytes:
    """The begin of a message that is above the limit."""
    return Frame(Opcode.BINARY, bytes(MAX_BYTES + 1)).serialize(mask=True)


@pytest.mark.parametrize("sent_on", ["nothing", "at once", "slowly", "too much"])
def test_what_a_refused_client_still_sends_is_dropped_within_bounds(sent_on: str) -> None:
    async def main() -> None:
        async with connected() as peer:
            peer.send(*fragments(1))
            peer.server.data_received(too_large()[:20])
            await settle()
            assert peer.close == (1009, f"a message has more than {MAX_BYTES} bytes (limits.max_message_bytes)")
            assert not peer.wire.is_closed, "a client must have time to read why"
            assert peer.wire.is_reading
            assert [message["type"] for message in peer.received] == ["websocket.receive", "websocket.disconnect"]
            match sent_on:
                case "nothing":
                    await asyncio.sleep(QUIET_S + 0.01)
                case "at once" | "too much":
                    for _ in range(DISCARD_MESSAGES):
                        peer.server.data_received(bytes(MAX_BYTES))
                    assert not peer.wire.is_closed
                    if sent_on == "too much":
                        peer.server.data_received(b"x")
                    else:
                        await asyncio.sleep(2 * QUIET_S + 0.01)
                case "slowly":
                    for _ in range(round(2 * DISCARD_S / QUIET_S) - 1):
                        peer.server.data_received(b"x")
                        await asyncio.sleep(QUIET_S / 2)
                        assert not peer.wire.is_closed
                    peer.server.data_received(b"x")
                    await asyncio.sleep(QUIET_S / 2 + 0.01)
            assert peer.wire.is_closed
            assert peer.wire.written == b""

    run_virtual(main())


def test_fragments_that_are_too_large_together_are_refused_by_the_same_name() -> None:
    async def main() -> None:
        async with connected() as peer:
            peer.send(*fragments(2, bytes(MAX_BYTES // 2 + 1)))
            await settle()
            assert peer.close == (1009, f"a message has more than {MAX_BYTES} bytes (limits.max_message_bytes)")

    run_virtual(main())


@pytest.mark.parametrize(
    ("data", "code"), [(b"\xff\xff\xff\xff", 1002), (Frame(Opcode.TEXT, b"\xff").serialize(mask=True), 1007)]
)
def test_what_is_no_frame_or_no_text_is_answered_too(data: bytes, code: int) -> None:
    async def main() -> None:
        async with connected() as peer:
            peer.server.data_received(data)
            await settle()
            assert peer.close is not None
            assert (peer.close[0], peer.wire.is_closed) == (code, False)

    run_virtual(main())


def test_who_floods_before_the_handshake_is_over_is_closed_too() -> None:
    async def main() -> None:
        peer = Peer(LIMITS)
        peer.connect()
        peer.send(*[Frame(Opcode.PING, b"")] * 50)
        assert peer.wire.is_closed
        await settle()
        peer.server.connection_lost(None)
        await settle()
        assert not peer.server.tasks

    run_virtual(main())


def test_a_refused_handshake_is_answered_and_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        peer = RefusedPeer(LIMITS)
        peer.connect()
        await settle()
        peer.server.connection_lost(None)
        await settle()
        assert b"403" in peer.wire.written.partition(b"\r\n")[0]
        assert peer.wire.written.endswith(b"\r\n\r\nforbidden")
        assert peer.received == [{"type": "websocket.disconnect", "code": 1006}]
        assert not peer.server.tasks

    run_virtual(main())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_nothing_is_written_to_a_connection_that_is_just_lost() -> None:
    """asyncio warns of every write between the loss and the moment when the protocol hears of it."""

    async def main() -> None:
        peer = Peer(LIMITS)
        peer.connect()
        await settle()
        peer.wire.is_closed, peer.wire.written = True, b""
        asyncio.get_running_loop().call_soon(peer.server.connection_lost, None)
        with pytest.raises(ClientDisconnected):
            await peer.server.send({"type": "websocket.send", "text": "x"})
        assert peer.wire.written == b""
        await settle()
        assert not peer.server.tasks

    run_virtual(main())
