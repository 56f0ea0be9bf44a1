"""DreamZero behind the runtime's seam: an observation in, K/V through a lease, actions out.

A call commits what the cameras saw and predicts from there; what it predicts is never committed. The adapter holds what
all sessions share; everything of one session is in its `DreamZeroState`, which a tick reads and never writes.

Shapes: C channels, F latent frames, Y and X latent rows and columns, of pixels or latents, T frames.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcache.attention import Attention
from kvcache.spec import KVSpec
from kvcache.transaction import ChunkTransaction
from worldmodel.adapter import NO_ARRAYS, Arrays, GeneratedChunk, ModelSpec, ProgressFn, SessionOpening
from worldmodel.dreamzero.acceleration import accelerate, capture, check_choices
from worldmodel.dreamzero.captured_forward import CapturedForward
from worldmodel.dreamzero.checkpoint import DreamZeroCheckpoint
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.embodiments import KEY_PREFIX, NEGATIVE_PROMPT
from worldmodel.dreamzero.frames import CALL_FRAMES, FIRST_CALL_FRAMES
from worldmodel.dreamzero.media import OUTPUTS, RobotMedia
from worldmodel.dreamzero.memory import plan_kv
from worldmodel.dreamzero.noise import NoiseSource
from worldmodel.dreamzero.observation import Observation, ObservationReader
from worldmodel.dreamzero.observation_vae import condition_channels, condition_latents
from worldmodel.dreamzero.picture_size import latent_size
from worldmodel.dreamzero.pictures import observation_clip, signed_pictures, start_picture
from worldmodel.dreamzero.prompts import Prompt, PromptEncoder, frame_prompt
from worldmodel.dreamzero.sampler import DreamZeroSampler, Sample
from worldmodel.dreamzero.settings import check_settings
from worldmodel.dreamzero.state import DreamZeroState
from worldmodel.dreamzero.transformer import NEGATIVE, POSITIVE, TEXT_STORE, FrameInputs, kv_geometry
from worldmodel.dreamzero.transformer_config import CONDITION_MASK_CHANNELS
from worldmodel.dreamzero.weights import EmptyModules, LoadedModel, load_model
from worldmodel.errors import LoadFailed, RequestRefused
from worldmodel.messages import MediaFormat, StartWorker, Tick
from worldmodel.wan.finite import FiniteCheck
from worldmodel.wan.precision import precision_plan
from worldmodel.wan.stage_clock import StageClock

WARM_UP_CALLS = 5
"""One restart and every later start frame, then the restart at the window."""


def create_adapter(config: StartWorker, progress: ProgressFn) -> DreamZeroAdapter:
    """Load the checkpoint of a worker and return its adapter.

    Raises:
        LoadFailed: naming the setting that is wrong, for a bad size, precision, option or checkpoint.
    """
    try:
        options = DreamZeroOptions.from_json(config.model_options)
        check_settings(width=config.width, height=config.height, precision=config.precision)
    except RequestRefused as error:
        raise LoadFailed(error.message, code=error.code, field=error.field) from error
    device = _device(config.device)
    plan = precision_plan(config.precision, device=device, vae=options.vae_precision)

    def check(checkpoint: DreamZeroCheckpoint, modules: EmptyModules) -> None:
        height, width = latent_size(
            checkpoint.sizes,
            checkpoint.training.view_size,
            width=config.width,
            height=config.height,
            spatial_factor=modules.vae.spatial_factor,
        )
        kv = kv_geometry(checkpoint.sizes.transformer, plan, latent_height=height, latent_width=width)
        check_choices(checkpoint.sizes, options, plan, device, kv)

    model = load_model(config.checkpoint, options, plan, device, progress, check=check)
    return DreamZeroAdapter(model, options, config)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LoadFailed(f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}", field="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadFailed(f"device is {name!r}, but torch finds no CUDA device", field="device")
    return device


class DreamZeroAdapter:
    """Implements `worldmodel.adapter.WorldModelAdapter` for one loaded model at one picture size."""

    def __init__(self, model: LoadedModel, options: DreamZeroOptions, config: StartWorker) -> None:
        self._model = model
        self._transformer = model.transformer
        self._options = options
        self._device = model.transformer.device
        self._requested_sessions = config.requested_sessions
        self._picture_size = model.sizes.picture_size or (config.height, config.width)
        self._view_size = (config.height // 2, config.width // 2)
        self._latent_size = latent_size(
            model.sizes,
            model.view_size,
            width=config.width,
            height=config.height,
            spatial_factor=model.vae.spatial_factor,
        )
        self._observations = ObservationReader(model.robot, height=config.height, width=config.width)
        self._prompts = PromptEncoder(model.text_encoder)
        self._template = options.prompt_template or model.robot.embodiment.template
        network = model.sizes.transformer
        self._noise = NoiseSource(
            (network.out_channels, network.latent_frames_per_chunk, *self._latent_size),
            (network.actions_per_chunk, network.action_dim),
            self._device,
        )
        with torch.inference_mode():
            self._graphs: CapturedForward | str = "off"
            self._acceleration = accelerate(model, options, self.kv_spec())
            self._graphs = capture(self._acceleration, model, options, self.kv_spec())
            self._sampler = DreamZeroSampler(
                model.transformer,
                options,
                forward=self._acceleration.forward if isinstance(self._graphs, str) else self._graphs,
                final_noise=model.sizes.final_noise,
            )
            self._negative = self._prompts.encode(NEGATIVE_PROMPT)
        self._spec = self._describe(config)

    def _describe(self, config: StartWorker) -> ModelSpec:
        options, sizes = self._options, self._model.sizes
        steps = "dynamic" if options.step_skipping.value == "dynamic" else f"{options.computed_steps} of 16"
        return ModelSpec(
            width=config.width,
            height=config.height,
            fps=config.fps,
            latent_frames_per_chunk=sizes.transformer.latent_frames_per_chunk,
            first_chunk_media_frames=0,
            chunk_media_frames=0,
            parameters=self._model.num_parameters,
            precision=self._transformer.plan.description,
            attention_backend=self._acceleration.description,
            checkpoint_digest=self._model.digest,
            noise_layout="per_call",
            sampler=f"unipc, {steps}" + ("" if sizes.final_noise is None else ", decoupled"),
            robot=self._model.robot.info(sizes.action_horizon),
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
        return plan_kv(
            self._model.sizes,
            self._model.robot,
            self._transformer.plan,
            latent_size=self._latent_size,
            picture_size=self._picture_size,
            view_size=self._view_size,
            requested_sessions=self._requested_sessions,
            is_captured=not isinstance(self._graphs, str),
        )

    def attention(self) -> Attention:
        """Return the attention chosen at load."""
        return self._acceleration.attention

    # ------------------------------------------------------------ sessions

    def open_state(self, opening: SessionOpening) -> DreamZeroState:
        """Build the state before the first call. Raises `RequestRefused` for outputs this model does not make."""
        for output in opening.outputs:
            if output not in OUTPUTS:
                raise RequestRefused(
                    f"outputs: expected {' or '.join(OUTPUTS)}, got {output}", code="bad_outputs", field="outputs"
                )
        return self._start(opening.outputs, opening.prompt, opening.seed)

    def reset_state(
        self, state: DreamZeroState, *, prompt: str, seed: int, image: npt.NDArray[np.uint8] | None
    ) -> DreamZeroState:
        """Build the state before the first call of a new episode; the cameras' frames are forgotten."""
        return self._start(state.outputs, prompt, seed)

    def _start(self, outputs: tuple[MediaFormat, ...], prompt: str, seed: int) -> DreamZeroState:
        cameras = (None,) * len(self._model.robot.cameras)
        return DreamZeroState(outputs=outputs, seed=seed, prompt_text=prompt, cameras=cameras)

    # ------------------------------------------------------------ one tick

    @torch.inference_mode()
    def generate(
        self, tick: Tick, state: DreamZeroState, chunk: ChunkTransaction, arrays: Arrays = NO_ARRAYS
    ) -> GeneratedChunk[DreamZeroState]:
        """Answer one call: commit what was seen, predict the next frames and the actions until then."""
        if tick.events:
            raise RequestRefused("events: this model takes no controls", code="bad_control", field="events")
        observation = self._observations.read(arrays, state.cameras)
        prompt_text = state.prompt_text if tick.prompt is None else tick.prompt
        prompt = self._prompts.encode(frame_prompt(prompt_text, self._template))
        clock = StageClock(self._device)
        clock.mark()
        self._show_prompt(prompt, state, chunk)
        pictures_CTYX = signed_pictures(observation.pictures_THW3, *self._picture_size, self._device)
        first_CFYX: Tensor | None = None
        if self._restarts(prompt, state):
            first_CFYX, condition_CFYX = self._begin_run(pictures_CTYX, chunk)
            observed_CFYX = first_CFYX
        else:
            condition_CFYX = state.condition_CFYX
            observed_CFYX = self._append(pictures_CTYX, condition_CFYX, chunk)
        clock.mark()
        sample = self._predict(observation, condition_CFYX, state, chunk)
        outputs = {"observed latents": observed_CFYX, "actions": sample.action_NA, "latents": sample.video_CFYX}
        finite = FiniteCheck(outputs, vae=self._model.vae.dtype)
        clock.mark()
        commit_ms, denoise_ms = clock.durations_ms()
        latents = sample.video_CFYX if first_CFYX is None else torch.cat([first_CFYX, sample.video_CFYX], dim=1)
        end = chunk.first_latent_frame + chunk.num_latent_frames
        return GeneratedChunk(
            state=replace(
                state,
                prompt_text=prompt_text,
                prompt=prompt,
                cameras=observation.cameras,
                start_latent_frame=end + sample.video_CFYX.shape[1],
                condition_CFYX=condition_CFYX,
            ),
            media=RobotMedia(state.outputs, self._model.robot, observation.raw_state_S, sample.action_NA, latents),
            not_finite=finite.not_finite(),
            num_media_frames=0,
            applied=(),
            pose=None,
            denoise_ms=denoise_ms,
            commit_ms=commit_ms,
            decode_ms=0.0,
        )

    def _restarts(self, prompt: Prompt, state: DreamZeroState) -> bool:
        """Tell whether a call begins a new run: nothing before it, another prompt, or no room left.

        The official code also begins anew with one frame. Here that is the first call of an episode and no other: later
        ones are filled up to four frames.
        """
        limit = self._model.sizes.transformer.restart_latent_frame
        return (
            state.prompt is None
            or state.prompt.token_ids != prompt.token_ids
            or limit is None
            or state.start_latent_frame >= limit
        )

    def _show_prompt(self, prompt: Prompt, state: DreamZeroState, chunk: ChunkTransaction) -> None:
        """Publish the text of both branches where it is not there yet; that of the negative one never changes."""
        is_new = state.prompt is None or state.prompt.token_ids != prompt.token_ids
        if is_new or not chunk.cross_store(TEXT_STORE, branch=POSITIVE).is_filled:
            self._transformer.publish_text(prompt.rows_LC, chunk, branch=POSITIVE)
        if not chunk.cross_store(TEXT_STORE, branch=NEGATIVE).is_filled:
            self._transformer.publish_text(self._negative.rows_LC, chunk, branch=NEGATIVE)

    # ------------------------------------------------------------ what was seen

    def _begin_run(self, pictures_CTYX: Tensor, chunk: ChunkTransaction) -> tuple[Tensor, Tensor | None]:
        """Commit the first frame of a new run; return its latent and the condition channels of the run."""
        chunk.restart(1)
        picture_CYX = start_picture(pictures_CTYX)
        self._transformer.publish_image(self._model.image_encoder.encode(picture_CYX), chunk)
        sizes = self._model.sizes
        if not sizes.transformer.image_condition:
            first_CFYX = self._model.vae.encode_clip(picture_CYX[:, None])
            self._commit(first_CFYX, None, chunk)
            return first_CFYX, None
        latents_CFYX = condition_latents(self._model.vae, picture_CYX, sizes.condition_latent_frames)
        condition_CFYX = condition_channels(latents_CFYX, CONDITION_MASK_CHANNELS)
        first_CFYX = latents_CFYX[:, :1]
        self._commit(first_CFYX, condition_CFYX, chunk)
        return first_CFYX, condition_CFYX

    def _append(self, pictures_CTYX: Tensor, condition_CFYX: Tensor | None, chunk: ChunkTransaction) -> Tensor:
        """Commit the frames seen since the last call, in place of those it had predicted; return their latents."""
        latents_CFYX = self._model.vae.encode_clip(observation_clip(pictures_CTYX))[:, -chunk.num_latent_frames :]
        self._commit(latents_CFYX, condition_CFYX, chunk)
        return latents_CFYX

    def _commit(self, latents_CFYX: Tensor, condition_CFYX: Tensor | None, chunk: ChunkTransaction) -> None:
        inputs = self._frame_inputs(condition_CFYX, chunk.first_latent_frame, latents_CFYX.shape[1])
        self._sampler.commit(latents_CFYX, inputs, chunk)

    # ------------------------------------------------------------ what comes next

    def _predict(
        self,
        observation: Observation,
        condition_CFYX: Tensor | None,
        state: DreamZeroState,
        chunk: ChunkTransaction,
    ) -> Sample:
        network = self._model.sizes.transformer
        draft = chunk.draft(network.latent_frames_per_chunk)
        state_A = self._model.robot.normalize_state(observation.raw_state_S, network.state_dim)
        inputs = self._frame_inputs(
            condition_CFYX,
            draft.first_latent_frame,
            draft.num_latent_frames,
            state_A=torch.from_numpy(state_A).to(self._device),
        )
        seed = state.seed if self._options.noise_seed is None else self._options.noise_seed
        return self._sampler.denoise(self._noise.draw(seed), inputs, draft)

    def _frame_inputs(
        self, condition_CFYX: Tensor | None, first: int, num_latent_frames: int, *, state_A: Tensor | None = None
    ) -> FrameInputs:
        part_CFYX = None
        if condition_CFYX is not None:
            # Past the end of the condition its last frames serve.
            start = min(first, condition_CFYX.shape[1] - num_latent_frames)
            part_CFYX = condition_CFYX[:, start : start + num_latent_frames]
        return self._transformer.frame_inputs(
            part_CFYX,
            first_latent_frame=first,
            shape_FYX=(num_latent_frames, *self._latent_size),
            state_A=state_A,
        )

    # ------------------------------------------------------------ warm-up

    def warm_up_openings(self) -> tuple[tuple[SessionOpening, int], ...]:
        """Ask for one episode that goes through every start frame and the restart after the last one."""
        opening = SessionOpening(prompt="", seed=0, image=None, outputs=OUTPUTS)
        return ((opening, WARM_UP_CALLS),)

    def warm_up_arrays(self, chunk_index: int) -> Arrays:
        """Return black pictures, one frame in the first call and four in each later one, and a resting robot."""
        robot = self._model.robot
        count = FIRST_CALL_FRAMES if chunk_index == 0 else CALL_FRAMES
        shape = (count, robot.camera_height, robot.camera_width, 3)
        arrays: dict[str, npt.NDArray[np.generic]] = {key: np.zeros(shape, np.uint8) for key in robot.cameras}
        return arrays | {KEY_PREFIX + state.name: np.zeros(state.num_dims) for state in robot.states}

    def end_warm_up(self) -> None:
        """Capture no forward from here on."""
        if not isinstance(self._graphs, str):
            self._graphs.seal()
