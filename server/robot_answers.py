"""From a committed chunk to the answer that a robot gets: its actions, and where the time went."""

from __future__ import annotations

import numpy as np

from server.errors import ErrorCode, ServerError, SessionFailed, from_worker
from server.robot_session import Actions, RobotCall
from worldmodel.errors import WorkerUnavailable
from worldmodel.messages import ChunkMedia, MediaFormat, TickCommitted


def read_actions(media: ChunkMedia, payload: memoryview) -> Actions:
    """Return the actions of a chunk. Raises `ValueError` if there are none."""
    (part,) = media.parts
    if part.format is not MediaFormat.ACTIONS:
        raise ValueError(f"expected actions, got {part.format}")
    return np.frombuffer(payload, "<f4").reshape(part.shape).astype(np.float32)


def actions_lost(error: Exception) -> ServerError:
    if isinstance(error, WorkerUnavailable):
        return from_worker(error, fallback=ErrorCode.TICK_FAILED)
    return SessionFailed(ErrorCode.TICK_FAILED, "the actions of a committed chunk were lost")


def server_timing(call: RobotCall, committed: TickCommitted, media: ChunkMedia, *, now: float) -> dict[str, float]:
    """Return milliseconds: in the queue, in the worker by stage, and all of it."""
    started_at = call.arrived_at if call.started_at is None else call.started_at
    timings = committed.timings
    times = {
        "queue_ms": 1000 * (started_at - call.arrived_at),
        "infer_ms": 1000 * (now - started_at),
        "denoise_ms": timings.denoise_ms,
        "commit_ms": timings.commit_ms,
        "decode_ms": timings.decode_ms,
        "transfer_ms": media.transfer_ms,
        "total_ms": 1000 * (now - call.arrived_at),
    }
    return {name: round(value, 3) for name, value in times.items()}
