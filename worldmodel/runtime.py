"""Sessions of one worker and the transaction of a tick. Knows no model and no socket.

A tick is: lease -> begin -> generate -> commit, or roll back. The session's model state is replaced at commit only, so
that a failed tick leaves the session where it was; that this is so is checked after every failure, not assumed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import torch

from kvcache.cache import KVCache
from kvcache.errors import CapacityExceeded, IntegrityError, KVCacheError, WindowFull
from kvcache.transaction import ChunkState, ChunkTransaction
from worldmodel import device_info
from worldmodel.adapter import (
    NO_ARRAYS,
    Arrays,
    GeneratedChunk,
    ProgressFn,
    SessionOpening,
    WorldModelAdapter,
)
from worldmodel.catalog import lookup, resolve
from worldmodel.committed_chunk import CommittedChunk
from worldmodel.errors import LoadFailed, OutcomeUnknown, RequestRefused, TickRolledBack, WorldModelError
from worldmodel.messages import (
    CloseSession,
    LoadStage,
    MediaFormat,
    MemoryStats,
    ModelInfo,
    OpenSession,
    RequestId,
    ResetSession,
    SessionClosed,
    SessionId,
    SessionOpened,
    SessionReset,
    StageTimings,
    StartWorker,
    Tick,
    TickCommitted,
)
from worldmodel.observations import describe_array
from worldmodel.residency import allocate_cache, memory_stats
from worldmodel.start_image import Image, size_of

logger = logging.getLogger(__name__)

Adapter = WorldModelAdapter[Any]
"""The runtime carries a model's state without looking into it."""


class DeviceLost(Exception):
    """Report that the device answers no more; no session of this process can go on."""


@dataclass(slots=True, kw_only=True)
class _Resident:
    """A session on this worker. `broken`: a failure left it in an unknown state; it may only be reset or closed."""

    state: Any
    outputs: tuple[MediaFormat, ...]
    next_chunk_index: int = 0
    broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footprint:
    """What a rolled-back tick must leave as it was."""

    num_latent_frames: int
    resident_latent_frames: tuple[int, ...]
    free_pages: int


def _reason(error: Exception) -> str:
    """Return what an error of ours was made from, for the operator; clients of a running server never see it."""
    cause = error.__cause__
    return "" if cause is None or cause is error else f": {type(cause).__name__}: {cause}"


class Runtime:
    """Own one adapter, its K/V and its sessions. One thread; one tick at a time."""

    def __init__(self, adapter: Adapter, cache: KVCache, *, device: str = "cpu") -> None:
        self._adapter = adapter
        self._cache = cache
        self._device = torch.device(device)
        self._sessions: dict[SessionId, _Resident] = {}

    @classmethod
    def load(cls, start: StartWorker, progress: ProgressFn) -> Runtime:
        """Load the model, size its K/V storage and warm up. Raises `LoadFailed`."""
        try:
            create_adapter = resolve(lookup(start.model).adapter)
        except RequestRefused as error:
            raise LoadFailed(error.message, code=error.code) from error
        try:
            start.offload.check_model(start.model)
        except ValueError as error:
            raise LoadFailed(str(error), field="offload") from error
        adapter = cast("Adapter", create_adapter(start, progress))
        progress(LoadStage.KV_POOL, 0.0, "")
        cache = allocate_cache(adapter.kv_spec(), start, adapter.attention())
        progress(LoadStage.KV_POOL, 1.0, f"{cache.capacity} sessions, {cache.total_pages} pages")
        runtime = cls(adapter, cache, device=start.device)
        runtime.warm_up(progress)
        return runtime

    def info(self, model: str) -> ModelInfo:
        """Describe the loaded model with its effective values."""
        spec, kv = self._adapter.spec, self._cache.spec
        return ModelInfo(
            model=model,
            width=spec.width,
            height=spec.height,
            fps=spec.fps,
            latent_frames_per_chunk=spec.latent_frames_per_chunk,
            first_chunk_media_frames=spec.first_chunk_media_frames,
            chunk_media_frames=spec.chunk_media_frames,
            sink_latent_frames=kv.sink_latent_frames,
            window_latent_frames=kv.window_latent_frames,
            capacity_sessions=self._cache.capacity,
            total_pages=self._cache.total_pages,
            kv_bytes_per_session=kv.storage_bytes(2) - kv.storage_bytes(1) + kv.cross_attention_bytes,
            device=str(self._device),
            precision=spec.precision,
            attention_backend=spec.attention_backend,
            checkpoint_digest=spec.checkpoint_digest,
            parameters=spec.parameters,
            noise_layout=spec.noise_layout,
            sampler=spec.sampler,
            robot=spec.robot,
            versions=device_info.versions(self._device),
        )

    def memory(self) -> MemoryStats:
        return memory_stats(self._cache, self._device)

    # ---------------------------------------------------------------- sessions

    def open(self, message: OpenSession, image: Image | None) -> SessionOpened:
        """Create a session.

        Raises `RequestRefused`, or `TickRolledBack` if the model failed; no session exists then.
        """
        self._require_outputs(message.outputs)
        if message.session_id in self._sessions:
            raise RequestRefused(f"session {message.session_id} is open already", code="session_exists")
        try:
            self._cache.open(message.session_id)
        except CapacityExceeded as error:
            raise RequestRefused(
                f"all {self._cache.capacity} session places of this worker are taken", code="capacity"
            ) from error
        opening = SessionOpening(prompt=message.prompt, seed=message.seed, image=image, outputs=message.outputs)
        try:
            state = self._adapter.open_state(opening)
        except RequestRefused:
            self._cache.close(message.session_id)
            raise
        except Exception as error:
            self._cache.close(message.session_id)
            raise TickRolledBack("the model could not open the session", code="open_failed") from error
        self._sessions[message.session_id] = _Resident(state=state, outputs=message.outputs)
        return SessionOpened(request_id=message.request_id, session_id=message.session_id, memory=self.memory())

    def reset(self, message: ResetSession, image: Image | None) -> SessionReset:
        """Start a new run; all pages of the session are free when this returns.

        Raises `RequestRefused` or `TickRolledBack`, with the old run as it was.
        """
        session = self._find(message.session_id)
        try:
            state = self._adapter.reset_state(session.state, prompt=message.prompt, seed=message.seed, image=image)
        except RequestRefused:
            raise
        except Exception as error:
            raise TickRolledBack("the model could not reset the session", code="reset_failed") from error
        self._cache.reset(message.session_id)
        self._sessions[message.session_id] = _Resident(state=state, outputs=session.outputs)
        return SessionReset(request_id=message.request_id, session_id=message.session_id, memory=self.memory())

    def close(self, message: CloseSession) -> SessionClosed:
        """Free everything of a session; an unknown one is closed already."""
        self._cache.close(message.session_id)
        self._sessions.pop(message.session_id, None)
        return SessionClosed(request_id=message.request_id, session_id=message.session_id, memory=self.memory())

    def _find(self, session_id: SessionId) -> _Resident:
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestRefused(f"session {session_id} is not open on this worker", code="unknown_session")
        return session

    def _require_outputs(self, outputs: tuple[MediaFormat, ...]) -> None:
        if not outputs or len(set(outputs)) != len(outputs):
            shown = ", ".join(outputs) or "none"
            raise RequestRefused(
                f"outputs: expected at least one format, each once, got {shown}", code="bad_outputs", field="outputs"
            )
        if MediaFormat.ACTIONS in outputs and self._adapter.spec.robot is None:
            raise RequestRefused("outputs: this model makes no actions", code="bad_outputs", field="outputs")

    # ---------------------------------------------------------------- the tick

    def tick(self, message: Tick, arrays: Arrays = NO_ARRAYS) -> CommittedChunk:
        """Compute and commit one chunk. `arrays` are what `message.arrays` describes.

        Raises `RequestRefused` or `TickRolledBack` with the session as it was, `OutcomeUnknown` if that can't be said
        (the session may then only be reset or closed), `DeviceLost` if the worker is of no more use.
        """
        session = self._find(message.session_id)
        self._check_tick(message, session)
        if arrays and self._adapter.spec.robot is None:
            raise RequestRefused("arrays: this model takes no observations", code="bad_arrays", field="arrays")
        before = self._footprint(message.session_id)
        chunk: ChunkTransaction | None = None
        try:
            with self._cache.lease(message.session_id) as lease:
                chunk = lease.begin_chunk()
                generated = self._adapter.generate(message, session.state, chunk, arrays)
                self._check_generated(message, generated)
                chunk.commit()
        except Exception as error:
            raise self._failed(message, session, before, chunk, error) from error
        session.state = generated.state
        session.next_chunk_index += 1
        return CommittedChunk(
            committed=self._committed(message, generated), media=generated.media, outputs=session.outputs
        )

    def _check_tick(self, message: Tick, session: _Resident) -> None:
        if session.broken:
            raise RequestRefused(
                f"session {message.session_id} failed before: reset or close it", code="session_failed"
            )
        if message.chunk_index != session.next_chunk_index:
            raise RequestRefused(
                f"chunk_index {message.chunk_index} in session {message.session_id}: expected "
                f"{session.next_chunk_index}",
                code="bad_chunk_index",
                field="chunk_index",
            )

    @staticmethod
    def _check_generated(message: Tick, generated: GeneratedChunk[Any]) -> None:
        """Stop a chunk that is no pictures, or whose events are not the tick's, before it is part of the session."""
        if generated.not_finite:
            raise TickRolledBack(
                f"chunk {message.chunk_index} failed and was rolled back: the model gave "
                f"{' and '.join(generated.not_finite)} that are not finite numbers",
                code="not_finite",
            )
        applied = sorted(event.event_id for event in generated.applied)
        if applied != sorted(message.event_ids):
            raise RuntimeError(f"the adapter applied events {applied}, the tick has {sorted(message.event_ids)}")

    def _committed(self, message: Tick, generated: GeneratedChunk[Any]) -> TickCommitted:
        return TickCommitted(
            request_id=message.request_id,
            session_id=message.session_id,
            chunk_index=message.chunk_index,
            applied_event_ids=message.event_ids,
            applied=generated.applied,
            num_media_frames=generated.num_media_frames,
            pose=generated.pose,
            timings=StageTimings(
                denoise_ms=generated.denoise_ms, commit_ms=generated.commit_ms, decode_ms=generated.decode_ms
            ),
            memory=self.memory(),
        )

    # ---------------------------------------------------------------- failures

    def _footprint(self, session_id: SessionId) -> _Footprint:
        return _Footprint(
            num_latent_frames=self._cache.num_latent_frames(session_id),
            resident_latent_frames=self._cache.resident_latent_frames(session_id),
            free_pages=self._cache.free_pages,
        )

    def _failed(
        self,
        message: Tick,
        session: _Resident,
        before: _Footprint,
        chunk: ChunkTransaction | None,
        error: Exception,
    ) -> Exception:
        """Find out what a failed tick left behind and return the error that says so."""
        self._require_device()
        problem = self._left_behind(message.session_id, before, chunk)
        if problem is not None:
            logger.error("session %s request %s: %s", message.session_id, message.request_id, problem)
            session.broken = True
            return OutcomeUnknown(f"chunk {message.chunk_index} failed and could not be rolled back")
        match error:
            case RequestRefused() | TickRolledBack():
                return error
            case WindowFull():
                return RequestRefused("the session has reached its longest run: reset it", code="window_full")
        return TickRolledBack(f"chunk {message.chunk_index} failed and was rolled back")

    def _require_device(self) -> None:
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                raise DeviceLost(f"{self._device} answers no more: {error}") from error

    def _left_behind(self, session_id: SessionId, before: _Footprint, chunk: ChunkTransaction | None) -> str | None:
        """Describe what differs from before the tick, or return None."""
        if chunk is not None and chunk.state is not ChunkState.ROLLED_BACK:
            return f"the chunk is {chunk.state}"
        after = self._footprint(session_id)
        if after != before:
            return f"before the tick {before}, after it {after}"
        try:
            self._cache.check_integrity()
        except IntegrityError as error:
            return str(error)
        return None

    # ---------------------------------------------------------------- warm-up

    def warm_up(self, progress: ProgressFn) -> None:
        """Run the adapter's warm-up sessions and drop their results.

        Raises `LoadFailed` if a session or chunk fails, or if anything stays behind.
        """
        try:
            self._run_warm_up(progress)
            self._adapter.end_warm_up()
            self._require_all_free()
        except LoadFailed:
            raise
        except (WorldModelError, KVCacheError, DeviceLost) as error:
            if isinstance(error.__cause__, LoadFailed):
                # It names the option that is in the way.
                raise error.__cause__ from error
            raise LoadFailed(f"warm-up: {error}{_reason(error)}", code="warm_up_failed") from error

    def _run_warm_up(self, progress: ProgressFn) -> None:
        openings = self._adapter.warm_up_openings()
        total = max(1, sum(num_chunks for _, num_chunks in openings))
        done = 0
        progress(LoadStage.WARM_UP, 0.0, "")
        for number, (opening, num_chunks) in enumerate(openings):
            session_id = SessionId(f"warm-up-{number}")
            request_id = RequestId(session_id)
            self.open(
                OpenSession(
                    request_id=request_id,
                    session_id=session_id,
                    prompt=opening.prompt,
                    seed=opening.seed,
                    image=None if opening.image is None else size_of(opening.image),
                    outputs=opening.outputs,
                ),
                opening.image,
            )
            for chunk_index in range(num_chunks):
                arrays = self._adapter.warm_up_arrays(chunk_index)
                message = Tick(
                    request_id=request_id,
                    session_id=session_id,
                    chunk_index=chunk_index,
                    arrays=tuple(describe_array(name, array) for name, array in arrays.items()),
                )
                chunk = self.tick(message, arrays)
                chunk.to_host()
                self._check_media_frames(chunk.committed)
                done += 1
                progress(LoadStage.WARM_UP, done / total, f"chunk {done} of {total}")
            self.close(CloseSession(request_id=request_id, session_id=session_id))

    def _check_media_frames(self, committed: TickCommitted) -> None:
        spec = self._adapter.spec
        expected = spec.first_chunk_media_frames if committed.chunk_index == 0 else spec.chunk_media_frames
        if committed.num_media_frames != expected:
            raise LoadFailed(
                f"warm-up: chunk {committed.chunk_index} has {committed.num_media_frames} media frames, the model "
                f"says {expected}",
                code="warm_up_failed",
            )

    def _require_all_free(self) -> None:
        cache = self._cache
        if cache.free_pages != cache.total_pages or cache.session_ids:
            raise LoadFailed(
                f"warm-up left {cache.total_pages - cache.free_pages} of {cache.total_pages} pages and "
                f"{len(cache.session_ids)} sessions behind",
                code="warm_up_failed",
            )
        cache.check_integrity()
