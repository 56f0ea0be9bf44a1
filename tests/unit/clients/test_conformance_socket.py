"""How the judge of servers waits for nothing: as long as chunks take, with late ones allowed, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from websockets.asyncio.client import ClientConnection

from clients.conformance.check import Context
from clients.conformance.checks_chunks import pause_stops_chunks, playback_lets_chunks_start
from clients.conformance.errors import CheckFailed
from clients.conformance.socket import Socket, Target
from tests.support.virtual_time import now, run_virtual
from tests.support.wrong_server import pack

QUIET_S = 1.0
TARGET = Target(
    world="ws://here/v1/world",
    http="http://here",
    token=None,
    image={"name": "day"},
    prompt="a town",
    answer_s=600.0,
    quiet_s=QUIET_S,
)
STARTED = {
    "protocol": 1,
    "session_id": "s",
    "epoch": 1,
    "run": 0,
    "resume_token": "t",
    "watch_token": "w",
    "model": "m",
    "width": 2,
    "height": 2,
    "fps": 12,
    "latent_frames_per_chunk": 3,
    "mime": None,
    "format": "rgb24",
    "pacing": "playback",
    "seed": 1,
    "prompt": "a town",
    "start_image": None,
    "controls": {},
    "limits": {
        "max_message_bytes": 1,
        "max_pending_events": 1,
        "max_prompt_chars": 1,
        "max_image_bytes": 1,
        "max_image_pixels": 1,
        "max_events_per_second": 1.0,
        "max_messages_per_second": 1.0,
        "resume_s": 1.0,
        "lead_chunks": 1,
        "max_session_s": None,
        "idle_s": None,
    },
    "start_images": [],
    "prompts": [],
}


class Server:
    """A server as a connection of the judge; makes a chunk in `chunk_s`, as far as reports and pauses let it.

    `late_s`: the chunk that is being made at a pause comes so much later. `ignores`: messages that change nothing.
    """

    def __init__(self, *, chunk_s: float, late_s: float = 0.0, ignores: tuple[str, ...] = ()) -> None:
        self._chunk_s, self._late_s, self._ignores = chunk_s, late_s, ignores
        self._frames: asyncio.Queue[str | bytes] = asyncio.Queue()
        self._shown, self._next, self._paused, self._closed = -1, 0, False, False
        self._may_go_on = asyncio.Event()
        self._maker: asyncio.Task[None] | None = None

    async def recv(self) -> str | bytes:
        return await self._frames.get()

    async def send(self, text: str) -> None:
        message = json.loads(text)
        match message["type"]:
            case "session.start":
                self._say("session.started", **STARTED)
                self._maker = asyncio.create_task(self._make())
            case "ping":
                self._say("pong", t=message["t"])
            case "playback" if "playback" not in self._ignores:
                self._shown = message["chunk_index"]
            case "session.pause" | "session.unpause" as kind:
                self._paused = kind == "session.pause" and kind not in self._ignores
                state = "paused" if kind == "session.pause" else "active"
                self._say("session.state", session_id="s", state=state, epoch=1, run=0, start_image=None, reason=None)
        self._may_go_on.set()

    def _say(self, type: str, **fields: Any) -> None:
        self._frames.put_nowait(json.dumps({"type": type, **fields}))

    async def _make(self) -> None:
        while True:
            while self._is_held():
                self._may_go_on.clear()
                await self._may_go_on.wait()
            await asyncio.sleep(self._chunk_s)
            await asyncio.sleep(self._late_s if self._paused else 0.0)
            header = {
                "type": "chunk",
                "kind": "media",
                "session_id": "s",
                "epoch": 1,
                "run": 0,
                "chunk_index": self._next,
                "request_id": f"r-{self._next}",
                "applied": [],
                "num_frames": 1,
                "pts": self._next,
                "timescale": 12,
                "keyframe": True,
                "shape": [1, 2, 2, 3],
            }
            self._frames.put_nowait(pack(header, bytes(12)))
            self._next += 1

    def _is_held(self) -> bool:
        return self._paused or ("playback" not in self._ignores and self._next > self._shown + 2)

    async def stop(self) -> None:
        assert self._maker is not None
        self._maker.cancel()
        await asyncio.gather(self._maker, return_exceptions=True)


def judged(monkeypatch: pytest.MonkeyPatch, check: Any, **server: Any) -> float:
    """Run a check against such a server and return how long it took."""

    async def main() -> float:
        scripted = Server(**server)

        class Scripted(Socket):
            async def __aexit__(self, *_: object) -> None:
                await scripted.stop()

        async def connect(target: Target, *, viewer: bool = True, token: str | None = None) -> Socket:
            return Scripted(cast("ClientConnection", scripted), target, viewer=viewer)

        monkeypatch.setattr(Socket, "open", connect)
        began_s = now()
        await check(Context(target=TARGET, info={}))
        return now() - began_s

    return run_virtual(main())


@pytest.mark.parametrize("late_s", [0.0, 0.5 * QUIET_S, 1.5 * QUIET_S, 20.0])
@pytest.mark.parametrize("chunk_s", [0.01, 0.6, 5.0])
def test_a_chunk_that_was_being_made_at_a_pause_may_come_late(
    monkeypatch: pytest.MonkeyPatch, chunk_s: float, late_s: float
) -> None:
    judged(monkeypatch, pause_stops_chunks, chunk_s=chunk_s, late_s=late_s)


@pytest.mark.parametrize("chunk_s", [0.01, 0.6, 5.0])
def test_chunks_that_go_on_in_a_pause_are_found(monkeypatch: pytest.MonkeyPatch, chunk_s: float) -> None:
    with pytest.raises(CheckFailed, match=r"chunk \d+ came while the session is paused, 3 of them"):
        judged(monkeypatch, pause_stops_chunks, chunk_s=chunk_s, ignores=("session.pause",))


@pytest.mark.parametrize("chunk_s", [0.01, 0.6, 5.0])
def test_a_chunk_without_a_report_is_found_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, chunk_s: float
) -> None:
    with pytest.raises(CheckFailed, match="chunk 2 came without a report"):
        judged(monkeypatch, playback_lets_chunks_start, chunk_s=chunk_s, ignores=("playback",))


@pytest.mark.parametrize(("chunk_s", "quiet_s"), [(0.01, QUIET_S), (5.0, 10.0)])
def test_a_right_server_is_waited_for_no_longer_than_needed(
    monkeypatch: pytest.MonkeyPatch, chunk_s: float, quiet_s: float
) -> None:
    took_s = judged(monkeypatch, playback_lets_chunks_start, chunk_s=chunk_s)
    assert took_s == pytest.approx(3 * chunk_s + 2 * quiet_s)
