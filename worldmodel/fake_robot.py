"""A deterministic robot model without a network, for tests and for people who write robot clients.

The actions of a chunk are a pure function of everything the session has observed in its run, in order: pictures, states
and prompts. So an observation that is lost, seen twice, or another robot's shows in every later action. K/V is kept and
checked like a real model's.

Shapes: H height, W width, T frames; S visible K/V rows, N rows of the chunk; R action rows, A action dims.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvcache.spec import KVSpec
from kvcache.transaction import ChunkTransaction
from worldmodel.adapter import NO_ARRAYS, Arrays, GeneratedChunk, MediaArray, ModelSpec, ProgressFn, SessionOpening
from worldmodel.errors import RequestRefused
from worldmodel.fake import fail_for_good, fail_now
from worldmodel.fake_options import FailureKind, command_of
from worldmodel.fake_robot_options import FakeRobotOptions
from worldmodel.messages import AppliedEvent, LoadStage, MediaFormat, RobotInfo, StartWorker, StateInput, Tick

ACTION_HORIZON = 24
ACTION_DIMS = 8
MAX_REQUEST_FRAMES = 4
CAMERAS = (
    "observation/exterior_image_0_left",
    "observation/exterior_image_1_left",
    "observation/wrist_image_left",
)
STATES = (
    StateInput(name="observation/joint_position", num_dims=7),
    StateInput(name="observation/gripper_position", num_dims=1),
)

LATENT_FRAMES_PER_CHUNK = 2
WINDOW_LATENT_FRAMES = 6
NUM_VISIBLE_CHUNKS = WINDOW_LATENT_FRAMES // LATENT_FRAMES_PER_CHUNK
HEAD_DIM = 4
NUM_LAYERS = 2

UNKNOWN_EVENT = AppliedEvent(event_id=0, latent_frame=0)
"""What is reported as applied where wrong events are ordered; a robot's tick has none."""

# Whole numbers below 2^24, which float32 holds exactly.
NUM_MARKS = 2**23

Actions = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRobotState:
    """Committed state of a session: a digest of all it observed in this run, and what its last chunks wrote to K/V."""

    digest: bytes
    num_chunks: int
    marks: tuple[int, ...]


EMPTY = FakeRobotState(digest=bytes(16), num_chunks=0, marks=())


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeActions:
    actions_RA: Actions
    lost: bool

    def to_host(self) -> tuple[MediaArray, ...]:
        if self.lost:
            raise RuntimeError("the actions are lost, as ordered")
        return (MediaArray(format=MediaFormat.ACTIONS, array=self.actions_RA),)


def observe(digest: bytes, prompt: str, arrays: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Return the digest of a run after one more observation."""
    fold = hashlib.blake2b(digest, digest_size=16)
    fold.update(prompt.encode())
    for name in sorted(arrays):
        array = arrays[name]
        fold.update(f"\0{name}\0{array.dtype.str}{array.shape}".encode())
        fold.update(np.ascontiguousarray(array).tobytes())
    return fold.digest()


def actions_of(digest: bytes) -> Actions:
    """Return the actions [R, A] that follow a digest, between -1 and 1 and changing slowly from row to row."""
    generator = np.random.default_rng(np.frombuffer(digest, np.uint32))
    start_A, end_A = generator.uniform(-1.0, 1.0, (2, ACTION_DIMS))
    steps_R1 = np.linspace(0.0, 1.0, ACTION_HORIZON)[:, None]
    actions_RA: Actions = (start_A + (end_A - start_A) * steps_R1).astype(np.float32)
    return actions_RA


class FakeRobotAdapter:
    """`WorldModelAdapter` of the test robot."""

    def __init__(self, start: StartWorker) -> None:
        self._start = start
        self._options = FakeRobotOptions.from_json(start.model_options)

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            width=self._start.width,
            height=self._start.height,
            fps=self._start.fps,
            latent_frames_per_chunk=LATENT_FRAMES_PER_CHUNK,
            first_chunk_media_frames=0,
            chunk_media_frames=0,
            parameters=0,
            precision="fp32",
            attention_backend="none",
            checkpoint_digest="none",
            noise_layout="none",
            sampler="none",
            robot=RobotInfo(
                embodiment="test_arm",
                cameras=CAMERAS,
                states=STATES,
                image_height=self._start.height,
                image_width=self._start.width,
                max_request_frames=MAX_REQUEST_FRAMES,
                action_space="joint_position",
                action_horizon=ACTION_HORIZON,
                action_dims=ACTION_DIMS,
                needs_wrist_camera=True,
                num_external_cameras=2,
                needs_stereo_camera=False,
            ),
        )

    def attention(self) -> None:
        """Nothing here attends."""

    def kv_spec(self) -> KVSpec:
        return KVSpec(
            num_layers=NUM_LAYERS,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            tokens_per_latent_frame=1,
            latent_frames_per_chunk=LATENT_FRAMES_PER_CHUNK,
            sink_latent_frames=0,
            window_latent_frames=WINDOW_LATENT_FRAMES,
            element_bytes=4,
            model_owned_bytes=64,
        )

    def open_state(self, opening: SessionOpening) -> FakeRobotState:
        if opening.outputs != (MediaFormat.ACTIONS,):
            raise RequestRefused(
                f"outputs: expected actions only, got {', '.join(opening.outputs)}", code="bad_outputs", field="outputs"
            )
        return EMPTY

    def reset_state(
        self, state: FakeRobotState, *, prompt: str, seed: int, image: npt.NDArray[np.uint8] | None
    ) -> FakeRobotState:
        return EMPTY

    def generate(
        self, tick: Tick, state: FakeRobotState, chunk: ChunkTransaction, arrays: Arrays = NO_ARRAYS
    ) -> GeneratedChunk[FakeRobotState]:
        started_s = time.perf_counter()
        failure = command_of(tick.prompt) if self._options.prompt_commands else None
        if failure is FailureKind.REFUSE:
            raise RequestRefused("refused, as ordered", code="bad_observation", field="prompt")
        self._check(arrays)
        fail_now(failure, FailureKind.EARLY)
        digest = observe(state.digest, tick.prompt or "", arrays)
        marks = (*state.marks, int.from_bytes(digest[:3]) % NUM_MARKS)[-NUM_VISIBLE_CHUNKS:]
        num_chunks = state.num_chunks + 1
        _write_kv(
            chunk,
            {num_chunks - len(marks) + index: mark for index, mark in enumerate(marks)},
            leave_out_last_layer=failure is FailureKind.INCOMPLETE,
        )
        denoised_s = time.perf_counter()
        fail_now(failure, FailureKind.LATE)
        fail_for_good(failure)
        time.sleep(max(0.0, started_s + self._options.chunk_ms / 1000.0 - time.perf_counter()))
        return GeneratedChunk(
            state=FakeRobotState(digest=digest, num_chunks=num_chunks, marks=marks),
            media=FakeActions(actions_RA=actions_of(digest), lost=failure is FailureKind.MEDIA),
            not_finite=("actions",) if failure is FailureKind.NOT_FINITE else (),
            num_media_frames=0,
            applied=(UNKNOWN_EVENT,) if failure is FailureKind.WRONG_EVENTS else (),
            pose=None,
            denoise_ms=1000.0 * (denoised_s - started_s),
            commit_ms=0.0,
            decode_ms=0.0,
        )

    def warm_up_openings(self) -> tuple[tuple[SessionOpening, int], ...]:
        opening = SessionOpening(prompt="", seed=0, image=None, outputs=(MediaFormat.ACTIONS,))
        return ((opening, WINDOW_LATENT_FRAMES // LATENT_FRAMES_PER_CHUNK + 2),)

    def warm_up_arrays(self, chunk_index: int) -> Arrays:
        picture_HW3 = np.zeros((self._start.height, self._start.width, 3), np.uint8)
        return {name: picture_HW3 for name in CAMERAS}

    def end_warm_up(self) -> None:
        """Do nothing: nothing is captured."""

    def _check(self, arrays: Arrays) -> None:
        """Refuse a camera that is missing or of the wrong shape, and states of the wrong length."""
        for name in CAMERAS:
            if name not in arrays:
                raise _refusal(name, "expected pictures of this camera, got none")
            array = arrays[name]
            frames = array.shape[0] if array.ndim == 4 else 1
            size = (self._start.height, self._start.width, 3)
            is_clip = array.ndim in (3, 4) and 1 <= frames <= MAX_REQUEST_FRAMES
            if array.dtype != np.uint8 or array.shape[-3:] != size or not is_clip:
                raise _refusal(name, f"expected uint8 [1 to 4 frames, {size}], got {array.dtype} {list(array.shape)}")
        for state in STATES:
            numbers = arrays.get(state.name)
            if numbers is not None and (numbers.size != state.num_dims or numbers.dtype.kind not in "fiu"):
                numbers_word = "number" if state.num_dims == 1 else "numbers"
                problem = f"expected {state.num_dims} {numbers_word}, got {numbers.dtype} {list(numbers.shape)}"
                raise _refusal(state.name, problem)


def create_adapter(start: StartWorker, progress: ProgressFn) -> FakeRobotAdapter:
    """Build the test robot. Raises `RequestRefused` for bad options."""
    adapter = FakeRobotAdapter(start)
    stages = (LoadStage.CHECKPOINT, LoadStage.TRANSFORMER, LoadStage.VAE, LoadStage.TEXT_ENCODER)
    for stage in stages:
        progress(stage, 0.0, "")
        time.sleep(FakeRobotOptions.from_json(start.model_options).load_ms / 1000.0 / len(stages))
        progress(stage, 1.0, "")
    return adapter


def _refusal(name: str, problem: str) -> RequestRefused:
    return RequestRefused(f"{name}: {problem}", code="bad_observation", field=name)


def _write_kv(chunk: ChunkTransaction, marks: Mapping[int, int], *, leave_out_last_layer: bool) -> None:
    """Write K/V that names its run and frame, and check everything visible. Raises RuntimeError.

    `marks` maps chunk indices to the number that stands for the chunk.
    """
    written = range(chunk.first_latent_frame, chunk.first_latent_frame + chunk.num_latent_frames)
    for layer in range(NUM_LAYERS - leave_out_last_layer):
        k_NHD = _rows(written, marks, layer)
        chunk.write(layer, k_NHD, -k_NHD)
        k_SHD, v_SHD = chunk.visible(layer)
        expected_SHD = _rows(chunk.visible_latent_frames, marks, layer)
        if not (torch.equal(k_SHD, expected_SHD) and torch.equal(v_SHD, -expected_SHD)):
            raise RuntimeError(f"layer {layer} at latent frame {chunk.first_latent_frame} sees K/V it did not write")


def _rows(frames: Sequence[int], marks: Mapping[int, int], layer: int) -> torch.Tensor:
    numbers = [marks[frame // LATENT_FRAMES_PER_CHUNK] + frame % LATENT_FRAMES_PER_CHUNK for frame in frames]
    rows = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)
    return rows.expand(-1, 1, HEAD_DIM) + layer * 0.5
