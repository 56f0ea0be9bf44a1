"""Drive sessions on a server and note what comes when. One `WorldClient` a session, all of them in one event loop.

A lost link is not resumed: what was measured until then is kept, and the session says why it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from clients.bench.errors import BenchError
from clients.bench.job import Job
from clients.bench.keys import key_presses
from clients.bench.samples import ChunkSample, EventSample, SessionSamples
from clients.python.chunk import Chunk
from clients.python.errors import ConnectFailed, EventDropped, Refused, WorldClientError
from clients.python.receipts import Receipt
from clients.python.world import ACTIONS_SCHEMA, Image, WorldClient

OnChunk = Callable[[], None]
Chunks = AsyncGenerator[Chunk, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What every session starts from; `image` is a name that the server offers, or a file."""

    image: Image
    prompt: str


@dataclass(slots=True, kw_only=True)
class _Notes:
    """One session while it is measured. `sent` holds each accepted event with the time before it was sent."""

    began_s: float
    world: WorldClient
    started_s: float | None = None
    chunks: list[ChunkSample] = field(default_factory=list)
    sent: list[tuple[float, Receipt]] = field(default_factory=list)
    num_refused_events: int = 0
    ended: str | None = None
    done: bool = False

    def samples(self) -> SessionSamples:
        started = None if self.started_s is None else self.world.session
        return SessionSamples(
            began_s=self.began_s,
            started_s=self.started_s,
            fps=0 if started is None else started.fps,
            width=0 if started is None else started.width,
            height=0 if started is None else started.height,
            latent_frames_per_chunk=0 if started is None else started.latent_frames_per_chunk,
            chunks=self.chunks,
            events=[_event_sample(sent_s, receipt, len(self.chunks)) for sent_s, receipt in self.sent],
            num_refused_events=self.num_refused_events,
            ended=self.ended,
        )


def _event_sample(sent_s: float, receipt: Receipt, num_chunks: int) -> EventSample:
    future = receipt.applied
    if not future.done() or future.cancelled() or future.exception() is not None:
        return EventSample(event_id=receipt.event_id, sent_s=sent_s)
    applied = future.result()
    if applied.chunk_index >= num_chunks:
        return EventSample(event_id=receipt.event_id, sent_s=sent_s)
    return EventSample(
        event_id=receipt.event_id,
        sent_s=sent_s,
        chunk_index=applied.chunk_index,
        latent_frame=applied.latent_frame,
        wait_ms=applied.wait_ms,
    )


class Driver:
    """All sessions of one run. `on_chunk` is called for each counted chunk."""

    def __init__(self, job: Job, url: str, beginning: Beginning, *, on_chunk: OnChunk) -> None:
        self._job = job
        self._url = url
        self._beginning = beginning
        self._on_chunk = on_chunk
        self._num_busy = job.num_sessions
        self._all_done = asyncio.Event()

    async def run(self) -> list[SessionSamples]:
        """Drive all sessions until each has its chunks. Raises `BenchError` if not one gave a chunk."""
        deadline_s = asyncio.get_running_loop().time() + self._job.time_limit_s
        numbers = range(self._job.num_sessions)
        sessions = await asyncio.gather(*(self._drive(number, deadline_s) for number in numbers))
        if not any(session.chunks for session in sessions):
            raise BenchError(next(session.ended for session in sessions if session.ended) or "no chunk came")
        return sessions

    async def _drive(self, number: int, deadline_s: float) -> SessionSamples:
        world = WorldClient(
            self._url,
            image=self._beginning.image,
            prompt=self._beginning.prompt,
            pacing=self._job.pacing,
            seed=self._job.seed + number,
            token=self._job.token,
            resume_delays_s=(),
            clock=time.perf_counter,
        )
        notes = _Notes(began_s=time.perf_counter(), world=world)
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._watch(world, notes, number)
        except TimeoutError:
            notes.ended = f"the time limit of {self._job.time_limit_s:g} s was reached"
        except (ConnectFailed, Refused) as error:
            notes.ended = f"session {number} did not start: {error}"
        except (WorldClientError, BenchError) as error:
            notes.ended = f"session {number} ended after {len(notes.chunks)} chunks: {error}"
        finally:
            self._is_done(notes)
        return notes.samples()

    async def _watch(self, world: WorldClient, notes: _Notes, number: int) -> None:
        async with world:
            notes.started_s = time.perf_counter()
            steering = asyncio.create_task(self._steer(world, notes, number), name=f"bench-keys-{number}")
            try:
                async with aclosing(cast("Chunks", world.chunks())) as chunks:
                    await self._take(chunks, notes)
                    # The others are still measured, so this session keeps the worker as busy as before.
                    self._is_done(notes)
                    await self._drain(chunks)
            finally:
                steering.cancel()
                await asyncio.gather(steering, return_exceptions=True)

    async def _take(self, chunks: Chunks, notes: _Notes) -> None:
        while len(notes.chunks) < self._job.num_chunks:
            try:
                async with asyncio.timeout(self._job.chunk_timeout_s) as waiting:
                    chunk = await anext(chunks)
            except TimeoutError:
                if waiting.expired():
                    raise BenchError(f"no chunk came for {self._job.chunk_timeout_s:g} s") from None
                raise
            except StopAsyncIteration:
                raise BenchError("the server closed the session") from None
            notes.chunks.append(_chunk_sample(chunk))
            self._on_chunk()

    async def _drain(self, chunks: Chunks) -> None:
        """Take further chunks until every session has been measured."""
        done = asyncio.ensure_future(self._all_done.wait())
        try:
            while not done.done():
                taking = asyncio.ensure_future(anext(chunks, None))
                await asyncio.wait((done, taking), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    taking.cancel()
                    await asyncio.gather(taking, return_exceptions=True)
                elif taking.exception() is not None or taking.result() is None:
                    # It gave all that was asked of it, so its end is no fault of the measurement.
                    return
        finally:
            done.cancel()
            await asyncio.gather(done, return_exceptions=True)

    async def _steer(self, world: WorldClient, notes: _Notes, number: int) -> None:
        rate = self._job.events_per_second
        if rate <= 0 or ACTIONS_SCHEMA not in world.session.controls:
            return
        for press in key_presses(events_per_second=rate, seed=self._job.seed, session=number):
            await asyncio.sleep(press.wait_s)
            sent_s = time.perf_counter()
            try:
                notes.sent.append((sent_s, await world.hold(*press.keys)))
            except (Refused, EventDropped):
                notes.num_refused_events += 1
            except WorldClientError:
                # Whoever takes the chunks hears of the end as well.
                return

    def _is_done(self, notes: _Notes) -> None:
        if notes.done:
            return
        notes.done = True
        self._num_busy -= 1
        if self._num_busy == 0:
            self._all_done.set()


def _chunk_sample(chunk: Chunk) -> ChunkSample:
    timings = chunk.header.timings_ms
    return ChunkSample(
        chunk_index=chunk.chunk_index,
        arrived_s=chunk.received_s,
        num_frames=chunk.header.num_frames,
        num_bytes=len(chunk.payload),
        timings_ms={} if timings is None else timings.model_dump(),
    )
