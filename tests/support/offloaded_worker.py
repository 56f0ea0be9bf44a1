"""A runtime of the tiny random LingBot model under settings of offloading, and the chunks it makes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worldmodel.lingbot.adapter import create_adapter
from worldmodel.messages import ImageSize, MediaFormat, OpenSession, RequestId, SessionId, StartWorker, Tick
from worldmodel.offload_settings import OffloadSettings
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime

WIDTH, HEIGHT, NUM_CHUNKS = 32, 32, 2


def start_message(offload: OffloadSettings, precision: str = "fp32") -> StartWorker:
    return StartWorker(
        model="lingbot_world_v2",
        checkpoint="random:lingbot-world-v2-tiny",
        width=WIDTH,
        height=HEIGHT,
        fps=12,
        precision=precision,
        offload=offload,
    )


def run_chunks(offload: OffloadSettings) -> tuple[list[npt.NDArray[np.uint8]], str]:
    """Return every output of some chunks, and how the worker describes itself."""
    start = start_message(offload)
    adapter = create_adapter(start, lambda *_: None)
    runtime = Runtime(adapter, allocate_cache(adapter.kv_spec(), start, adapter.attention()), device="cpu")
    session, request = SessionId("one"), RequestId("one")
    image = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    outputs = (MediaFormat.LATENT, MediaFormat.YUV420)
    opening = OpenSession(
        request_id=request,
        session_id=session,
        prompt="a street",
        seed=3,
        image=ImageSize(width=WIDTH, height=HEIGHT),
        outputs=outputs,
    )
    runtime.open(opening, image)
    found: list[npt.NDArray[np.uint8]] = []
    for index in range(NUM_CHUNKS):
        prompt = "a quay" if index == 1 else None
        chunk = runtime.tick(Tick(request_id=request, session_id=session, chunk_index=index, prompt=prompt))
        _, parts = chunk.to_host()
        found += [np.frombuffer(part, np.uint8).copy() for part in parts]
    return found, adapter.spec.attention_backend
