"""Run calls of tiny DreamZero sessions through the real runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worldmodel.dreamzero.adapter import DreamZeroAdapter
from worldmodel.dreamzero.media import OUTPUTS
from worldmodel.messages import (
    CloseSession,
    MediaFormat,
    OpenSession,
    RequestId,
    ResetSession,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.observations import pack_arrays, unpack_arrays
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime

Observation = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Answer:
    """What a call gave: actions float32 [rows, dims], and predicted latents."""

    actions: npt.NDArray[np.float32]
    latents: torch.Tensor


def runtime_of(adapter: DreamZeroAdapter, start: StartWorker) -> Runtime:
    """Return a runtime over an adapter, without warm-up."""
    return Runtime(adapter, allocate_cache(adapter.kv_spec(), start, adapter.attention()), device=start.device)


def open_robot(
    runtime: Runtime, name: str, *, seed: int = 0, outputs: tuple[MediaFormat, ...] = OUTPUTS, prompt: str = ""
) -> None:
    runtime.open(
        OpenSession(
            request_id=RequestId(f"open-{name}"), session_id=SessionId(name), prompt=prompt, seed=seed, outputs=outputs
        ),
        None,
    )


def call(runtime: Runtime, name: str, index: int, observation: Observation, prompt: str | None = None) -> Answer:
    """Send one observation over the bytes of a socket and return what comes back."""
    parts, payload = pack_arrays(observation)
    tick = Tick(
        request_id=RequestId(f"{name}-{index}"),
        session_id=SessionId(name),
        chunk_index=index,
        prompt=prompt,
        arrays=parts,
    )
    chunk = runtime.tick(tick, unpack_arrays(parts, b"".join(bytes(part) for part in payload)))
    media, (actions, latents) = chunk.to_host()
    shapes = [part.shape for part in media.parts]
    return Answer(
        actions=np.frombuffer(actions, np.float32).reshape(shapes[0]),
        latents=torch.frombuffer(bytearray(latents), dtype=torch.float32).reshape(shapes[1]),
    )


def reset_robot(runtime: Runtime, name: str) -> None:
    runtime.reset(ResetSession(request_id=RequestId(f"reset-{name}"), session_id=SessionId(name)), None)


def close_robot(runtime: Runtime, name: str) -> None:
    runtime.close(CloseSession(request_id=RequestId(f"close-{name}"), session_id=SessionId(name)))
