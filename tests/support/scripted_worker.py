"""A worker process without a model, which does what prompts and options tell it.

`StartWorker.model_options`: `load` is "ready", "fail", "crash", "crash_once" (with `marker`, a path) or "hang";
`stubborn` ignores SIGTERM and StopWorker. The prompt of a tick: see `TICKS`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from pathlib import Path

from worldmodel.framing import Frame, FrameReader, receive_frame, send_frame
from worldmodel.messages import (
    ChunkMedia,
    CloseSession,
    FailureOutcome,
    LoadProgress,
    LoadStage,
    MediaFormat,
    MediaPart,
    MemoryStats,
    ModelInfo,
    OpenSession,
    RequestFailed,
    RequestId,
    ResetSession,
    SessionClosed,
    SessionOpened,
    SessionReset,
    StageTimings,
    StartWorker,
    StopWorker,
    Tick,
    TickCommitted,
    WorkerFailed,
    WorkerReady,
)

MEMORY = MemoryStats(sessions=0, total_pages=10, free_pages=10)
INFO = ModelInfo(
    model="scripted",
    width=4,
    height=2,
    fps=12,
    latent_frames_per_chunk=3,
    first_chunk_media_frames=1,
    chunk_media_frames=1,
    sink_latent_frames=0,
    window_latent_frames=3,
    capacity_sessions=1,
    total_pages=10,
    kv_bytes_per_session=1,
    device="cpu",
    precision="fp32",
    attention_backend="none",
    checkpoint_digest="none",
    parameters=0,
    noise_layout="none",
    sampler="none",
)
TICKS = ("die", "hang", "garbage", "wrong_id", "refused", "rolled_back", "unknown", "die_after_commit", "lose_media")


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--socket-fd", type=int, required=True)
    sock = socket.socket(fileno=arguments.parse_args().socket_fd)
    reader = FrameReader()
    frame = receive_frame(sock, reader)
    assert frame is not None
    start = frame.message
    assert isinstance(start, StartWorker)
    options = json.loads(start.model_options)
    stubborn = bool(options.get("stubborn"))
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    send_frame(sock, LoadProgress(stage=LoadStage.CHECKPOINT, fraction=0.5, detail="half"))
    load(sock, options)
    send_frame(sock, WorkerReady(info=INFO, memory=MEMORY))
    while (frame := next_frame(sock, reader)) is not None:
        message = frame.message
        if isinstance(message, StopWorker) and not stubborn:
            return 0
        if isinstance(message, Tick):
            tick(sock, message)
        elif isinstance(message, OpenSession | ResetSession | CloseSession):
            answer(sock, message, len(frame.payload))
    while stubborn:
        time.sleep(60)
    return 0


def next_frame(sock: socket.socket, reader: FrameReader) -> Frame | None:
    try:
        return receive_frame(sock, reader)
    except ConnectionError:
        return None


def load(sock: socket.socket, options: dict[str, str]) -> None:
    mode = options.get("load", "ready")
    if mode == "fail":
        send_frame(sock, WorkerFailed(code="bad_checkpoint", message="the checkpoint lacks vae/config.json"))
        raise SystemExit(3)
    if mode == "hang":
        time.sleep(3600)
    marker = Path(options.get("marker", "/nonexistent"))
    if mode == "crash" or (mode == "crash_once" and not marker.exists()):
        if mode == "crash_once":
            marker.touch()
        os._exit(7)


def answer(sock: socket.socket, message: OpenSession | ResetSession | CloseSession, payload_bytes: int) -> None:
    memory = MemoryStats(sessions=1, total_pages=10, free_pages=9, rss_bytes=payload_bytes)
    request_id, session_id = message.request_id, message.session_id
    match message:
        case OpenSession():
            send_frame(sock, SessionOpened(request_id=request_id, session_id=session_id, memory=memory))
        case ResetSession():
            send_frame(sock, SessionReset(request_id=request_id, session_id=session_id, memory=memory))
        case CloseSession():
            send_frame(sock, SessionClosed(request_id=request_id, session_id=session_id, memory=memory))


def tick(sock: socket.socket, message: Tick) -> None:
    what = message.prompt
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hang":
        time.sleep(3600)
    elif what == "garbage":
        sock.sendall(b"\xff" * 64)
    elif what in ("refused", "rolled_back", "unknown"):
        fail(sock, message, FailureOutcome(what))
    else:
        request_id = RequestId("someone-else") if what == "wrong_id" else message.request_id
        commit(sock, message, request_id)
        if what == "die_after_commit":
            os._exit(9)
        elif what == "lose_media":
            fail(sock, message, FailureOutcome.UNKNOWN)
        else:
            media(sock, message)


def fail(sock: socket.socket, message: Tick, outcome: FailureOutcome) -> None:
    failed = RequestFailed(
        request_id=message.request_id,
        session_id=message.session_id,
        outcome=outcome,
        code="scripted",
        message="as told",
        memory=MEMORY,
        field="prompt",
        transient=True,
    )
    send_frame(sock, failed)


def commit(sock: socket.socket, message: Tick, request_id: RequestId) -> None:
    committed = TickCommitted(
        request_id=request_id,
        session_id=message.session_id,
        chunk_index=message.chunk_index,
        applied_event_ids=message.event_ids,
        applied=(),
        num_media_frames=1,
        pose=None,
        timings=StageTimings(denoise_ms=1.0, commit_ms=1.0, decode_ms=1.0),
        memory=MEMORY,
    )
    send_frame(sock, committed)


def media(sock: socket.socket, message: Tick) -> None:
    pixels = bytes([message.chunk_index % 256]) * 24
    part = MediaPart(format=MediaFormat.RGB24, shape=(1, 2, 4, 3), num_bytes=24)
    chunk = ChunkMedia(
        request_id=message.request_id,
        session_id=message.session_id,
        chunk_index=message.chunk_index,
        num_media_frames=1,
        parts=(part,),
        transfer_ms=0.1,
    )
    send_frame(sock, chunk, [pixels])


if __name__ == "__main__":
    raise SystemExit(main())
