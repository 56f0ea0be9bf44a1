"""The DreamZero transformer: all branches in one forward, observed frames committed, noisy frames drafted.

The forward is split by how often a part changes. Constant for a model: `time_constants`, `step_time`. Once per prompt:
`publish_text`. Once per run: `publish_image`. Once per call: `frame_inputs`. Per step: `velocity`. Observed frames:
`commit`, which stops after K and V of the last layer.

Before the first cross-attention all branches are equal, so that layer 0 has one stream of self-attention.

Shapes: B streams, T tokens of a forward (video in (frame, row, column) order, then actions, then state), V video
tokens, D model width, H heads, K head size, P rotated pairs, L text rows, I image width, C channels, F latent frames,
Y and X latent rows and columns, N actions, A action or state width.
Source of the formulas: DreamZero official code, the causal Wan model of its action head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kvcache.pool import WritableRows
from kvcache.spec import AtWindow, Branch, CrossStoreSpec, KVSpec
from kvcache.transaction import BranchedLayerKV
from worldmodel.dreamzero.transformer_config import TransformerConfig
from worldmodel.dreamzero.transformer_layers import (
    ActionEncoder,
    CategoryPerceptron,
    ImageProjection,
    Layer,
    Segment,
    action_time_encoding,
)
from worldmodel.wan.layers import PATCH, patchify, unpatchify
from worldmodel.wan.precision import PrecisionPlan
from worldmodel.wan.rope import axis_angles, rotate
from worldmodel.wan.transformer import Head, TimeConstants, WanTransformer, text_projection, time_networks

TEXT_STORE = "text"
IMAGE_STORE = "image"

POSITIVE, NEGATIVE = 0, 1
BRANCHES = (Branch(name="positive", local_slot=0), Branch(name="negative", local_slot=1))
NUM_BRANCHES = len(BRANCHES)

SHARED_LAYERS = 1
"""Layers whose self-attention no text has reached yet."""


class DraftKV(BranchedLayerKV, Protocol):
    """K/V of a forward with action and state tokens; `kvcache.draft.ChunkDraft`."""

    def write_registers_all(self, layer: int, k_BRHD: Tensor, v_BRHD: Tensor) -> None: ...

    def rows_to_write_all(self, layer: int, num_registers: int = 0) -> WritableRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Constants of one denoising step: the timestep of the video and that of actions and state."""

    video: TimeConstants
    action: TimeConstants
    action_encoding_D: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameInputs:
    """What the forwards over the same latent frames share. `condition` is None without condition channels.

    `state_1D` and rotations of registers are there for a draft only.
    """

    condition: Tensor | None
    rotations: Tensor
    state_1D: Tensor | None
    num_latent_frames: int
    latent_height: int
    latent_width: int

    @property
    def num_video_tokens(self) -> int:
        return self.num_latent_frames * (self.latent_height // PATCH) * (self.latent_width // PATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Velocity:
    """Predicted flow (noise - clean), float32: of the video in every branch, of the actions in the positive one."""

    video_BCFYX: Tensor
    action_NA: Tensor


def kv_geometry(
    config: TransformerConfig,
    plan: PrecisionPlan,
    *,
    latent_height: int,
    latent_width: int,
    requested_sessions: int = 1,
) -> KVSpec:
    """Return what the K/V cache must hold for this transformer at one latent size."""
    text = CrossStoreSpec(name=TEXT_STORE, num_tokens=config.text_rows, num_heads=config.num_heads)
    image = CrossStoreSpec(
        name=IMAGE_STORE, num_tokens=config.image_tokens, num_heads=config.num_heads, shared_between_branches=True
    )
    return KVSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        tokens_per_latent_frame=(latent_height // PATCH) * (latent_width // PATCH),
        latent_frames_per_chunk=config.latent_frames_per_chunk,
        sink_latent_frames=0,
        window_latent_frames=config.window_latent_frames,
        element_bytes=plan.linear.itemsize,
        at_window=AtWindow.RESTART,
        branches=BRANCHES,
        register_tokens=config.register_tokens,
        cross_stores=(text, image),
        requested_sessions=requested_sessions,
        rewritable_history=True,
        draft_latent_frames=config.latent_frames_per_chunk,
        shared_layers=SHARED_LAYERS,
    )


class DreamZeroTransformer(WanTransformer):
    """The network. Parameters have the checkpoint's names and are left uninitialised.

    Call `apply_precision` once after the weights are loaded.
    """

    config: TransformerConfig
    layers: tuple[Layer, ...]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.patch_embedding = nn.Conv3d(config.in_channels, width, (1, PATCH, PATCH), (1, PATCH, PATCH))
        self.text_embedding = text_projection(config.text_dim, width)
        self.time_embedding, self.time_projection = time_networks(config.freq_dim, width)
        self.img_emb = ImageProjection(config.image_dim, width)
        self.layers = tuple(Layer(config) for _ in range(config.num_layers))
        self.blocks = nn.ModuleList(self.layers)
        self.head = Head(width=width, out_channels=config.out_channels, eps=config.eps)
        self.state_encoder = CategoryPerceptron(config.state_dim, config.adapter_dim, width)
        self.action_encoder = ActionEncoder(config.action_dim, width)
        self.action_decoder = CategoryPerceptron(width, config.adapter_dim, config.action_dim)
        self._rotations: dict[tuple[int, int, int, int, bool], Tensor] = {}

    # ------------------------------------------------------------ constants of the model

    def step_time(self, video: TimeConstants, action: TimeConstants) -> StepTime:
        """Join the constants of a step; `video` and `action` may be the same object."""
        timestep = torch.tensor([action.timestep], device=self.device)
        return StepTime(
            video=video,
            action=action,
            action_encoding_D=action_time_encoding(timestep, self.config.width)[0],
        )

    # ------------------------------------------------------------ once per prompt, once per run

    def publish_text(self, rows_LC: Tensor, kv: BranchedLayerKV, *, branch: int) -> None:
        """Fill a branch's text store of every layer from the encoder's real rows.

        Attention sees `text_rows` rows without a mask; those past the prompt are zero before they are embedded.
        """
        num_padding = self.config.text_rows - rows_LC.shape[0]
        if num_padding < 0:
            raise ValueError(f"text has {rows_LC.shape[0]} rows, at most {self.config.text_rows} are attended to")
        padded_LC = torch.cat([rows_LC, rows_LC.new_zeros(num_padding, rows_LC.shape[1])])
        text_LD = self.text_embedding(padded_LC.to(self.plan.linear))
        kv.cross_store(TEXT_STORE, branch=branch).publish(
            [layer.cross_attn.key_value(text_LD) for layer in self.layers]
        )

    def publish_image(self, tokens_TI: Tensor, kv: BranchedLayerKV) -> None:
        """Fill the image store of every layer, which all branches share."""
        image_TD = self.img_emb(tokens_TI.to(self.plan.linear))
        kv.cross_store(IMAGE_STORE).publish([layer.cross_attn.image_key_value(image_TD) for layer in self.layers])

    # ------------------------------------------------------------ once per call

    def frame_inputs(
        self,
        condition_CFYX: Tensor | None,
        *,
        first_latent_frame: int,
        shape_FYX: tuple[int, int, int],
        state_A: Tensor | None = None,
    ) -> FrameInputs:
        """Prepare what the forwards over the same latent frames share.

        `state_A` is the normalised state, given for a draft: its action and state tokens follow the video.
        """
        num_latent_frames, latent_height, latent_width = shape_FYX
        is_draft = state_A is not None
        key = (first_latent_frame, num_latent_frames, latent_height, latent_width, is_draft)
        if key not in self._rotations:
            self._rotations[key] = self._make_rotations(*key).to(self.device, self.plan.rope)
        return FrameInputs(
            condition=None if condition_CFYX is None else patchify(condition_CFYX.to(self.plan.linear)),
            rotations=self._rotations[key],
            state_1D=None if state_A is None else self.state_encoder(state_A.to(self.plan.linear)[None]),
            num_latent_frames=num_latent_frames,
            latent_height=latent_height,
            latent_width=latent_width,
        )

    def _make_rotations(
        self, first_latent_frame: int, num_latent_frames: int, latent_height: int, latent_width: int, is_draft: bool
    ) -> Tensor:
        """Return rotations, complex128 [T, 1, P]: video by frame, row and column, registers along one axis.

        Action j of the draft that starts at frame s stands at N * k + j, the state at k = (s - 1) // F. Nothing keeps
        those apart from each other or from the frames.
        """
        video_V1P = self.rope_table(latent_height, latent_width).rotations(first_latent_frame, num_latent_frames)
        if not is_draft:
            return video_V1P
        index = (first_latent_frame - 1) // self.config.latent_frames_per_chunk
        actions = self.config.actions_per_chunk
        positions = torch.cat([torch.arange(actions * index, actions * (index + 1)), torch.tensor([index])])
        angles = axis_angles(positions, self.config.head_dim // 2)
        return torch.cat([video_V1P, torch.polar(torch.ones_like(angles), angles)[:, None, :]])

    # ------------------------------------------------------------ the forwards

    def commit(self, x_CFYX: Tensor, time: TimeConstants, inputs: FrameInputs, chunk: BranchedLayerKV) -> None:
        """Store K and V of observed frames in every layer and branch."""
        h_1VD = self.embed_video(x_CFYX, inputs)[None]
        segments = (Segment(rows=slice(0, h_1VD.shape[1]), time=time),)
        last = len(self.layers) - 1
        for index in range(last):
            h_1VD = self._run_layer(index, h_1VD, inputs, segments, chunk)
        a_BVD = self.layers[last].self_attention_input(h_1VD, last, segments)
        chunk.write_all(last, *self._key_value(last, a_BVD, inputs))

    def velocity(
        self, x_CFYX: Tensor, action_NA: Tensor, step: StepTime, inputs: FrameInputs, draft: DraftKV
    ) -> Velocity:
        """Predict the flow of noisy latents and actions. K and V go to `draft`, over those of the step before."""
        h_BTD = self.embed_draft(x_CFYX, action_NA, step, inputs)[None]
        segments = _draft_segments(step, inputs.num_video_tokens, h_BTD.shape[1])
        for index in range(len(self.layers)):
            h_BTD = self._run_layer(index, h_BTD, inputs, segments, draft, registers=draft)
        return self.read_out(h_BTD, step.video, action_NA.shape[0], inputs)

    def read_out(self, h_BTD: Tensor, time: TimeConstants, num_actions: int, inputs: FrameInputs) -> Velocity:
        """Turn the residual stream behind the last layer into flows; `time` is that of the video."""
        first_action = inputs.num_video_tokens
        actions_ND = h_BTD[POSITIVE, first_action : first_action + num_actions]
        return Velocity(
            video_BCFYX=self._video_flow(h_BTD[:, :first_action], time, inputs),
            action_NA=self.action_decoder(actions_ND.to(self.plan.linear)).float(),
        )

    def embed_draft(self, x_CFYX: Tensor, action_NA: Tensor, step: StepTime, inputs: FrameInputs) -> Tensor:
        """Return the tokens of a draft [T, D]: video, actions, state."""
        assert inputs.state_1D is not None, "a draft needs the robot's state"
        actions_ND = self.action_encoder(action_NA.to(self.plan.linear), step.action_encoding_D)
        tokens = [self.embed_video(x_CFYX, inputs), actions_ND, inputs.state_1D]
        return torch.cat([token.to(self.plan.residual) for token in tokens])

    def embed_video(self, x_CFYX: Tensor, inputs: FrameInputs) -> Tensor:
        """Return video tokens [V, D]."""
        features = patchify(x_CFYX.to(self.plan.linear))
        if inputs.condition is not None:
            features = torch.cat([features, inputs.condition], dim=-1)
        return self.project_patches(features)

    def _run_layer(
        self,
        index: int,
        h_BTD: Tensor,
        inputs: FrameInputs,
        segments: Sequence[Segment],
        kv: BranchedLayerKV,
        registers: DraftKV | None = None,
    ) -> Tensor:
        """Run one layer. B is 1 on entry to layer 0 and the number of branches afterwards."""
        layer, num_video = self.layers[index], inputs.num_video_tokens
        a_BTD = layer.self_attention_input(h_BTD, index, segments)
        k_BTHK, v_BTHK = self._key_value(index, a_BTD, inputs)
        kv.write_all(index, k_BTHK[:, :num_video], v_BTHK[:, :num_video])
        if registers is not None:
            registers.write_registers_all(index, k_BTHK[:, num_video:], v_BTHK[:, num_video:])
        q_BTHK = rotate(layer.self_attn.query(a_BTD), inputs.rotations)
        h_BTD = layer.after_self_attention(h_BTD, kv.attend_all(index, q_BTHK), index, segments)
        return layer.after_cross_attention(h_BTD, self._cross_attend(index, h_BTD, kv), index, segments)

    def _key_value(self, index: int, a_BTD: Tensor, inputs: FrameInputs) -> tuple[Tensor, Tensor]:
        k_BTHK, v_BTHK = self.layers[index].self_attn.key_value(a_BTD)
        return rotate(k_BTHK, inputs.rotations), v_BTHK

    def _cross_attend(self, index: int, h_BTD: Tensor, kv: BranchedLayerKV) -> Tensor:
        """Return attention to text plus attention to the image, of all branches also where the queries are equal."""
        q_BTHK = self.layers[index].cross_query(h_BTD)
        queries = q_BTHK.expand(NUM_BRANCHES, -1, -1, -1)
        text_BTHK = torch.stack(
            [
                kv.cross_store(TEXT_STORE, branch=branch).attend(index, q_THK)
                for branch, q_THK in enumerate(queries.unbind(0))
            ]
        )
        image = kv.cross_store(IMAGE_STORE).attend(index, q_BTHK.flatten(0, 1))
        return text_BTHK.add_(image.view_as(q_BTHK))

    def _video_flow(self, h_BVD: Tensor, time: TimeConstants, inputs: FrameInputs) -> Tensor:
        patches_BVO = self.head(h_BVD, time)
        return torch.stack(
            [
                unpatchify(
                    patches_VO,
                    num_frames=inputs.num_latent_frames,
                    latent_height=inputs.latent_height,
                    latent_width=inputs.latent_width,
                )
                for patches_VO in patches_BVO.unbind(0)
            ]
        )


def _draft_segments(step: StepTime, num_video_tokens: int, num_tokens: int) -> tuple[Segment, ...]:
    """Cut a draft's tokens by timestep: one segment, or two if the noise of video and actions is decoupled."""
    if step.video is step.action:
        return (Segment(rows=slice(0, num_tokens), time=step.video),)
    video = Segment(rows=slice(0, num_video_tokens), time=step.video)
    return (video, Segment(rows=slice(num_video_tokens, num_tokens), time=step.action))
