"""Requests for the deterministic test model, and a loaded runtime of it."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt

from worldmodel.fake_options import parse_options
from worldmodel.lingbot.controls import ACTIONS_SCHEMA, CAMERA_TRACK, parse_control
from worldmodel.messages import (
    CloseSession,
    Control,
    ControlEvent,
    ImageSize,
    LoadStage,
    MediaFormat,
    OpenSession,
    RequestId,
    ResetSession,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.runtime import Runtime

WIDTH, HEIGHT = 32, 16


def start_fake(*, sessions: int = 2, memory_bytes: int | None = None, **options: object) -> StartWorker:
    """Return a start message for the test model at 32 x 16 pixels."""
    return StartWorker(
        model="fake",
        checkpoint="none",
        width=WIDTH,
        height=HEIGHT,
        fps=12,
        requested_sessions=sessions,
        memory_bytes=memory_bytes,
        model_options=parse_options(options),
    )


def load_fake(*, sessions: int = 2, memory_bytes: int | None = None, **options: object) -> Runtime:
    return Runtime.load(start_fake(sessions=sessions, memory_bytes=memory_bytes, **options), ignore_progress)


def ignore_progress(stage: LoadStage, fraction: float, detail: str) -> None:
    """A progress function for tests that don't look at it."""


def image(seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return a start image [24, 40, 3] of noise, which is not the model's own size."""
    return np.random.default_rng(seed).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def open_session(
    name: str, *, seed: int = 1, prompt: str = "a street", outputs: tuple[MediaFormat, ...] = (MediaFormat.YUV420,)
) -> OpenSession:
    return OpenSession(
        request_id=RequestId(f"open-{name}"),
        session_id=SessionId(name),
        prompt=prompt,
        seed=seed,
        image=ImageSize(width=40, height=24),
        outputs=outputs,
    )


def keys(event_id: int, *held: str) -> ControlEvent:
    data = parse_control(CAMERA_TRACK, ACTIONS_SCHEMA, {"mode": "state", "held": list(held)})
    return ControlEvent(event_id=event_id, controls=(Control(track=CAMERA_TRACK, schema=ACTIONS_SCHEMA, data=data),))


def bad_event(event_id: int) -> ControlEvent:
    data = json.dumps({"mode": "state", "held": ["q"]}).encode()
    return ControlEvent(event_id=event_id, controls=(Control(track=CAMERA_TRACK, schema=ACTIONS_SCHEMA, data=data),))


def tick(name: str, index: int, *events: ControlEvent, prompt: str | None = None) -> Tick:
    return Tick(
        request_id=RequestId(f"tick-{name}-{index}"),
        session_id=SessionId(name),
        chunk_index=index,
        prompt=prompt,
        events=events,
    )


def reset_session(name: str, *, seed: int = 1, prompt: str = "a street") -> ResetSession:
    return ResetSession(
        request_id=RequestId(f"reset-{name}"), session_id=SessionId(name), prompt=prompt, seed=seed, image=None
    )


def close_session(name: str) -> CloseSession:
    return CloseSession(request_id=RequestId(f"close-{name}"), session_id=SessionId(name))


def pixels(runtime: Runtime, message: Tick) -> bytes:
    """Run a tick and return its whole payload."""
    _, parts = runtime.tick(message).to_host()
    return b"".join(part.tobytes() for part in parts)
