"""LingBot-World v2 behind the runtime's seam: events in, K/V through a lease, media out.

The adapter holds what all sessions share (weights, sampler constants, camera basis, recent prompts). Everything of one
session is in its `LingBotState`, which a tick reads and never writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvcache.attention import Attention
from kvcache.spec import KVSpec
from kvcache.transaction import ChunkTransaction
from offload.parked_module import ParkedModule
from worldmodel.adapter import (
    NO_ARRAYS,
    Arrays,
    GeneratedChunk,
    ModelSpec,
    ProgressFn,
    SessionOpening,
    require_image,
)
from worldmodel.errors import LoadFailed, RequestRefused
from worldmodel.lingbot.acceleration import accelerate, capture, check_choices, merges_padding
from worldmodel.lingbot.camera import PACK, CameraEmbedding
from worldmodel.lingbot.captured_forward import CapturedForward
from worldmodel.lingbot.condition import next_condition, start_condition
from worldmodel.lingbot.config import LingBotOptions, Sampler
from worldmodel.lingbot.media import DeviceMedia, needs_pixels
from worldmodel.lingbot.memory import configured_kv, num_camera_bases
from worldmodel.lingbot.noise import NoiseSource, PerChunkNoise, WholeClipNoise
from worldmodel.lingbot.pipeline import ChunkSampler
from worldmodel.lingbot.prompt_transition import PromptCourse, transition_chunks
from worldmodel.lingbot.prompts import PromptEncoder
from worldmodel.lingbot.recache import CleanHistory, HistoryEncoder, extend_history
from worldmodel.lingbot.reducer import CameraPlan, CameraReducer
from worldmodel.lingbot.settings import check_settings
from worldmodel.lingbot.state import LingBotState
from worldmodel.lingbot.streaming import set_time_networks_aside, stream_request, use_growing_segments
from worldmodel.lingbot.transformer import TEXT_STORE, kv_geometry
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.lingbot.weights import LoadedModel, load_model
from worldmodel.messages import MediaFormat, StartWorker, Tick
from worldmodel.wan.finite import FiniteCheck
from worldmodel.wan.flow_scheduler import SamplerTable, nominal_table, official_table
from worldmodel.wan.image import prepare_image
from worldmodel.wan.precision import PrecisionPlan, precision_plan
from worldmodel.wan.stage_clock import StageClock
from worldmodel.wan.vae import VAECache


def create_adapter(config: StartWorker, progress: ProgressFn) -> LingBotAdapter:
    """Load the checkpoint of a worker and return its adapter.

    Raises:
        LoadFailed: naming the setting that is wrong, for a bad size, precision, option or checkpoint.
    """
    options = _options(config)
    device = _device(config.device)
    if config.offload.streams and device.type == "cuda":
        use_growing_segments(device)
    plan = precision_plan(config.precision, device=device, vae=options.vae_precision)

    def check(network: TransformerConfig) -> None:
        kv = kv_geometry(network, plan, latent_height=config.height // PACK, latent_width=config.width // PACK)
        check_choices(network, options, plan, device, kv, streams=config.offload.streams)

    model = load_model(
        config.checkpoint, options, plan, device, progress, streams_layers=config.offload.streams, check=check
    )
    table = _sampler_table(options.sampler, model.flow_shift)
    return LingBotAdapter(model, table, _noise_source(options, device, len(table)), options, config, progress)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LoadFailed(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}", field="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadFailed(f"device is {name!r}, but torch finds no CUDA device", field="device")
    return device


def _options(config: StartWorker) -> LingBotOptions:
    try:
        check_settings(width=config.width, height=config.height, precision=config.precision)
        return LingBotOptions.from_json(config.model_options).for_worker()
    except RequestRefused as error:
        raise LoadFailed(error.message, code=error.code, field=error.field) from error


def _noise_source(options: LingBotOptions, device: torch.device, num_draws: int) -> NoiseSource:
    if options.noise_clip_latent_frames is None:
        return PerChunkNoise(device=device, num_draws=num_draws)
    return WholeClipNoise(device=device, num_draws=num_draws, clip_latent_frames=options.noise_clip_latent_frames)


def _sampler_table(sampler: Sampler, flow_shift: float) -> SamplerTable:
    return official_table(flow_shift) if sampler is Sampler.OFFICIAL else nominal_table(flow_shift)


class LingBotAdapter:
    """Implements `worldmodel.adapter.WorldModelAdapter` for one loaded model at one picture size."""

    def __init__(
        self,
        model: LoadedModel,
        table: SamplerTable,
        noise: NoiseSource,
        options: LingBotOptions,
        config: StartWorker,
        progress: ProgressFn = lambda stage, fraction, detail: None,
    ) -> None:
        self._transformer = model.transformer
        self._vae = model.vae
        self._width, self._height = config.width, config.height
        self._device = model.transformer.device
        self._num_frames = model.transformer.config.latent_frames_per_chunk
        plan = model.transformer.plan
        self._vae.takes_single_frames = config.offload.decode == "per_latent_frame"
        model.transformer.keeps_camera = config.offload.camera_modulation == "per_chunk"
        if config.offload.vae == "parked":
            self._vae.residence = ParkedModule(self._vae, self._device).on_device
        self._plan_kv = partial(
            configured_kv,
            model.transformer.config,
            self._vae,
            plan,
            width=config.width,
            height=config.height,
            options=options,
            offload=config.offload,
            requested_sessions=config.requested_sessions,
        )
        self._graphs: CapturedForward | str = "off"
        self._kv = self._plan_kv()
        with torch.inference_mode():
            self._sampler = ChunkSampler(model.transformer, table)
        if config.offload.streams:
            set_time_networks_aside(model.transformer)
        self._acceleration = accelerate(model.transformer, options, self._kv, stream_request(model, config, progress))
        self._merge_padding = merges_padding(options, self._acceleration.attention.name, self._device)
        merges = self._merge_padding
        self.serve_with(capture(self._acceleration, model.transformer, options, self._kv, merges_padding=merges))
        self._noise = noise
        self._prompts = PromptEncoder(model.text_encoder, plan.linear)
        self._reducer = CameraReducer(options, config.width, config.height, fps=config.fps)
        linear = model.transformer.patch_embedding_wancamctrl
        self._camera = CameraEmbedding(
            linear.weight,
            linear.bias,
            config.height,
            config.width,
            max_bases=num_camera_bases(plan),
            dtype=plan.linear,
        )
        self._history = None
        if options.recache_on_prompt:
            self._history = HistoryEncoder(model.transformer, self._sampler, self._camera)
        self._spec = self._describe(model, options, plan, config.fps)

    def serve_with(self, graphs: CapturedForward | str) -> None:
        """Serve with captured forwards, or say why there are none. For the time before any K/V is planned."""
        self._graphs = graphs
        self._kv = self._plan_kv(is_captured=not isinstance(graphs, str))
        self._sampler.use(self._acceleration.forward, None if isinstance(graphs, str) else graphs)

    def _describe(self, model: LoadedModel, options: LingBotOptions, plan: PrecisionPlan, fps: int) -> ModelSpec:
        factor = self._vae.config.temporal_factor
        return ModelSpec(
            width=self._width,
            height=self._height,
            fps=fps,
            latent_frames_per_chunk=self._num_frames,
            first_chunk_media_frames=1 + factor * (self._num_frames - 1),
            chunk_media_frames=factor * self._num_frames,
            parameters=model.num_parameters,
            precision=plan.description,
            attention_backend=self._acceleration.description,
            checkpoint_digest=model.digest,
            noise_layout=options.noise_layout.value,
            sampler=options.sampler.value,
        )

    # ------------------------------------------------------------ facts

    @property
    def spec(self) -> ModelSpec:
        # What is captured is known when warm-up is over.
        return replace(self._spec, attention_backend=f"{self._acceleration.description}{self._graphs_shown()}")

    def _graphs_shown(self) -> str:
        if not isinstance(self._graphs, str):
            return f"; {self._graphs.description}{self._acceleration.in_graphs}"
        return f"; no graphs: {self._graphs}" if self._device.type == "cuda" else ""

    def kv_spec(self) -> KVSpec:
        """Return the K/V geometry, with the bytes this adapter holds per session and for all."""
        return self._kv

    def attention(self) -> Attention:
        """Return the attention chosen at load."""
        return self._acceleration.attention

    # ------------------------------------------------------------ sessions

    @torch.inference_mode()
    def open_state(self, opening: SessionOpening) -> LingBotState:
        """Build the state before chunk 0. Raises `RequestRefused` for an image that is none."""
        return self._start(opening.outputs, self._prepare_image(require_image(opening)), opening.prompt, opening.seed)

    @torch.inference_mode()
    def reset_state(
        self, state: LingBotState, *, prompt: str, seed: int, image: npt.NDArray[np.uint8] | None
    ) -> LingBotState:
        """Build the state before chunk 0 of a new run; outputs are kept, and the start image unless one is given."""
        image_3HW = state.image_3HW if image is None else self._prepare_image(image)
        return self._start(state.outputs, image_3HW, prompt, seed)

    def _prepare_image(self, image: npt.NDArray[np.uint8]) -> torch.Tensor:
        try:
            return prepare_image(image, self._height, self._width).to(self._device)
        except ValueError as error:
            raise RequestRefused(str(error), code="bad_image", field="image") from error

    def _start(self, outputs: tuple[MediaFormat, ...], image_3HW: torch.Tensor, prompt: str, seed: int) -> LingBotState:
        return LingBotState(
            outputs=outputs,
            image_3HW=image_3HW,
            text=PromptCourse(prompt=self._prompts.encode(prompt)),
            noise=self._noise.start(seed),
            condition=start_condition(image_3HW),
            camera=self._reducer.initial(),
        )

    # ------------------------------------------------------------ one tick

    @torch.inference_mode()
    def generate(
        self, tick: Tick, state: LingBotState, chunk: ChunkTransaction, arrays: Arrays = NO_ARRAYS
    ) -> GeneratedChunk[LingBotState]:
        """Compute one chunk: controls, condition, four denoising steps, clean history, pixels."""
        camera = self._reducer.prepare(state.camera, tick.events, self._num_frames)
        text = self._next_text(tick, state.text)
        clock = StageClock(self._device)
        clock.mark()
        self._show_text(text, state, chunk)
        condition_CFYX, condition = next_condition(self._vae, state.condition, self._num_frames)
        shape_CFYX = (self._transformer.config.out_channels, *condition_CFYX.shape[1:])
        noise, noise_state = self._noise.draw(state.noise, shape_CFYX)
        latents_CFYX = self._denoise(noise, condition_CFYX, camera, chunk, clock)
        frames_3THW, decoder_cache = self._decode(latents_CFYX, state)
        media = DeviceMedia(state.outputs, latents_CFYX, frames_3THW)
        outputs = {"condition": condition_CFYX, "latents": latents_CFYX, "pictures": frames_3THW}
        finite = FiniteCheck(outputs, vae=self._vae.dtype)
        clock.mark()
        denoise_ms, commit_ms, decode_ms = clock.durations_ms()
        return GeneratedChunk(
            state=LingBotState(
                outputs=state.outputs,
                image_3HW=state.image_3HW,
                text=text,
                noise=noise_state,
                condition=condition,
                camera=camera.state,
                decoder_cache=decoder_cache,
                history=self._extend_history(state, latents_CFYX, condition_CFYX, camera, chunk),
            ),
            media=media,
            not_finite=finite.not_finite(),
            num_media_frames=self._num_media_frames(chunk),
            applied=camera.applied,
            pose=camera.pose,
            denoise_ms=denoise_ms,
            commit_ms=commit_ms,
            decode_ms=decode_ms,
        )

    def _next_text(self, tick: Tick, text: PromptCourse) -> PromptCourse:
        """Return the text of this chunk: a prompt that is in force or under way already is not set out for again."""
        num_chunks = transition_chunks(tick.events)
        if tick.prompt is not None and tick.prompt != text.prompt.text:
            text = text.toward(self._prompts.encode(tick.prompt), num_chunks)
        return text.advanced()

    def _show_text(self, text: PromptCourse, state: LingBotState, chunk: ChunkTransaction) -> None:
        """Publish the text if it changed or is not there yet.

        History keeps what it was made with, unless `recache_on_prompt` asks for it to be encoded anew; that is done
        once, when a prompt has been reached.
        """
        is_new = text is not state.text
        if is_new or not chunk.cross_store(TEXT_STORE).is_filled:
            self._transformer.publish_text(text.rows_LC, chunk, merge_padding=self._merge_padding)
        if is_new and text.is_reached and self._history is not None and state.history:
            self._history.encode(state.history, chunk)

    def _denoise(
        self,
        noise: Sequence[torch.Tensor],
        condition_CFYX: torch.Tensor,
        camera: CameraPlan,
        chunk: ChunkTransaction,
        clock: StageClock,
    ) -> torch.Tensor:
        """Return the clean latents, their history staged. What the forwards share is freed before the decoding."""
        rays_TD = self._camera.tokens(camera.relative_n44, camera.intrinsics_n4)
        prepare = self._transformer if isinstance(self._graphs, str) else self._graphs
        inputs = prepare.chunk_inputs(condition_CFYX, rays_TD, chunk.first_latent_frame)
        latents_CFYX = self._sampler.denoise(noise, inputs, chunk)
        clock.mark()
        self._sampler.store_clean(latents_CFYX, inputs, chunk)
        clock.mark()
        return latents_CFYX

    def _extend_history(
        self,
        state: LingBotState,
        latents_CFYX: torch.Tensor,
        condition_CFYX: torch.Tensor,
        camera: CameraPlan,
        chunk: ChunkTransaction,
    ) -> CleanHistory:
        if self._history is None:
            return ()
        visible = frozenset(chunk.visible_latent_frames)
        first = chunk.first_latent_frame
        return extend_history(state.history, visible, first, latents_CFYX, condition_CFYX, camera)

    def _decode(self, latents_CFYX: torch.Tensor, state: LingBotState) -> tuple[torch.Tensor | None, VAECache | None]:
        if not needs_pixels(state.outputs):
            return None, None
        frames_13THW, cache = self._vae.decode(latents_CFYX[None], state.decoder_cache)
        return frames_13THW[0], cache

    def _num_media_frames(self, chunk: ChunkTransaction) -> int:
        is_first = chunk.first_latent_frame == 0
        return self._spec.first_chunk_media_frames if is_first else self._spec.chunk_media_frames

    # ------------------------------------------------------------ warm-up

    def warm_up_openings(self) -> tuple[tuple[SessionOpening, int], ...]:
        """Ask for one session that goes on until its window has slid, and a chunk in every other output."""
        image = np.full((self._height, self._width, 3), 128, dtype=np.uint8)
        long = SessionOpening(prompt="", seed=0, image=image, outputs=(MediaFormat.YUV420,))
        short = SessionOpening(prompt="", seed=0, image=image, outputs=(MediaFormat.RGB24, MediaFormat.LATENT))
        return (long, self._num_chunks_until_slid()), (short, 1)

    def warm_up_arrays(self, chunk_index: int) -> Arrays:
        return NO_ARRAYS

    def end_warm_up(self) -> None:
        """Capture no forward from here on."""
        if not isinstance(self._graphs, str):
            self._graphs.seal()

    def _num_chunks_until_slid(self) -> int:
        config = self._transformer.config
        if config.window_latent_frames is None:
            return 2
        return math.ceil((config.sink_latent_frames + config.window_latent_frames) / self._num_frames) + 1
