"""The transformer in its training layouts: whole clips with teacher forcing, and many closed loops at once.

The parameters are those of the served `LingBotTransformer`; what is here is the same arithmetic for batches and with
gradients. That both agree is tested against a served rollout.

A segment is the tokens of one chunk at one noise level. A clip of n chunks is trained in one pass over 2n - 1 segments:
the clean chunks, which give history, then the noisy ones, which are predicted. Each sees what the K/V window of a
session would hold at that chunk: sink, window, itself.

Shape suffixes: B clips, N chunks of a clip, G segments, S tokens of a chunk, P tokens of a latent frame, D width,
H heads, K head size, R rotated pairs, L text rows, Q prompts, C channels, F latent frames, Y X latent rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from worldmodel.lingbot.camera import pixel_directions
from worldmodel.lingbot.transformer import Layer, LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.layers import PATCH
from worldmodel.wan.rope import axis_angles, split_head

MAX_PROMPT_ROWS = 64
TEXT_ROWS = MAX_PROMPT_ROWS + 8
"""Rows of a prompt, one row that stands for all padding, and seven masked ones for alignment."""

KeyValue = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of the segments [G, S, H, K] over whatever history the caller keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Latent size of the demo world and its intrinsics in pixels (fx, fy, cx, cy)."""

    latent_height: int
    latent_width: int
    intrinsics: tuple[float, float, float, float]

    @property
    def tokens_per_frame(self) -> int:
        return (self.latent_height // PATCH) * (self.latent_width // PATCH)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentInputs:
    """What every layer needs beside the residual stream.

    `time_G6D` and `embedding_GD` come from the timestep, `camera_GSD` are the camera tokens, `text_GLD` the embedded
    prompt rows and `text_bias_G11L` their logits' bias: 0, the logarithm of the number of padding rows, or -inf.
    """

    embedding_GD: Tensor
    time_G6D: Tensor
    camera_GSD: Tensor
    rotations_GS1R2: Tensor
    text_GLD: Tensor
    text_bias_G11L: Tensor


def history_of(chunk: int, config: TransformerConfig) -> tuple[int, ...]:
    """Return the earlier chunks that a session attends to at a chunk: those of the sink, then those of the window."""
    if config.window_latent_frames is None:
        return tuple(range(chunk))
    per_chunk = config.latent_frames_per_chunk
    sink = config.sink_latent_frames // per_chunk
    window = config.window_latent_frames // per_chunk - 1
    return tuple(earlier for earlier in range(chunk) if earlier < sink or earlier >= chunk - window)


class TrainingNetwork:
    """Functions of one transformer's parameters for one latent size."""

    def __init__(self, model: LingBotTransformer, geometry: Geometry) -> None:
        self.model = model
        self.config = model.config
        self.geometry = geometry
        self.device = model.device
        intrinsics = torch.tensor([geometry.intrinsics], dtype=torch.float64)
        height, width = 8 * geometry.latent_height, 8 * geometry.latent_width
        rays_13HW = pixel_directions(intrinsics, height, width)
        folded = functional.pixel_unshuffle(functional.pixel_unshuffle(rays_13HW, 8), PATCH)[0]
        self._directions_P3F = folded.permute(1, 2, 0).reshape(-1, 3, 256).float().to(self.device)
        self._layer_forward: Callable[..., Tensor] = layer_forward

    def compile(self) -> None:
        """Let torch compile the layer; results change by rounding."""
        self._layer_forward = torch.compile(layer_forward)

    # ------------------------------------------------------------ inputs

    def segment_inputs(
        self,
        *,
        timesteps_G: Tensor,
        rotations_G: Tensor,
        translations_G: Tensor,
        positions_G: Tensor,
        text_GLD: Tensor,
        text_bias_G11L: Tensor,
    ) -> SegmentInputs:
        """Prepare segments of F latent frames each.

        Args:
            timesteps_G: 0 to 1000.
            rotations_G: [G, F, 3, 3], relative to the frame before.
            translations_G: [G, F, 3], scaled as the network expects them.
            positions_G: [G, F], absolute latent frames.
            text_GLD, text_bias_G11L: what `text_rows` gives, one prompt for each segment.
        """
        embedding_GD, time_G6D = self._time(timesteps_G)
        return SegmentInputs(
            embedding_GD=embedding_GD,
            time_G6D=time_G6D,
            camera_GSD=self._camera(rotations_G, translations_G).flatten(1, 2),
            rotations_GS1R2=self._rope(positions_G),
            text_GLD=text_GLD,
            text_bias_G11L=text_bias_G11L,
        )

    def text_rows(self, rows_QLC: Tensor, mask_QL: Tensor) -> tuple[Tensor, Tensor]:
        """Embed prompts of at most `MAX_PROMPT_ROWS` rows: [Q, TEXT_ROWS, D] and the logits' bias [Q, 1, 1, TEXT_ROWS].

        `rows_QLC` must be 0 where `mask_QL` is False.
        """
        padded = functional.pad(rows_QLC, (0, 0, 0, TEXT_ROWS - rows_QLC.shape[1]))
        bias_QL = torch.full((len(rows_QLC), TEXT_ROWS), -math.inf, device=rows_QLC.device)
        bias_QL[:, : mask_QL.shape[1]].masked_fill_(mask_QL, 0.0)
        num_padding = self.config.text_rows - mask_QL.sum(1)
        bias_QL[:, MAX_PROMPT_ROWS] = num_padding.float().log()
        return self.model.text_embedding(padded), bias_QL[:, None, None]

    def _time(self, timesteps_G: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config.freq_dim // 2
        exponents = -torch.arange(half, dtype=torch.float64, device=self.device) / half
        angles = timesteps_G.double()[:, None] * torch.pow(10000.0, exponents)
        features = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
        with torch.autocast(self.device.type, enabled=False):
            embedding_GD = self.model.time_embedding(features)
            return embedding_GD, self.model.time_projection(embedding_GD).unflatten(-1, (6, -1))

    def _camera(self, rotations: Tensor, translations: Tensor) -> Tensor:
        """Return camera tokens [..., P, D], through the basis that the rays are linear in."""
        linear = self.model.patch_embedding_wancamctrl
        weight_D6F = linear.weight.unflatten(1, (6, 256))
        basis_PijD = torch.einsum("pjf,dif->pijd", self._directions_P3F, weight_D6F[:, 3:])
        moved = translations @ weight_D6F[:, :3].sum(-1).t() + linear.bias
        turned = torch.einsum("...ij,pijd->...pd", rotations, basis_PijD)
        return self.model.camera_tokens(turned + moved[..., None, :])

    def _rope(self, positions_G: Tensor) -> Tensor:
        split = split_head(self.config.head_dim)
        rows, columns = self.geometry.latent_height // PATCH, self.geometry.latent_width // PATCH
        num_segments, num_frames = positions_G.shape
        time = axis_angles(positions_G.flatten().cpu(), split.time_pairs).to(self.device)
        row = axis_angles(torch.arange(rows), split.row_pairs).to(self.device)
        column = axis_angles(torch.arange(columns), split.column_pairs).to(self.device)
        shape = (num_segments, num_frames, rows, columns)
        parts = (
            time.view(num_segments, num_frames, 1, 1, -1).expand(*shape, -1),
            row.view(1, 1, rows, 1, -1).expand(*shape, -1),
            column.view(1, 1, 1, columns, -1).expand(*shape, -1),
        )
        angles = torch.cat(parts, dim=-1).flatten(1, 3)
        return torch.stack([angles.cos(), angles.sin()], dim=-1).float()[:, :, None]

    # ------------------------------------------------------------ tokens

    def tokens(self, x_GCFYX: Tensor) -> Tensor:
        """Project latents with their condition, 36 channels, to the residual stream float32 [G, S, D]."""
        segments, channels, frames, height, width = x_GCFYX.shape
        split = x_GCFYX.reshape(segments, channels, frames, height // PATCH, PATCH, width // PATCH, PATCH)
        features = split.permute(0, 2, 3, 5, 1, 4, 6).reshape(segments, -1, channels * PATCH * PATCH)
        embedding = self.model.patch_embedding
        return functional.linear(features, embedding.weight.flatten(1), embedding.bias).float()

    def flow_of(self, h_GSD: Tensor, inputs: SegmentInputs) -> Tensor:
        """Project the residual stream to the predicted flow, float32 [G, C, F, Y, X]."""
        head = self.model.head
        shift_GD, scale_GD = (head.modulation[0] + inputs.embedding_GD[:, None]).unbind(1)
        normed = functional.layer_norm(h_GSD, h_GSD.shape[-1:], eps=head.eps)
        patches = head.head(normed * (1 + scale_GD[:, None]) + shift_GD[:, None]).float()
        rows, columns = self.geometry.latent_height // PATCH, self.geometry.latent_width // PATCH
        split = patches.unflatten(-1, (PATCH, PATCH, -1)).unflatten(1, (-1, rows, columns))
        return split.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)

    def run_layers(self, h_GSD: Tensor, inputs: SegmentInputs, attend_of: Callable[[int], Attend]) -> Tensor:
        """Run all layers; `attend_of(index)` gives the attention of a layer."""
        for index, layer in enumerate(self.model.layers):
            h_GSD = self._layer_forward(layer, h_GSD, inputs, attend_of(index))
        return h_GSD

    # ------------------------------------------------------------ a clip with teacher forcing

    def clip_flow(self, clean_BCFYX: Tensor, noisy_BCFYX: Tensor, inputs: SegmentInputs) -> Tensor:
        """Predict the flow [B, 16, F, Y, X] of all noisy chunks of clips.

        Args:
            clean_BCFYX: History with its condition, 36 channels, all chunks but the last.
            noisy_BCFYX: Noisy latents with the condition, 36 channels, all chunks.
            inputs: Of 2N - 1 segments for each clip, clean ones first, clip by clip.
        """
        frames = self.config.latent_frames_per_chunk
        num_chunks = noisy_BCFYX.shape[2] // frames
        segments = torch.cat([clean_BCFYX, noisy_BCFYX], dim=2).unflatten(2, (-1, frames)).transpose(1, 2)
        h_GSD = self.tokens(segments.flatten(0, 1))
        attend = _clip_attention(num_chunks, self.config)
        h_GSD = self.run_layers(h_GSD, inputs, lambda _: attend)
        flow_GCFYX = self.flow_of(h_GSD, inputs)
        flow_BNCFYX = flow_GCFYX.unflatten(0, (-1, 2 * num_chunks - 1))[:, num_chunks - 1 :]
        return flow_BNCFYX.transpose(1, 2).flatten(2, 3)


def layer_forward(layer: Layer, h_GSD: Tensor, inputs: SegmentInputs, attend: Attend) -> Tensor:
    """Run one layer on segments; the residual stream is float32."""
    m = (layer.modulation[0] + inputs.time_G6D)[:, :, None].unbind(1)
    attention = layer.self_attn
    a_GSD = functional.layer_norm(h_GSD, h_GSD.shape[-1:], eps=layer.eps) * (1 + m[1]) + m[0]
    q_GSHK = _rotate(attention.query(a_GSD), inputs.rotations_GS1R2)
    k_GSHK, v_GSHK = attention.key_value(a_GSD)
    attended = attend(q_GSHK, _rotate(k_GSHK, inputs.rotations_GS1R2), v_GSHK)
    h_GSD = h_GSD + attention.output(attended).float() * m[2]
    camera = layer.camera_modulation(inputs.camera_GSD)
    h_GSD = (1 + camera.scale.float()) * h_GSD + camera.shift.float()
    cross = layer.cross_attn
    k_GLHK, v_GLHK = cross.key_value(inputs.text_GLD)
    text_GSHK = attention_of(cross.query(layer.norm3(h_GSD)), k_GLHK, v_GLHK, inputs.text_bias_G11L)
    h_GSD = h_GSD + cross.output(text_GSHK).float()
    a_GSD = functional.layer_norm(h_GSD, h_GSD.shape[-1:], eps=layer.eps) * (1 + m[4]) + m[3]
    return h_GSD + layer.ffn(a_GSD).float() * m[5]


def attention_of(q_GSHK: Tensor, k_GLHK: Tensor, v_GLHK: Tensor, bias_G11L: Tensor | None = None) -> Tensor:
    """Return softmax attention of each segment over its own rows."""
    q, k, v = (x.transpose(1, 2).to(v_GLHK.dtype) for x in (q_GSHK, k_GLHK, v_GLHK))
    bias = None if bias_G11L is None else bias_G11L.to(q.dtype)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def _rotate(x_GSHK: Tensor, rotations_GS1R2: Tensor) -> Tensor:
    even, odd = x_GSHK.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotations_GS1R2.unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x_GSHK.dtype)


def _clip_attention(num_chunks: int, config: TransformerConfig) -> Attend:
    """Return attention over the segments of clips; segments with equally much history share one call."""
    num_segments = 2 * num_chunks - 1
    groups: dict[int, list[int]] = {}
    for segment in range(num_segments):
        chunk = segment if segment < num_chunks - 1 else segment - (num_chunks - 1)
        groups.setdefault(len(history_of(chunk, config)), []).append(segment)

    def history(segment: int) -> tuple[int, ...]:
        chunk = segment if segment < num_chunks - 1 else segment - (num_chunks - 1)
        return (*history_of(chunk, config), segment)

    def attend(q_GSHK: Tensor, k_GSHK: Tensor, v_GSHK: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (-1, num_segments)) for x in (q_GSHK, k_GSHK, v_GSHK))
        out: list[Tensor | None] = [None] * num_segments
        for segments in groups.values():
            keys, values = (
                torch.stack([torch.cat([x[:, i] for i in history(segment)], dim=1) for segment in segments], dim=1)
                for x in (k, v)
            )
            queries = torch.stack([q[:, segment] for segment in segments], dim=1)
            attended = attention_of(*(x.flatten(0, 1) for x in (queries, keys, values)))
            for index, segment in enumerate(segments):
                out[segment] = attended.unflatten(0, (-1, len(segments)))[:, index]
        return torch.stack([x for x in out if x is not None], dim=1).flatten(0, 1)

    return attend


class Rollouts:
    """Closed loops of many sessions side by side, with the K/V window of a session."""

    def __init__(self, network: TrainingNetwork) -> None:
        self._network = network
        self._kv: list[dict[int, KeyValue]] = [{} for _ in network.model.layers]
        self._chunk = 0

    @torch.no_grad()
    def chunk(
        self, condition_BCFYX: Tensor, sigmas: tuple[float, ...], inputs_at: Callable[[float], SegmentInputs]
    ) -> Tensor:
        """Generate the next chunk of every session, float32 latents [B, 16, F, Y, X], and keep its K/V.

        `inputs_at(timestep)` prepares the segments at a timestep; the sampler is that of a session: predict the clean
        latents, add fresh noise at the next level.
        """
        x = torch.randn_like(condition_BCFYX[:, :16].float())
        clean = x
        for index, sigma in enumerate(sigmas):
            clean = x - sigma * self.flow(x, condition_BCFYX, inputs_at(1000.0 * sigma))
            if index + 1 < len(sigmas):
                following = sigmas[index + 1]
                x = (1 - following) * clean + following * torch.randn_like(clean)
        self.keep(clean, condition_BCFYX, inputs_at(0.0))
        return clean

    def flow(self, x_BCFYX: Tensor, condition_BCFYX: Tensor, inputs: SegmentInputs) -> Tensor:
        """Predict the flow of the next chunk's noisy latents; nothing is kept."""
        return self._forward(x_BCFYX, condition_BCFYX, inputs, keeps=False)

    def keep(self, clean_BCFYX: Tensor, condition_BCFYX: Tensor, inputs: SegmentInputs) -> None:
        """Make clean latents the history of what follows; `inputs` are at timestep 0."""
        self._forward(clean_BCFYX, condition_BCFYX, inputs, keeps=True)
        self._chunk += 1

    def _forward(self, x: Tensor, condition: Tensor, inputs: SegmentInputs, *, keeps: bool) -> Tensor:
        history = history_of(self._chunk, self._network.config)

        def attend_of(index: int) -> Attend:
            kept = self._kv[index]

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys = torch.cat([*(kept[chunk][0] for chunk in history), k], dim=1)
                values = torch.cat([*(kept[chunk][1] for chunk in history), v], dim=1)
                if keeps:
                    kept[self._chunk] = (k, v)
                    for chunk in set(kept) - {*history_of(self._chunk + 1, self._network.config), self._chunk}:
                        del kept[chunk]
                return attention_of(q, keys, values)

            return attend

        network = self._network
        h_GSD = network.tokens(torch.cat([x.to(condition.dtype), condition], dim=1))
        return network.flow_of(network.run_layers(h_GSD, inputs, attend_of), inputs)
