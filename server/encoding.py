"""From committed chunks to encoded ones: one session's queue, one chunk at a time, the work in a thread.

    put ─> wait for the worker's pixels ─> StreamEncoder.encode in the pool ─> on_ready
                     └──────────────── whatever goes wrong ──────────────────> on_lost, also for the rest of the run

It knows no sockets and no session states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from server.chunks import CommittedChunk
from server.clock import Clock
from server.media.formats import EncodedChunk, EpochMuxer, StreamEncoder
from server.metrics import Metrics
from server.worker import CommittedTick
from worldmodel.messages import MediaFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingDone:
    """A chunk in its final coding, with the time it took."""

    chunk: CommittedChunk
    encoded: EncodedChunk
    transfer_ms: float
    encode_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingServices:
    """What all sessions share for encoding."""

    pool: Executor
    clock: Clock
    metrics: Metrics


class ChunkEncoder:
    """Owns a session's `StreamEncoder` and the chunks that wait for it. `run` must be running for anything to happen.

    Chunks come out in the order they went in. Once one is lost, later ones of its run are lost too: they would leave a
    hole. `on_ready` and `on_lost` are called in the event loop.
    """

    def __init__(
        self,
        encoder: StreamEncoder,
        services: EncodingServices,
        *,
        on_ready: Callable[[EncodingDone], None],
        on_lost: Callable[[CommittedChunk, Exception], None],
    ) -> None:
        self._encoder = encoder
        self._services = services
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._loss: tuple[int, Exception] | None = None
        self._waiting: asyncio.Queue[tuple[CommittedChunk, CommittedTick]] = asyncio.Queue()

    @property
    def outputs(self) -> tuple[MediaFormat, ...]:
        return self._encoder.outputs

    @property
    def mime(self) -> str | None:
        return self._encoder.mime

    def new_epoch(self) -> EpochMuxer:
        return self._encoder.new_epoch()

    def put(self, chunk: CommittedChunk, answered: CommittedTick) -> None:
        """Queue a committed chunk, whose pixels may still be on their way."""
        self._waiting.put_nowait((chunk, answered))

    async def run(self) -> None:
        """Encode until cancelled."""
        while True:
            await self._encode_next()

    async def _encode_next(self) -> None:
        """Encode the next chunk. Only this call knows its pixels, so they do not wait for the chunk after."""
        chunk, answered = await self._waiting.get()
        try:
            if self._loss is not None and self._loss[0] == chunk.run:
                self._on_lost(chunk, self._loss[1])
            else:
                await self._encode_one(chunk, answered)
        except Exception:
            # The boundary of the loop: chunks that come later are encoded or lost, and `drain` does not wait for ever.
            log.exception("chunk %d of request %s: its loss could not be told", chunk.chunk_index, chunk.request_id)
        finally:
            self._waiting.task_done()

    async def drain(self) -> None:
        """Wait until nothing is left to encode."""
        await self._waiting.join()

    async def close_in_pool(self) -> None:
        """Free the encoder behind whatever it is doing."""
        await asyncio.get_running_loop().run_in_executor(self._services.pool, self._encoder.close)

    def close(self) -> None:
        self._encoder.close()

    async def _encode_one(self, chunk: CommittedChunk, answered: CommittedTick) -> None:
        try:
            self._on_ready(await self._encode(chunk, answered))
        except Exception as error:
            # The boundary of all encoding: whatever went wrong, this chunk's pictures are lost.
            self._loss = (chunk.run, error)
            self._on_lost(chunk, error)

    async def _encode(self, chunk: CommittedChunk, answered: CommittedTick) -> EncodingDone:
        message, payload = await answered.media
        if (message.request_id, message.chunk_index) != (chunk.request_id, chunk.chunk_index):
            raise ValueError(f"expected media of {chunk.request_id}, got {message.request_id}")
        services = self._services
        started_at = services.clock()
        encode = partial(self._encoder.encode, message.parts, payload, message.num_media_frames)
        encoded = await asyncio.get_running_loop().run_in_executor(services.pool, encode)
        encode_s = services.clock() - started_at
        services.metrics.stage_s.labels("transfer").observe(message.transfer_ms / 1000)
        services.metrics.stage_s.labels("encode").observe(encode_s)
        return EncodingDone(chunk=chunk, encoded=encoded, transfer_ms=message.transfer_ms, encode_ms=encode_s * 1000)
