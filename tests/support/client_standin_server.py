"""A small server that speaks the `world` dialect to the Python client: real framing and coding, no model, no clock.

It keeps sessions over lost links, paces chunks by `playback` reports, and does on request what a healthy server
hardly ever does: refuse, drop a link at a given chunk, fail, drop events. Every message it gets is checked against
the wire models.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from server.config import MediaSection
from server.media.formats import EncodedChunk, EpochMuxer, StreamEncoder, create_stream_encoder
from server.wire import messages as wire
from server.wire.binary import pack_chunk
from tests.support.media_chunks import part_of, yuv_chunk
from worldmodel.messages import MediaFormat

WIDTH, HEIGHT, FPS, LEAD_CHUNKS = 64, 48, 12, 1
FIRST_FRAMES, FRAMES = 5, 4

_MODELS: dict[str, type[BaseModel]] = {
    "session.event": wire.SessionEvent,
    "session.reset": wire.SessionReset,
    "session.pause": wire.SessionPause,
    "session.unpause": wire.SessionUnpause,
    "session.close": wire.SessionClose,
    "playback": wire.Playback,
}


@dataclass
class Behaviour:
    """What the server does out of the ordinary; tests change it while it runs."""

    refuse_start: wire.ErrorMessage | None = None
    refuse_resume: wire.ErrorMessage | None = None
    lose_chunks: int = 0
    queue_positions: tuple[int, ...] = ()
    cut_before_chunks: set[int] = field(default_factory=set)
    swallow_events: int = 0
    refuse_events: dict[int, wire.ErrorMessage] = field(default_factory=dict)
    max_chunks: int | None = None
    skip_chunk: int | None = None
    late_chunks: int = 0
    ignore: set[str] = field(default_factory=set)


@dataclass
class World:
    """One session; outlives its links."""

    start: wire.SessionStart
    encoder: StreamEncoder
    epoch: int = 0
    run: int = 0
    made: int = 0
    shown: int = -1
    paused: bool = False
    failed: bool = False
    pending: list[wire.SessionEvent] = field(default_factory=list)
    accepted: set[int] = field(default_factory=set)
    history: list[tuple[int, int, list[int], EncodedChunk]] = field(default_factory=list)

    def may_make(self, max_chunks: int | None) -> bool:
        if self.paused or self.failed or (max_chunks is not None and self.made >= max_chunks):
            return False
        return self.start.pacing is not wire.Pacing.PLAYBACK or self.made <= self.shown + 1 + LEAD_CHUNKS

    def make(self) -> None:
        """Make the next chunk; all pending events act in it."""
        num_frames = FRAMES if self.made else FIRST_FRAMES
        frames = yuv_chunk(width=WIDTH, height=HEIGHT, num_frames=num_frames, first_frame=FRAMES * self.made)
        if self.encoder.outputs == (MediaFormat.YUV420,):
            parts, payload = part_of(frames, MediaFormat.YUV420)
        else:
            rgb = frames[:, :HEIGHT, :, None].repeat(3, axis=3)
            parts, payload = part_of(rgb, MediaFormat.RGB24)
        encoded = self.encoder.encode(parts, payload, num_frames)
        applied = sorted(event.event_id for event in self.pending)
        self.pending.clear()
        self.history.append((self.run, self.made, applied, encoded))
        self.made += 1


class StandinServer:
    """Sessions by token, the behaviour, and all messages received, as (epoch, message)."""

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.worlds: dict[str, World] = {}
        self.received: list[tuple[int, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._changed = asyncio.Event()
        self._connections: list[ServerConnection] = []

    @property
    def world(self) -> World:
        (world,) = self.worlds.values()
        return world

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """Messages of one type, in order."""
        return [message for _, message in self.received if message["type"] == kind]

    def wake(self) -> None:
        """Look again at the behaviour and the worlds."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that depends on what was received or made."""
        while not condition():
            await self._changed.wait()

    async def say(self, message: wire.ServerMessage) -> None:
        """Send a message to the newest link."""
        await self._connections[-1].send(message.model_dump_json())

    async def fail(self, reason: str) -> None:
        self.world.failed = True
        world = self.world
        await self.say(
            wire.SessionStateMessage(
                session_id="s-1", state=wire.SessionState.FAILED, epoch=world.epoch, run=world.run, reason=reason
            )
        )

    async def fall_silent(self) -> None:
        """Read and answer nothing more on a link that stays open."""
        await self.until(lambda: bool(self._connections))
        self._connections[-1].transport.pause_reading()

    async def cut(self, code: int | None = None) -> None:
        """End the newest link: abruptly, or with a close code."""
        if code is None:
            self._connections[-1].transport.abort()
        else:
            await self._connections[-1].close(code)

    # ------------------------------------------------------------ one link

    async def handle(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.headers.append(dict(connection.request.headers.raw_items()))
        self._connections.append(connection)
        self.wake()
        try:
            start = json.loads(await connection.recv())
            self.received.append((0, start))
            if "resume_token" in start:
                resume = wire.SessionResume.model_validate(start)
                refusal, last, world = self.behaviour.refuse_resume, resume.last_chunk_index, self.world
            else:
                refusal, last = self.behaviour.refuse_start, -1
                world = self._open(wire.SessionStart.model_validate(start))
            for position in self.behaviour.queue_positions:
                await self.say(wire.SessionQueued(position=position, queued=len(self.behaviour.queue_positions)))
            if refusal is not None:
                await self.say(refusal)
                return
            await self._serve(connection, world, last)
        except ConnectionClosed:
            self.wake()

    def _open(self, start: wire.SessionStart) -> World:
        encoder = create_stream_encoder(start.format, width=WIDTH, height=HEIGHT, fps=FPS, media=MediaSection())
        world = World(start=start, encoder=encoder)
        self.worlds[f"token-{len(self.worlds)}"] = world
        return world

    async def _serve(self, connection: ServerConnection, world: World, last: int) -> None:
        world.epoch += 1
        world.shown = max(world.shown, last)
        await connection.send(self._started(world).model_dump_json())
        muxer = world.encoder.new_epoch()
        init = muxer.init_segment()
        if init is not None:
            header = self._header(world, kind="init", timescale=muxer.timescale, codec=init.codec)
            await connection.send(pack_chunk(header, init.payload))
        if world.epoch > 1 and self.behaviour.lose_chunks:
            gap = wire.ErrorMessage(code="resume_gap", message=f"{self.behaviour.lose_chunks} chunks are gone")
            await connection.send(gap.model_dump_json())
            last += self.behaviour.lose_chunks
            while world.made <= last:
                world.make()
        async with asyncio.TaskGroup() as group:
            sender = group.create_task(self._send_chunks(connection, world, muxer, last))
            try:
                async for text in connection:
                    await self._receive(connection, world, json.loads(text))
            finally:
                sender.cancel()

    async def _send_chunks(self, connection: ServerConnection, world: World, muxer: EpochMuxer, last: int) -> None:
        position = next((i for i, entry in enumerate(world.history) if entry[:2] == (world.run, last + 1)), None)
        position = len(world.history) if position is None else position
        while True:
            if position == len(world.history):
                await self.until(lambda: world.may_make(self.behaviour.max_chunks))
                world.make()
            run, index, applied, encoded = world.history[position]
            position += 1
            if index in self.behaviour.cut_before_chunks:
                self.behaviour.cut_before_chunks.remove(index)
                connection.transport.abort()
                return
            if index == self.behaviour.skip_chunk:
                continue
            muxed = muxer.mux(encoded)
            header = self._header(
                world,
                kind="media",
                run=run,
                chunk_index=index,
                applied=[wire.AppliedEventHeader(event_id=i, latent_frame=0, wait_ms=1.0) for i in applied],
                num_frames=muxed.num_frames,
                pts=muxed.pts,
                timescale=muxed.timescale,
                shape=list(muxed.shape) if muxed.shape else None,
                sizes=list(muxed.sizes) if muxed.sizes else None,
            )
            await connection.send(pack_chunk(header, muxed.payload))
            self.wake()
            await asyncio.sleep(0)

    async def _receive(self, connection: ServerConnection, world: World, message: dict[str, Any]) -> None:
        parsed = _MODELS[message["type"]].model_validate(message)
        self.received.append((world.epoch, message))
        if message["type"] in self.behaviour.ignore:
            self.wake()
            return
        match parsed:
            case wire.SessionEvent():
                await self._event(connection, world, parsed)
            case wire.SessionReset():
                await self._reset(connection, world)
            case wire.SessionPause() | wire.SessionUnpause():
                world.paused = isinstance(parsed, wire.SessionPause)
                await self._state(connection, world)
            case wire.SessionClose():
                closed = wire.SessionClosedMessage(session_id="s-1", reason="closed by the client")
                await connection.send(closed.model_dump_json())
                await connection.close()
            case wire.Playback():
                if parsed.epoch == world.epoch and parsed.run == world.run:
                    assert parsed.chunk_index < world.made, "a report of a chunk that was not made"
                    world.shown = max(world.shown, parsed.chunk_index)
        self.wake()

    async def _event(self, connection: ServerConnection, world: World, event: wire.SessionEvent) -> None:
        if self.behaviour.swallow_events:
            self.behaviour.swallow_events -= 1
            connection.transport.abort()
            return
        refusal = self.behaviour.refuse_events.get(event.event_id)
        if event.event_id in world.accepted:
            refusal = wire.ErrorMessage(code="duplicate", message="accepted before", event_id=event.event_id)
        if refusal is not None:
            await connection.send(refusal.model_dump_json())
            return
        world.accepted.add(event.event_id)
        world.pending.append(event)
        await connection.send(wire.EventQueued(event_id=event.event_id).model_dump_json())

    async def _reset(self, connection: ServerConnection, world: World) -> None:
        for event in world.pending:
            dropped = wire.EventDropped(event_id=event.event_id, reason=wire.DropReason.RESET)
            await connection.send(dropped.model_dump_json())
        world.pending.clear()
        for _ in range(self.behaviour.late_chunks):
            world.make()
        world.run, world.made, world.shown, world.failed = world.run + 1, 0, -1, False
        await self._state(connection, world)

    async def _state(self, connection: ServerConnection, world: World) -> None:
        state = wire.SessionState.PAUSED if world.paused else wire.SessionState.ACTIVE
        message = wire.SessionStateMessage(session_id="s-1", state=state, epoch=world.epoch, run=world.run)
        await connection.send(message.model_dump_json())

    def _header(self, world: World, **fields: Any) -> wire.ChunkHeader:
        defaults = {"session_id": "s-1", "epoch": world.epoch, "run": world.run, "chunk_index": None}
        return wire.ChunkHeader(**(defaults | fields))

    def _started(self, world: World) -> wire.SessionStarted:
        return wire.SessionStarted(
            session_id="s-1",
            epoch=world.epoch,
            run=world.run,
            resume_token="token-0",
            watch_token="watch-0",
            model="standin",
            width=WIDTH,
            height=HEIGHT,
            fps=FPS,
            latent_frames_per_chunk=1,
            mime=world.encoder.mime,
            format=world.start.format,
            pacing=world.start.pacing,
            seed=world.start.seed or 0,
            prompt=world.start.prompt,
            controls={},
            limits=wire.Limits(
                max_message_bytes=100_000,
                max_pending_events=64,
                max_prompt_chars=2000,
                max_image_bytes=1,
                max_image_pixels=1,
                max_events_per_second=1.0,
                max_messages_per_second=1000.0,
                resume_s=15.0,
                lead_chunks=LEAD_CHUNKS,
                max_session_s=None,
                idle_s=None,
            ),
            start_images=[],
            prompts=[],
        )


@asynccontextmanager
async def standin_server() -> AsyncIterator[StandinServer]:
    """Run a stand-in on a free loopback port."""
    standin = StandinServer()
    server: Server
    async with serve(standin.handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        standin.url = f"ws://127.0.0.1:{port}"
        yield standin
    for world in standin.worlds.values():
        world.encoder.close()
