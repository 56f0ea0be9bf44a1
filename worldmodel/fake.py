"""A deterministic world model without a network, for tests and for people who write clients.

A picture is a pure function of start image, seed, prompt, camera pose and media frame index: the start image, tinted by
seed and prompt, moves with the camera. The model keeps K/V like a real one and checks in every chunk that what it sees
is exactly what it wrote, so that a mix-up of sessions or a bad rollback fails the tick.

Shapes: H height, W width, T media frames; S visible K/V rows, N rows of the chunk.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvcache.spec import CrossStoreSpec, KVSpec
from kvcache.transaction import ChunkTransaction
from worldmodel.adapter import (
    NO_ARRAYS,
    Arrays,
    GeneratedChunk,
    MediaArray,
    ModelSpec,
    ProgressFn,
    SessionOpening,
    require_image,
)
from worldmodel.errors import LoadFailed, RequestRefused, TickRolledBack
from worldmodel.fake_options import PIXELS_PER_LATENT, FailureKind, FakeOptions, command_of
from worldmodel.lingbot.camera_sources import CameraReducerState
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.reducer import CameraReducer
from worldmodel.messages import AppliedEvent, LoadStage, MediaFormat, StartWorker, Tick
from worldmodel.wan.pixels import to_yuv420

LATENT_FRAMES_PER_CHUNK = 3
FIRST_CHUNK_MEDIA_FRAMES = 9
CHUNK_MEDIA_FRAMES = 12
MEDIA_FRAMES_PER_LATENT_FRAME = 4
LATENT_CHANNELS = 16

NUM_LAYERS = 2
NUM_HEADS = 1
HEAD_DIM = 4
TOKENS_PER_LATENT_FRAME = 2
TEXT = "text"
TEXT_TOKENS = 3

# Seeds are told apart modulo NUM_SEEDS, each with a range of numbers of its own for its tokens.
NUM_SEEDS = 1009
NUMBERS_PER_SEED = 8192

WARM_UP_PROMPT = "warm-up"

Image = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FakeState:
    """Committed state of a session. `picture_HW3` is the start image at the model's size."""

    outputs: tuple[MediaFormat, ...]
    picture_HW3: Image
    prompt: str
    seed: int
    camera: CameraReducerState


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeMedia:
    arrays: tuple[MediaArray, ...]
    lost: bool

    def to_host(self) -> tuple[MediaArray, ...]:
        if self.lost:
            raise RuntimeError("the media is lost, as ordered")
        return self.arrays


class FakeAdapter:
    """`WorldModelAdapter` of the test model. Counts planned failures; everything else is in the session's state."""

    def __init__(self, start: StartWorker) -> None:
        if start.width % PIXELS_PER_LATENT or start.height % PIXELS_PER_LATENT:
            raise LoadFailed(
                f"width and height: expected multiples of {PIXELS_PER_LATENT}, got {start.width} x {start.height}",
                code="bad_size",
            )
        self._start = start
        self._options = FakeOptions.from_json(start.model_options)
        self._reducer = CameraReducer(LingBotOptions(), start.width, start.height)
        self._failures_done: Counter[tuple[FailureKind, int]] = Counter()

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            width=self._start.width,
            height=self._start.height,
            fps=self._start.fps,
            latent_frames_per_chunk=LATENT_FRAMES_PER_CHUNK,
            first_chunk_media_frames=FIRST_CHUNK_MEDIA_FRAMES,
            chunk_media_frames=CHUNK_MEDIA_FRAMES,
            parameters=0,
            precision="fp32",
            attention_backend="none",
            checkpoint_digest="none",
            noise_layout="none",
            sampler="none",
        )

    def attention(self) -> None:
        """The fake attends to nothing that needs a choice."""

    def kv_spec(self) -> KVSpec:
        picture_bytes = self._start.width * self._start.height * 3
        return KVSpec(
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_HEADS,
            head_dim=HEAD_DIM,
            tokens_per_latent_frame=TOKENS_PER_LATENT_FRAME,
            latent_frames_per_chunk=LATENT_FRAMES_PER_CHUNK,
            sink_latent_frames=self._options.sink_latent_frames,
            window_latent_frames=self._options.window_latent_frames,
            element_bytes=4,
            cross_stores=(CrossStoreSpec(name=TEXT, num_tokens=TEXT_TOKENS, num_heads=NUM_HEADS),),
            model_owned_bytes=2 * picture_bytes,
        )

    def open_state(self, opening: SessionOpening) -> FakeState:
        return FakeState(
            outputs=opening.outputs,
            picture_HW3=self._fit(require_image(opening)),
            prompt=opening.prompt,
            seed=opening.seed,
            camera=self._reducer.initial(),
        )

    def reset_state(self, state: FakeState, *, prompt: str, seed: int, image: Image | None) -> FakeState:
        return replace(
            state,
            picture_HW3=state.picture_HW3 if image is None else self._fit(image),
            prompt=prompt,
            seed=seed,
            camera=self._reducer.initial(),
        )

    def generate(
        self, tick: Tick, state: FakeState, chunk: ChunkTransaction, arrays: Arrays = NO_ARRAYS
    ) -> GeneratedChunk[FakeState]:
        started_s = time.perf_counter()
        failure = self._failure_of(tick, state)
        if failure is FailureKind.REFUSE:
            raise RequestRefused("refused, as ordered", code="ordered", field="prompt")
        plan = self._reducer.prepare(state.camera, tick.events, chunk.num_latent_frames)
        fail_now(failure, FailureKind.EARLY)
        prompt = state.prompt if tick.prompt is None else tick.prompt
        _write_kv(chunk, seed=state.seed, prompt=prompt, leave_out_last_layer=failure is FailureKind.INCOMPLETE)
        denoised_s = time.perf_counter()
        fail_now(failure, FailureKind.LATE)
        fail_for_good(failure)
        media = tuple(
            self._draw(output, state, prompt, plan.poses_n44, chunk.first_latent_frame) for output in state.outputs
        )
        self._wait(started_s)
        return GeneratedChunk(
            state=replace(state, prompt=prompt, camera=plan.state),
            media=FakeMedia(arrays=media, lost=failure is FailureKind.MEDIA),
            not_finite=("latents", "pictures") if failure is FailureKind.NOT_FINITE else (),
            num_media_frames=FIRST_CHUNK_MEDIA_FRAMES if chunk.first_latent_frame == 0 else CHUNK_MEDIA_FRAMES,
            applied=(
                (AppliedEvent(event_id=2**40, latent_frame=0),) if failure is FailureKind.WRONG_EVENTS else plan.applied
            ),
            pose=plan.pose,
            denoise_ms=1000.0 * (denoised_s - started_s),
            commit_ms=0.0,
            decode_ms=1000.0 * (time.perf_counter() - denoised_s),
        )

    def warm_up_openings(self) -> tuple[tuple[SessionOpening, int], ...]:
        visible = self._options.sink_latent_frames + self._options.window_latent_frames
        opening = SessionOpening(
            prompt=WARM_UP_PROMPT,
            seed=0,
            image=np.zeros((8, 8, 3), np.uint8),
            outputs=(MediaFormat.YUV420, MediaFormat.RGB24, MediaFormat.LATENT),
        )
        return ((opening, visible // LATENT_FRAMES_PER_CHUNK + 2),)

    def warm_up_arrays(self, chunk_index: int) -> Arrays:
        return NO_ARRAYS

    def end_warm_up(self) -> None:
        """Do nothing: nothing is captured."""

    # ---------------------------------------------------------------- orders

    def _failure_of(self, tick: Tick, state: FakeState) -> FailureKind | None:
        if state.prompt == WARM_UP_PROMPT:
            return self._options.warm_up_failure
        if self._options.prompt_commands and (kind := command_of(tick.prompt)) is not None:
            return kind
        for planned in self._options.failures:
            key = (planned.kind, planned.chunk_index)
            if planned.chunk_index == tick.chunk_index and self._failures_done[key] < planned.times:
                self._failures_done[key] += 1
                return planned.kind
        return None

    def _wait(self, started_s: float) -> None:
        time.sleep(max(0.0, started_s + self._options.chunk_ms / 1000.0 - time.perf_counter()))

    # ---------------------------------------------------------------- pictures

    def _fit(self, image_HW3: Image) -> Image:
        rows = np.arange(self._start.height) * image_HW3.shape[0] // self._start.height
        columns = np.arange(self._start.width) * image_HW3.shape[1] // self._start.width
        picture_HW3: Image = image_HW3[rows][:, columns]
        return picture_HW3

    def _draw(
        self,
        output: MediaFormat,
        state: FakeState,
        prompt: str,
        poses_n44: npt.NDArray[np.float64],
        first_latent_frame: int,
    ) -> MediaArray:
        if output is MediaFormat.LATENT:
            return MediaArray(format=output, array=self._latents(state.seed, prompt, first_latent_frame))
        frames = []
        for number, pose_44 in enumerate(poses_n44):
            latent_frame = first_latent_frame + number
            first = 0 if latent_frame == 0 else MEDIA_FRAMES_PER_LATENT_FRAME * (latent_frame - 1) + 1
            for media_frame in range(first, MEDIA_FRAMES_PER_LATENT_FRAME * latent_frame + 1):
                frames.append(_picture(state.picture_HW3, state.seed, prompt, pose_44, media_frame))
        frames_THW3 = np.stack(frames)
        if output is MediaFormat.RGB24:
            return MediaArray(format=output, array=frames_THW3)
        # What to_yuv420 quantises back to the same levels.
        frames_3THW = torch.from_numpy(frames_THW3).permute(3, 0, 1, 2).float() / 127.5 - 1.0
        return MediaArray(format=output, array=to_yuv420(frames_3THW).numpy())

    def _latents(self, seed: int, prompt: str, first_latent_frame: int) -> npt.NDArray[np.float32]:
        height, width = self._start.height // PIXELS_PER_LATENT, self._start.width // PIXELS_PER_LATENT
        generator = np.random.default_rng([seed, _hash(prompt), first_latent_frame])
        shape = (LATENT_CHANNELS, LATENT_FRAMES_PER_CHUNK, height, width)
        return generator.standard_normal(shape, dtype=np.float32)


def create_adapter(start: StartWorker, progress: ProgressFn) -> FakeAdapter:
    """Build the test model. Raises `LoadFailed`."""
    adapter = FakeAdapter(start)
    options = FakeOptions.from_json(start.model_options)
    stages = (LoadStage.CHECKPOINT, LoadStage.TRANSFORMER, LoadStage.VAE, LoadStage.TEXT_ENCODER)
    for stage in stages:
        progress(stage, 0.0, "")
        time.sleep(options.load_ms / 1000.0 / len(stages))
        progress(stage, 1.0, "")
    if options.load_error is not None:
        raise LoadFailed(options.load_error)
    return adapter


def _picture(picture_HW3: Image, seed: int, prompt: str, pose_44: npt.NDArray[np.float64], media_frame: int) -> Image:
    """Draw one media frame: the start image shifted by the camera, a tint, and a bar that moves every frame."""
    height, width, _ = picture_HW3.shape
    yaw, pitch = np.arctan2(pose_44[0, 2], pose_44[2, 2]), np.arcsin(np.clip(-pose_44[1, 2], -1.0, 1.0))
    shift_x = round(width * (yaw / np.pi + pose_44[0, 3] / 4.0))
    shift_y = round(height * (pitch / np.pi - pose_44[2, 3] / 4.0))
    frame_HW3 = np.roll(picture_HW3, (shift_y, -shift_x), axis=(0, 1)) // 2
    tint = np.array([(_hash(prompt) >> (8 * channel)) + seed * (37 + channel) & 0x7F for channel in range(3)], np.uint8)
    frame_HW3 += tint
    column = media_frame % width
    frame_HW3[-max(1, height // 16) :, column : column + max(1, width // 32)] = 255
    return frame_HW3


def _write_kv(chunk: ChunkTransaction, *, seed: int, prompt: str, leave_out_last_layer: bool) -> None:
    """Write K/V that names its session, frame and layer, and check everything visible. Raises RuntimeError."""
    text = chunk.cross_store(TEXT)
    expected_text = [
        _pattern([_hash(prompt) % NUM_SEEDS], layer).repeat(TEXT_TOKENS, 1, 1) for layer in range(NUM_LAYERS)
    ]
    if not text.is_filled or not torch.equal(text.read(0)[0], expected_text[0]):
        text.publish([(rows, -rows) for rows in expected_text])
    written = range(chunk.first_latent_frame, chunk.first_latent_frame + chunk.num_latent_frames)
    for layer in range(NUM_LAYERS - leave_out_last_layer):
        k_NHD = _rows(written, seed, layer)
        chunk.write(layer, k_NHD, -k_NHD)
        k_SHD, v_SHD = chunk.visible(layer)
        expected_SHD = _rows(chunk.visible_latent_frames, seed, layer)
        if not (torch.equal(k_SHD, expected_SHD) and torch.equal(v_SHD, -expected_SHD)):
            raise RuntimeError(f"layer {layer} at latent frame {chunk.first_latent_frame} sees K/V it did not write")


def _rows(frames: Sequence[int], seed: int, layer: int) -> torch.Tensor:
    tokens = [frame * TOKENS_PER_LATENT_FRAME + token for frame in frames for token in range(TOKENS_PER_LATENT_FRAME)]
    return _pattern([seed % NUM_SEEDS * NUMBERS_PER_SEED + token for token in tokens], layer)


def _pattern(numbers: Sequence[int], layer: int) -> torch.Tensor:
    """Return rows [len, H, D] of whole numbers below 2^24, which float32 holds exactly."""
    rows = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)
    return rows.expand(-1, NUM_HEADS, HEAD_DIM) + layer * 0.5


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def fail_now(failure: FailureKind | None, here: FailureKind) -> None:
    """Raise if that failure was ordered for this moment."""
    if failure is FailureKind.TRANSIENT and here is FailureKind.LATE:
        raise TickRolledBack("the chunk fails for this once, as ordered", transient=True)
    if failure is here:
        raise RuntimeError(f"the chunk fails {here}, as ordered")


def fail_for_good(failure: FailureKind | None) -> None:
    """Die or never come back, if that is what was ordered."""
    if failure is FailureKind.CRASH:
        os.kill(os.getpid(), signal.SIGKILL)
    if failure is FailureKind.HANG:
        threading.Event().wait()
