"""The LingBot-World v2 causal transformer: checkpoint names, one chunk at a time, K/V kept by `kvcache`.

The forward is split by how often a part changes. Constant for a model: `time_constants`. Once per prompt:
`publish_text`. Once per chunk: `chunk_inputs` (camera scale and shift of all layers, condition, rotations). Per step:
`flow`. At the end of a chunk: `store_clean`, which stops after K and V of the last layer.

Shapes: T tokens of a chunk in (frame, row, column) order, D model width, H heads, K head size, L text rows, C channels,
F latent frames of the chunk, Y and X latent rows and columns.
Source of the formulas: LingBot-World v2 official code, wan/modules/model_fast.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from kvcache.spec import CrossStoreSpec, KVSpec
from kvcache.transaction import ChunkTransaction, LayerKV
from worldmodel.kernels.layer_ops import to_fp8
from worldmodel.lingbot.layer_parts import PartWeights
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.layers import (
    PATCH,
    AttentionProjections,
    layer_norm,
    patchify,
    to_device,
    unpatchify,
)
from worldmodel.wan.precision import PrecisionPlan
from worldmodel.wan.rope import rotate
from worldmodel.wan.transformer import (
    Head,
    LayerModulation,
    TimeConstants,
    WanLayer,
    WanTransformer,
    text_projection,
    time_networks,
)

TEXT_STORE = "text"
"""Name of the cross-attention store that holds the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CameraModulation:
    """Scale and shift of the residual stream of one layer, both [T, D]: h becomes h + scale * h + shift.

    The scale is kept without its 1: in bfloat16 the sum would lose what a small scale says. The
    official code loses it, so the plan `official` forms the sum in the format of the linears where it is used.
    """

    scale: torch.Tensor
    shift: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInputs:
    """What stays the same in the five forwards of a chunk.

    `camera` is that of all layers, or empty where every forward computes each layer's from the tokens `camera_TD`.
    """

    condition_features: torch.Tensor
    camera_TD: torch.Tensor
    camera: tuple[CameraModulation, ...]
    rotations: torch.Tensor
    num_latent_frames: int
    latent_height: int
    latent_width: int


def kv_geometry(
    config: TransformerConfig,
    plan: PrecisionPlan,
    *,
    latent_height: int,
    latent_width: int,
    requested_sessions: int = 1,
    model_owned_bytes: int = 0,
    worker_owned_bytes: int = 0,
) -> KVSpec:
    """Return what the K/V cache must hold for this transformer at one latent size."""
    return KVSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        tokens_per_latent_frame=(latent_height // PATCH) * (latent_width // PATCH),
        latent_frames_per_chunk=config.latent_frames_per_chunk,
        sink_latent_frames=config.sink_latent_frames,
        window_latent_frames=config.window_latent_frames,
        element_bytes=plan.kv.itemsize,
        cross_stores=(CrossStoreSpec(name=TEXT_STORE, num_tokens=config.text_rows, num_heads=config.num_heads),),
        requested_sessions=requested_sessions,
        model_owned_bytes=model_owned_bytes,
        worker_owned_bytes=worker_owned_bytes,
    )


class Layer(WanLayer):
    """One transformer layer with camera injection between self-attention and cross-attention."""

    def __init__(self, config: TransformerConfig, *, is_first: bool) -> None:
        width = config.width
        super().__init__(
            AttentionProjections(width, config.num_heads, config.eps),
            width=width,
            num_heads=config.num_heads,
            ffn_dim=config.ffn_dim,
            eps=config.eps,
        )
        self.cam_injector_layer1 = nn.Linear(width, width)
        self.cam_injector_layer2 = nn.Linear(width, width)
        self.cam_scale_layer = nn.Linear(width, width)
        self.cam_shift_layer = nn.Linear(width, width)
        self._is_first = is_first

    def camera_modulation(self, camera_TD: torch.Tensor, into: CameraModulation | None = None) -> CameraModulation:
        """Turn the shared camera tokens into this layer's scale and shift, written to `into` if that is given."""
        hidden = nn.functional.silu(self.cam_injector_layer1(camera_TD))
        injected = camera_TD + self.cam_injector_layer2(hidden)
        if into is None:
            return CameraModulation(scale=self.cam_scale_layer(injected), shift=self.cam_shift_layer(injected))
        for linear, place_TD in ((self.cam_scale_layer, into.scale), (self.cam_shift_layer, into.shift)):
            torch.addmm(linear.bias, injected, linear.weight.t(), out=place_TD)
        return into

    def self_attention_input(self, h_TD: torch.Tensor, m: LayerModulation) -> torch.Tensor:
        """Return the modulated norm that feeds q, k and v."""
        if self.plan.rounds_as_official and self._is_first:
            # The residual stream of the official code is still bfloat16 here, and its norms return what they take.
            norm_TD = nn.functional.layer_norm(h_TD, h_TD.shape[-1:], eps=self.eps).to(self.plan.linear)
            return torch.addcmul(m.attention_shift, norm_TD.float(), m.attention_scale).to(self.plan.linear)
        return layer_norm(h_TD, m.attention_scale, m.attention_shift, self.eps, self.plan.linear)

    def query(self, a_TD: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Return normalised, rotated queries [T, H, K]."""
        return rotate(self.self_attn.query(a_TD), rotations)

    def key_value(self, a_TD: torch.Tensor, rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised, rotated keys and plain values, both [T, H, K]."""
        key_THK, value_THK = self.self_attn.key_value(a_TD)
        return rotate(key_THK, rotations), value_THK

    def after_self_attention(
        self, h_TD: torch.Tensor, attended_THK: torch.Tensor, m: LayerModulation, camera: CameraModulation
    ) -> torch.Tensor:
        """Add the gated attention, then let the camera act on the whole residual stream."""
        h_TD = torch.addcmul(h_TD, self.self_attn.output(attended_THK).to(h_TD.dtype), m.attention_gate)
        if self.plan.rounds_as_official:
            return torch.addcmul(camera.shift.to(h_TD.dtype), (1.0 + camera.scale).to(h_TD.dtype), h_TD)
        return torch.addcmul(h_TD + camera.shift, camera.scale.to(h_TD.dtype), h_TD)

    def cross_query(self, h_TD: torch.Tensor) -> torch.Tensor:
        """Return the cross-attention queries [T, H, K]."""
        a_TD = layer_norm(h_TD, self.norm3.weight, self.norm3.bias, self.eps, self.plan.linear)
        return self.cross_attn.query(a_TD)

    def after_cross_attention(self, h_TD: torch.Tensor, attended_THK: torch.Tensor, m: LayerModulation) -> torch.Tensor:
        """Add the text attention, ungated, and the gated feed-forward."""
        h_TD = h_TD + self.cross_attn.output(attended_THK)
        a_TD = layer_norm(h_TD, m.feed_forward_scale, m.feed_forward_shift, self.eps, self.plan.linear)
        return torch.addcmul(h_TD, self.ffn(a_TD).to(h_TD.dtype), m.feed_forward_gate)


class LingBotTransformer(WanTransformer):
    """The network of LingBot-World v2. Parameters have the checkpoint's names and are left uninitialised.

    Call `apply_precision` once after the weights are loaded. `weights` brings those of each layer to the device; all
    loops over layers ask it.
    """

    config: TransformerConfig
    layers: tuple[Layer, ...]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.patch_embedding = nn.Conv3d(config.in_channels, width, (1, PATCH, PATCH), (1, PATCH, PATCH))
        self.patch_embedding_wancamctrl = nn.Linear(config.camera_channels * PATCH * PATCH, width)
        self.c2ws_hidden_states_layer1 = nn.Linear(width, width)
        self.c2ws_hidden_states_layer2 = nn.Linear(width, width)
        self.text_embedding = text_projection(config.text_dim, width)
        self.time_embedding, self.time_projection = time_networks(config.freq_dim, width)
        self.layers = tuple(Layer(config, is_first=index == 0) for index in range(config.num_layers))
        self.blocks = nn.ModuleList(self.layers)
        self.head = Head(width=width, out_channels=config.out_channels, eps=config.eps)
        self.weights = PartWeights()
        self.keeps_camera = True

    # ------------------------------------------------------------ once per prompt

    def publish_text(self, rows_LC: torch.Tensor, chunk: ChunkTransaction, *, merge_padding: bool = True) -> None:
        """Fill the text store of every layer from the encoder's real rows [L, text_dim].

        The network attends to `text_rows` rows without a mask; all padding rows are equal, so that by default one row
        stands for them with log(their number) added to its logit. The result is the same up to rounding.
        """
        num_rows, num_padding = rows_LC.shape[0], self.config.text_rows - rows_LC.shape[0]
        text_LD = self.embed_text(self.pad_text(rows_LC, merge_padding=merge_padding))
        logit_bias_L = None
        if merge_padding and num_padding > 1:
            logit_bias_L = torch.zeros(num_rows + 1, dtype=torch.float32, device=self.device)
            logit_bias_L[-1] = math.log(num_padding)
        key_values = []
        for index, layer in enumerate(self.layers):
            with self.weights.text.layer(index):
                key_values.append(layer.cross_attn.key_value(text_LD))
        if self.plan.quantizes_kv:
            key_values = [(to_fp8(key), to_fp8(value)) for key, value in key_values]
        chunk.cross_store(TEXT_STORE).publish(key_values, logit_bias_L=logit_bias_L)

    def pad_text(self, rows_LC: torch.Tensor, *, merge_padding: bool) -> torch.Tensor:
        """Append the padding rows, which are zero, or one for all of them. Raises ValueError for too many rows."""
        num_rows, num_padding = rows_LC.shape[0], self.config.text_rows - rows_LC.shape[0]
        if num_padding < 0:
            raise ValueError(f"text has {num_rows} rows, at most {self.config.text_rows} are attended to")
        num_zero_rows = min(num_padding, 1) if merge_padding else num_padding
        return torch.cat([rows_LC, rows_LC.new_zeros(num_zero_rows, rows_LC.shape[1])])

    def embed_text(self, rows_LC: torch.Tensor) -> torch.Tensor:
        """Project text rows to the model width, padding rows included."""
        return self.text_embedding(rows_LC.to(self.plan.linear))

    # ------------------------------------------------------------ once per chunk

    def project_rays(self, packed_CFYX: torch.Tensor) -> torch.Tensor:
        """Project packed rays [384, F, Y, X] to [T, D], the plain way."""
        return self.patch_embedding_wancamctrl(patchify(packed_CFYX.to(self.plan.linear)))

    def camera_tokens(self, projected_TD: torch.Tensor) -> torch.Tensor:
        """Finish the camera embedding, shared by all layers, from projected rays."""
        hidden = nn.functional.silu(self.c2ws_hidden_states_layer1(projected_TD))
        return projected_TD + self.c2ws_hidden_states_layer2(hidden)

    def chunk_inputs(
        self,
        condition_CFYX: torch.Tensor,
        projected_rays_TD: torch.Tensor,
        first_latent_frame: int,
        *,
        into: ChunkInputs | None = None,
    ) -> ChunkInputs:
        """Prepare what the five forwards of a chunk share.

        `condition_CFYX` has the 4 mask channels and the image latent, `projected_rays_TD` comes from `project_rays` or
        from the equal camera basis. `into`, made as `empty_inputs` says, is written and returned if it is given.
        """
        _, num_latent_frames, latent_height, latent_width = condition_CFYX.shape
        camera_TD = self.camera_tokens(projected_rays_TD.to(self.plan.linear))
        # Enqueued before the rotations are computed, so that a device works while the host does.
        kept = range(len(self.layers)) if self.keeps_camera else range(0)
        places = [None for _ in kept] if into is None else into.camera
        camera = tuple(self.camera_modulation(index, camera_TD, places[index]) for index in kept)
        table = self.rope_table(latent_height, latent_width)
        rotations = table.rotations(first_latent_frame, num_latent_frames).to(self.plan.rope)
        inputs = ChunkInputs(
            condition_features=patchify(condition_CFYX.to(self.plan.linear)),
            camera_TD=camera_TD,
            camera=camera,
            rotations=to_device(rotations, self.device),
            num_latent_frames=num_latent_frames,
            latent_height=latent_height,
            latent_width=latent_width,
        )
        return inputs if into is None else _copy_all_but_camera(inputs, into)

    def empty_inputs(self, latent_height: int, latent_width: int) -> ChunkInputs:
        """Return what `chunk_inputs` gives for a whole chunk without its memory, on the meta device."""
        config, plan = self.config, self.plan
        num_latent_frames = config.latent_frames_per_chunk
        num_tokens = num_latent_frames * (latent_height // PATCH) * (latent_width // PATCH)

        def empty(*shape: int, dtype: torch.dtype = plan.linear) -> torch.Tensor:
            return torch.empty(num_tokens, *shape, dtype=dtype, device="meta")

        return ChunkInputs(
            condition_features=empty((config.in_channels - config.out_channels) * PATCH * PATCH),
            camera_TD=empty(config.width),
            camera=tuple(
                CameraModulation(scale=empty(config.width), shift=empty(config.width))
                for _ in range(config.num_layers if self.keeps_camera else 0)
            ),
            rotations=empty(1, config.head_dim // 2, dtype=plan.rope),
            num_latent_frames=num_latent_frames,
            latent_height=latent_height,
            latent_width=latent_width,
        )

    def camera_modulation(
        self, index: int, camera_TD: torch.Tensor, into: CameraModulation | None = None
    ) -> CameraModulation:
        """Turn the shared camera tokens into one layer's scale and shift, written to `into` if that is given."""
        with self.weights.camera.layer(index):
            return self.layers[index].camera_modulation(camera_TD, into)

    def camera_at(self, index: int, inputs: ChunkInputs) -> CameraModulation:
        """Return one layer's scale and shift, kept or computed here."""
        return inputs.camera[index] if inputs.camera else self.camera_modulation(index, inputs.camera_TD)

    # ------------------------------------------------------------ the forwards

    def flow(
        self, x_CFYX: torch.Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: ChunkTransaction
    ) -> torch.Tensor:
        """Predict the flow of noisy latents, float32 [C, F, Y, X]. Writes the chunk's K and V into `chunk`."""
        h_TD = self.embed_latents(x_CFYX, inputs)
        for index in range(len(self.layers)):
            with self.weights.forward.layer(index):
                h_TD = self.run_layer(index, h_TD, time, inputs, chunk)
        return unpatchify(
            self.head(h_TD, time),
            num_frames=inputs.num_latent_frames,
            latent_height=inputs.latent_height,
            latent_width=inputs.latent_width,
        )

    def store_clean(self, x0_CFYX: torch.Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: LayerKV) -> None:
        """Write K and V of the clean latents of a chunk, `time` being that of the commit timestep.

        Stops after K and V of the last layer: nothing behind them is used.
        """
        h_TD = self.embed_latents(x0_CFYX, inputs)
        last = len(self.layers) - 1
        for index in range(last):
            with self.weights.forward.layer(index):
                h_TD = self.run_layer(index, h_TD, time, inputs, chunk)
        with self.weights.forward.layer(last):
            a_TD = self.layers[last].self_attention_input(h_TD, time.layers[last])
            chunk.write(last, *self.layers[last].key_value(a_TD, inputs.rotations))

    def embed_latents(self, x_CFYX: torch.Tensor, inputs: ChunkInputs) -> torch.Tensor:
        """Return the residual stream [T, D] before the first layer: patches of latents and condition, projected."""
        latent_features = patchify(x_CFYX.to(self.plan.linear))
        features = torch.cat([latent_features, inputs.condition_features], dim=-1)
        return self.project_patches(features)

    def run_layer(
        self, index: int, h_TD: torch.Tensor, time: TimeConstants, inputs: ChunkInputs, chunk: LayerKV
    ) -> torch.Tensor:
        """Run one layer on the residual stream; its K and V of this chunk go to `chunk`."""
        layer, modulation = self.layers[index], time.layers[index]
        a_TD = layer.self_attention_input(h_TD, modulation)
        chunk.write(index, *layer.key_value(a_TD, inputs.rotations))
        attended_THK = chunk.attend(index, layer.query(a_TD, inputs.rotations))
        h_TD = layer.after_self_attention(h_TD, attended_THK, modulation, self.camera_at(index, inputs))
        text_THK = chunk.cross_store(TEXT_STORE).attend(index, layer.cross_query(h_TD))
        return layer.after_cross_attention(h_TD, text_THK, modulation)


def _copy_all_but_camera(inputs: ChunkInputs, into: ChunkInputs) -> ChunkInputs:
    """Copy what is small; scales and shifts are there already. Raises ValueError for a chunk of another size."""
    for name in ("condition_features", "camera_TD", "rotations"):
        given, place = getattr(inputs, name), getattr(into, name)
        if given.shape != place.shape:
            raise ValueError(f"{name}: expected {tuple(place.shape)}, got {tuple(given.shape)}")
        place.copy_(given)
    return into
