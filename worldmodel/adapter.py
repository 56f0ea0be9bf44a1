"""The seam between the runtime, which knows no model, and one model. Implemented by `lingbot/adapter.py` and `fake.py`.

A session's model-owned state is one object that is never changed in place: `generate` reads the committed state and
returns the next one, and the runtime replaces it at commit. Rolling back is therefore dropping an object. What lives in
preallocated storage (K/V) goes through `kvcache` leases, which stage, commit and roll back on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvcache.attention import Attention
from kvcache.spec import KVSpec
from kvcache.transaction import ChunkTransaction
from worldmodel.errors import RequestRefused
from worldmodel.messages import AppliedEvent, LoadStage, MediaFormat, RobotInfo, Tick

StateT = TypeVar("StateT")

ProgressFn = Callable[[LoadStage, float, str], None]
"""Called with (stage, fraction 0..1, detail) while an adapter loads."""

Arrays = Mapping[str, npt.NDArray[np.generic]]
"""Observation arrays of one tick by request key, read-only."""

NO_ARRAYS: Arrays = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the runtime and the server must know of a loaded model. Sizes in pixels."""

    width: int
    height: int
    fps: int
    latent_frames_per_chunk: int
    first_chunk_media_frames: int
    chunk_media_frames: int
    parameters: int
    precision: str
    attention_backend: str
    checkpoint_digest: str
    noise_layout: str
    sampler: str
    robot: RobotInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpening:
    """Everything a rollout starts from.

    `image` is uint8 [height, width, 3] at the client's own size, None if the client gave none.
    """

    prompt: str
    seed: int
    image: npt.NDArray[np.uint8] | None
    outputs: tuple[MediaFormat, ...]


def require_image(opening: SessionOpening) -> npt.NDArray[np.uint8]:
    """Return the start image of a model that can't do without. Raises `RequestRefused`."""
    if opening.image is None:
        raise RequestRefused(
            "image: expected a start image, this model makes none itself", code="bad_image", field="image"
        )
    return opening.image


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaArray:
    """One output of a chunk on the host, shaped as `MediaFormat` says."""

    format: MediaFormat
    array: npt.NDArray[np.generic]


class GeneratedMedia(Protocol):
    """Media of a generated chunk, maybe still on the device."""

    def to_host(self) -> tuple[MediaArray, ...]:
        """Wait for the copies and return the arrays in the order of `SessionOpening.outputs`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedChunk(Generic[StateT]):
    """Result of one tick before it is committed: the next state and what the client will see.

    `not_finite` names the outputs that hold a NaN or an infinity, as found before they became pixels or units; the
    runtime rolls such a chunk back.
    """

    state: StateT
    media: GeneratedMedia
    not_finite: tuple[str, ...]
    num_media_frames: int
    applied: tuple[AppliedEvent, ...]
    pose: tuple[float, ...] | None
    denoise_ms: float
    commit_ms: float
    decode_ms: float


class WorldModelAdapter(Protocol[StateT]):
    """All code that knows one model.

    Adapters raise `worldmodel.errors.RequestRefused` for input a client can correct, before anything is staged; any
    other exception inside `generate` rolls the tick back.
    """

    @property
    def spec(self) -> ModelSpec: ...

    def kv_spec(self) -> KVSpec:
        """Return the immutable KV geometry, without the requested capacity applied to memory."""
        ...

    def attention(self) -> Attention | None:
        """Return what computes attention over the K/V storage; None for torch's own."""
        ...

    def open_state(self, opening: SessionOpening) -> StateT:
        """Build the state before chunk 0. No K/V is touched; text K/V is published by the first tick."""
        ...

    def reset_state(self, state: StateT, *, prompt: str, seed: int, image: npt.NDArray[np.uint8] | None) -> StateT:
        """Build the state before chunk 0 of a new run; `image=None` keeps the old start image."""
        ...

    def generate(
        self, tick: Tick, state: StateT, chunk: ChunkTransaction, arrays: Arrays = NO_ARRAYS
    ) -> GeneratedChunk[StateT]:
        """Compute one chunk. Writes K/V only through `chunk`; leaves `state` as it was.

        `chunk.first_latent_frame` is the absolute frame index of the chunk in the session. `arrays` are what
        `tick.arrays` describes; they are valid during the call. The runtime gives none to a model without
        `ModelSpec.robot`.
        """
        ...

    def warm_up_openings(self) -> tuple[tuple[SessionOpening, int], ...]:
        """Sessions to run at load, with the number of chunks of each, so that every later tick finds warm code."""
        ...

    def warm_up_arrays(self, chunk_index: int) -> Arrays:
        """Return the observation of one chunk of a warm-up session; empty for a model that takes none."""
        ...

    def end_warm_up(self) -> None:
        """Take note that the warm-up sessions are over: from here on nothing is captured or chosen."""
        ...
