"""From a session's turn in the worker to the pictures that its listeners get.

Scheduler.run ─> run_tick ─> worker.tick ─> commit ─> ChunkEncoder ─> Audience.send_chunk
                                └── what goes wrong on the way ─> fail, or the tick again
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from server.actor_services import ActorServices
from server.audience import Audience
from server.chunks import CommittedChunk
from server.encoding import ChunkEncoder, EncodingDone, EncodingServices
from server.errors import CommitMismatch, ErrorCode, ServerError, SessionFailed, from_worker
from server.logs import about
from server.media.formats import EncodedChunk, StreamEncoder
from server.recorder import SessionRecorder
from server.session import Session
from server.ticking import TickGate, run_attempts
from server.wire.messages import DropReason
from server.worker import CommittedTick
from worldmodel.errors import RequestRefused, TickRolledBack, WorkerUnavailable, WorldModelError
from worldmodel.messages import ControlEvent, Tick

log = logging.getLogger(__name__)


class SessionTicks:
    """The ticks of one session and their chunks. `fail` is called with what ends the run."""

    def __init__(
        self,
        session: Session[EncodedChunk],
        encoder: StreamEncoder,
        *,
        gate: TickGate,
        audience: Audience,
        recorder: SessionRecorder | None,
        services: ActorServices,
        fail: Callable[[ServerError], None],
    ) -> None:
        self.encoder = ChunkEncoder(
            encoder,
            EncodingServices(pool=services.encode_pool, clock=services.clock, metrics=services.metrics),
            on_ready=self._chunk_ready,
            on_lost=self._media_lost,
        )
        self._session = session
        self._gate = gate
        self._audience = audience
        self._recorder = recorder
        self._services = services
        self._fail = fail

    async def run_tick(self) -> None:
        tick = self._session.begin_tick(self._services.clock())
        if tick is None:
            return
        services = self._services
        with self._gate.tick():
            await run_attempts(
                services.worker, services.metrics, tick, failed=self._tick_failed, committed=self._commit
            )

    def tick_broke(self, error: Exception) -> None:
        self._fail(SessionFailed(ErrorCode.TICK_FAILED, "the tick failed inside the server"))

    def _tick_failed(self, tick: Tick, error: WorldModelError) -> Tick | None:
        """Handle a failed tick and return what to try instead, if anything."""
        session = self._session
        if session.in_flight is not tick:
            return None
        if isinstance(error, TickRolledBack) and error.transient and (retry := session.retry_tick()) is not None:
            return retry
        failure = from_worker(error, fallback=ErrorCode.TICK_FAILED, request_id=tick.request_id)
        if isinstance(error, RequestRefused) and tick.events:
            self._refuse_events(tick.events, failure)
        else:
            self._fail(failure)
        return None

    def _refuse_events(self, events: tuple[ControlEvent, ...], failure: ServerError) -> None:
        """Go on without the events that the model refused; nothing of them was done."""
        self._audience.send_error(failure)
        dropped = self._session.refuse_tick()
        log.info(
            "session %s: the model refused events: %s",
            self._session.session_id,
            failure.message,
            extra=about(session_id=self._session.session_id, request_id=failure.request_id, event_ids=dropped),
        )
        self._audience.send_dropped(dropped, DropReason.FAILED)

    def _commit(self, tick: Tick, answered: CommittedTick) -> None:
        if self._session.in_flight is not tick:
            return
        try:
            chunk = self._session.commit(answered.committed)
        except CommitMismatch as error:
            log.error(
                "session %s: %s",
                self._session.session_id,
                error,
                extra=about(session_id=self._session.session_id, request_id=tick.request_id, event_ids=tick.event_ids),
            )
            self._fail(
                SessionFailed(
                    ErrorCode.TICK_FAILED,
                    "the worker answered another tick than it was given",
                    request_id=tick.request_id,
                )
            )
            return
        self._observe(chunk)
        if self._recorder is not None:
            self._recorder.committed(tick, chunk)
        self.encoder.put(chunk, answered)

    def _observe(self, chunk: CommittedChunk) -> None:
        metrics = self._services.metrics
        metrics.chunks.inc()
        metrics.observe_stages(chunk.timings, queue_ms=chunk.queue_ms)
        metrics.media_frames.inc(chunk.num_media_frames)
        for receipt in chunk.applied:
            metrics.event_wait_s.observe(receipt.wait_ms / 1000)

    # ------------------------------------------------------------ media

    def _chunk_ready(self, done: EncodingDone) -> None:
        self._services.metrics.events.labels("applied").inc(len(self._session.answer_events(done.chunk)))
        ready = self._session.chunk_ready(
            done.chunk,
            done.encoded,
            transfer_ms=done.transfer_ms,
            encode_ms=done.encode_ms,
            now=self._services.clock(),
        )
        self._audience.send_chunk(ready)
        if self._recorder is not None:
            self._recorder.encoded(done.encoded)
        self._services.scheduler.wake()

    def _media_lost(self, chunk: CommittedChunk, error: Exception) -> None:
        """Fail the session, unless a reset has left the chunk's run behind already, and answer the chunk's events.

        They acted in the world, but no header says so: for the client they are dropped with the pictures.
        """
        reason = DropReason.RESET
        if chunk.run == self._session.run:
            reason = DropReason.FAILED
            self._fail(self._loss_of(chunk, error))
        self._audience.send_dropped(self._session.answer_events(chunk), reason)

    def _loss_of(self, chunk: CommittedChunk, error: Exception) -> ServerError:
        """Return what the client is told; anything but the worker's death goes to the log with its traceback."""
        if isinstance(error, WorkerUnavailable):
            return from_worker(error, fallback=ErrorCode.MEDIA_FAILED, request_id=chunk.request_id)
        log.error(
            "session %s: media of chunk %d lost",
            self._session.session_id,
            chunk.chunk_index,
            exc_info=error,
            extra=about(session_id=self._session.session_id, request_id=chunk.request_id),
        )
        text = f"the pictures of chunk {chunk.chunk_index} were lost"
        return SessionFailed(ErrorCode.MEDIA_FAILED, text, request_id=chunk.request_id)
