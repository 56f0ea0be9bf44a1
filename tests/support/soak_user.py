"""One user of a real server who does one random thing after the other, and checks what every client may rely on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake

from server.wire.messages import ChunkHeader
from tests.support.server_client import Chunk, WorldSocket

KEYS = {"track": "camera", "schema": "lingbot.camera_actions.v1"}

LOST_CODES = {"session_lost", "bad_resume_token", "session_evicted"}
"""Answers to a resume that end the session for its user."""

TOLD = ("event_id", "epoch", "run", "state", "code", "reason")
"""What the story of a failed check tells of a message."""

VERBS = {
    "watch chunks": 30,
    "event": 20,
    "prompt": 2,
    "reset": 2,
    "pause": 2,
    "cut": 4,
    "takeover": 2,
    "spectate": 2,
    "stall": 2,
    "close": 1,
}


@dataclass
class Known:
    """What a user knows of a session, over all its sockets."""

    token: str = ""
    watch_token: str = ""
    epoch: int = 0
    run: int = 0
    last_chunk_index: int = -1
    gaps: int = 0
    next_event_id: int = 0
    open_events: dict[int, tuple[int, int]] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)

    def must_answer(self) -> list[int]:
        """Return the events whose second answer should have come by the end of the session.

        A drop that was on its way to a socket that broke is not told again; the run that the session is in after it
        tells as much, as it does to `clients/python/receipts.py`.
        """
        return [
            event_id for event_id, place in self.open_events.items() if self.epoch == place[0] or self.run == place[1]
        ]


class Over(Exception):
    """The socket is over, whoever ended it."""


class SoakUser:
    """Use `live` until it is cancelled or told to stop; `verbs` and `outcomes` are counted for all users together."""

    def __init__(self, url: str, rng: random.Random, verbs: Counter[str], outcomes: Counter[str]) -> None:
        self._url = url
        self._rng = rng
        self._verbs = verbs
        self._outcomes = outcomes
        self._socket: WorldSocket | None = None
        self._known = Known()
        self._story: deque[str] = deque(maxlen=60)
        self.stops = False

    async def live(self) -> None:
        while not self.stops:
            try:
                if self._socket is None:
                    await self._connect()
                else:
                    await self._do_something(self._socket)
            except (Over, ConnectionClosed, ConnectionError, InvalidHandshake, TimeoutError) as error:
                self._outcomes[type(error).__name__] += 1
                self._story.append(type(error).__name__)
                await self._drop()
                await asyncio.sleep(self._rng.random())
        await self._close()

    # ------------------------------------------------------------ connecting

    async def _connect(self) -> None:
        socket = await WorldSocket.open(self._url)
        self._socket = socket
        if self._known.token:
            self._verbs["resume"] += 1
            await socket.send(
                "session.start",
                protocol=1,
                resume_token=self._known.token,
                last_chunk_index=self._known.last_chunk_index,
                run=self._known.run,
            )
        else:
            self._verbs["start"] += 1
            self._known = Known()
            await socket.send(
                "session.start",
                protocol=1,
                prompt="a small town",
                image={"name": "day"},
                seed=self._rng.randrange(100),
                format=self._rng.choice(["fmp4", "fmp4", "h264", "jpeg"]),
                pacing=self._rng.choice(["playback", "playback", "playback", "clock"]),
            )
        while not socket.started:
            await self._receive(socket)

    async def _drop(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.drop()

    async def _close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with contextlib.suppress(Over, ConnectionClosed):
            await socket.send("session.close")
            while True:
                await self._receive(socket)
        await socket.close()

    # ------------------------------------------------------------ what a user does

    async def _do_something(self, socket: WorldSocket) -> None:
        rng = self._rng
        (verb,) = rng.choices([*VERBS], [*VERBS.values()])
        self._verbs[verb] += 1
        self._story.append(verb)
        match verb:
            case "watch chunks":
                await self._receive_for(socket, 2.0 * rng.random())
            case "event":
                held = [key for key in "wasdijkl" if rng.random() < 0.2]
                await self._event(socket, controls=[{**KEYS, "data": {"mode": "state", "held": held}}])
            case "prompt":
                await self._event(socket, prompt=rng.choice(["a night", "snow", "a desert"]))
            case "reset":
                await socket.send("session.reset", prompt="again")
            case "pause":
                await socket.send("session.pause")
                await self._receive_for(socket, rng.random())
                await socket.send("session.unpause")
            case "cut":
                await self._drop()
                await asyncio.sleep(rng.choice([0.0, 0.2, 1.0, 8.0]) * rng.random())
            case "takeover":
                await self._take_over(socket)
            case "spectate":
                await self._spectate()
            case "stall":
                await asyncio.sleep(5.0 * rng.random())
            case "close":
                await self._close()

    async def _event(self, socket: WorldSocket, **fields: Any) -> None:
        event_id = self._known.next_event_id
        self._known.next_event_id += 1
        await socket.send("session.event", event_id=event_id, **fields)

    async def _take_over(self, socket: WorldSocket) -> None:
        self._socket = None
        try:
            await self._connect()
        finally:
            await socket.drop()

    async def _spectate(self) -> None:
        """Watch the session through another socket, reading now and then; nothing of it may have a hole in time."""
        async with await WorldSocket.open(self._url, viewer=False) as socket:
            await socket.send("session.watch", protocol=1, watch_token=self._known.watch_token)
            end, place, next_pts = self._rng.random() * 3.0, (-1, -1), 0
            with contextlib.suppress(TimeoutError, ConnectionClosed):
                async with asyncio.timeout(end):
                    while True:
                        frame = await socket.receive()
                        if isinstance(frame, Chunk) and frame.header.kind == "media":
                            header = frame.header
                            assert header.epoch == 0
                            assert header.chunk_index is not None
                            assert place < (header.run, header.chunk_index)
                            assert header.pts == next_pts
                            place, next_pts = (header.run, header.chunk_index), next_pts + self._duration(header)
                            await asyncio.sleep(self._rng.random())

    def _duration(self, header: ChunkHeader) -> int:
        """Return a chunk's time in units of its time-scale; the tiny world has 12 frames a second."""
        assert header.num_frames is not None
        assert header.timescale is not None
        return header.num_frames * header.timescale // 12

    # ------------------------------------------------------------ what a user sees

    async def _receive_for(self, socket: WorldSocket, time_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(time_s):
                while True:
                    await self._receive(socket)

    async def _receive(self, socket: WorldSocket) -> None:
        frame = await socket.receive()
        if isinstance(frame, Chunk):
            header = frame.header
            applied = [it.event_id for it in header.applied]
            self._story.append(f"chunk {header.epoch}/{header.run}/{header.chunk_index} {applied}")
            if header.kind == "media":
                self._on_chunk(header)
        else:
            self._story.append(f"{frame['type']} {[frame.get(key) for key in TOLD]}")
            self._on_message(socket, frame)
        # Hours of chunks are nobody's business.
        socket.chunks.clear()
        socket.messages.clear()

    def _on_chunk(self, header: ChunkHeader) -> None:
        known = self._known
        assert header.epoch == known.epoch, f"a chunk of epoch {header.epoch} in epoch {known.epoch}"
        assert header.chunk_index is not None
        for receipt in header.applied:
            self._answered(receipt.event_id)
        self._outcomes["chunk"] += 1
        if header.run < known.run:
            return
        assert header.run == known.run, "a run that nobody announced"
        expected = known.last_chunk_index + 1
        assert header.chunk_index == expected or (known.gaps and header.chunk_index > expected), (
            f"chunk {header.chunk_index}, expected {expected}"
        )
        known.last_chunk_index = header.chunk_index

    def _answered(self, event_id: int) -> None:
        """Note an event's second answer. A chunk that is sent again in a new epoch answers again."""
        self._known.open_events.pop(event_id, None)
        self._known.answered.add(event_id)

    def _on_message(self, socket: WorldSocket, message: dict[str, Any]) -> None:
        known = self._known
        match message["type"]:
            case "session.started":
                assert message["epoch"] > known.epoch
                socket.started = message
                known.token, known.watch_token = message["resume_token"], message["watch_token"]
                known.epoch = message["epoch"]
                self._enter_run(message["run"])
            case "session.state":
                assert message["epoch"] == known.epoch
                self._outcomes[f"state {message['state']}"] += 1
                self._enter_run(message["run"])
            case "event.queued":
                if message["event_id"] not in known.answered:
                    known.open_events[message["event_id"]] = (known.epoch, known.run)
            case "event.dropped":
                assert message["event_id"] not in known.answered, "dropped after it was applied or dropped"
                self._answered(message["event_id"])
            case "session.closed":
                self._outcomes[f"closed {message['reason']}"] += 1
                assert not known.must_answer(), f"{known.must_answer()} never answered: {' | '.join(self._story)}"
                self._known = Known()
                raise Over
            case "error":
                self._on_error(message)

    def _enter_run(self, run: int) -> None:
        if run != self._known.run:
            self._known.run, self._known.last_chunk_index = run, -1

    def _on_error(self, error: dict[str, Any]) -> None:
        self._outcomes[f"error {error['code']}"] += 1
        assert error["code"] not in ("internal", "cleanup_failed", "media_failed", "tick_failed"), error
        if error["code"] == "resume_gap":
            # The chunks that are gone had answers with them.
            self._known.gaps += 1
            self._known.open_events.clear()
        elif error["code"] in LOST_CODES:
            self._known = Known()
            raise Over
