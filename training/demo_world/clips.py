"""Whole clips in one pass with teacher forcing.

A clip of N chunks is N - 1 clean segments, which give history, then one or more noisy copies of all N, which are
predicted. Each segment sees what the K/V window of a session would hold at its chunk: sink, window, itself. Several
noisy copies, at other noise levels, share what the history costs.

Shape suffixes: B clips, N chunks, M segments of a clip, G all segments (B * M), S tokens of a chunk, D width, H heads,
K head size, R rotated pairs, L text rows, Q prompts, C channels, F latent frames of the clip, Y X latent rows and
columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from training.demo_world.network import LayerInputs, TrainingNetwork, attention_of, history_of, layer_forward
from worldmodel.lingbot.transformer import Layer
from worldmodel.lingbot.transformer_config import TransformerConfig

LayerFunction = Callable[[Layer, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class ClipLayout:
    """Which chunk each segment of a clip is, and which segments it sees."""

    def __init__(self, num_chunks: int, num_copies: int, config: TransformerConfig) -> None:
        self.num_chunks, self.num_copies = num_chunks, num_copies
        self.chunks = (*range(num_chunks - 1), *(chunk for _ in range(num_copies) for chunk in range(num_chunks)))
        self.num_segments = len(self.chunks)
        groups: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for segment, chunk in enumerate(self.chunks):
            history = history_of(chunk, config)
            groups.setdefault(len(history), []).append((segment, (*history, segment)))
        self._groups = tuple(tuple(group) for group in groups.values())
        order = [segment for group in self._groups for segment, _ in group]
        self._place = tuple(order.index(segment) for segment in range(self.num_segments))

    def spread(self, x_BN: Tensor) -> Tensor:
        """Give every segment what its chunk has: [B, N, ...] to [B * M, ...]."""
        return torch.cat([x_BN[:, :-1], *[x_BN] * self.num_copies], dim=1).flatten(0, 1)

    def attend(self, q_GSHK: Tensor, k_GSHK: Tensor, v_GSHK: Tensor) -> Tensor:
        """Attend segment by segment; those with equally much history share one call."""
        q, k, v = (x.unflatten(0, (-1, self.num_segments)) for x in (q_GSHK, k_GSHK, v_GSHK))
        attended = []
        for group in self._groups:
            keys, values = (
                torch.stack([torch.cat([x[:, i] for i in seen], dim=1) for _, seen in group], dim=1).flatten(0, 1)
                for x in (k, v)
            )
            queries = torch.stack([q[:, segment] for segment, _ in group], dim=1).flatten(0, 1)
            out = attention_of(queries, keys, values).unflatten(0, (-1, len(group)))
            attended += [out[:, index] for index in range(len(group))]
        return torch.stack([attended[place] for place in self._place], dim=1).flatten(0, 1)

    def layer(
        self,
        layer: Layer,
        h_GSD: Tensor,
        time_G6D: Tensor,
        camera_CSD: Tensor,
        rotations_GS1R2: Tensor,
        text_QLD: Tensor,
        chosen_GQ: Tensor,
        text_bias_G11L: Tensor,
    ) -> Tensor:
        """Run one layer. Cameras are computed once a chunk [B * N, S, D] and texts once a prompt, then spread."""
        camera = layer.camera_modulation(camera_CSD)
        scale, shift = (self.spread(x.unflatten(0, (-1, self.num_chunks))) for x in (camera.scale, camera.shift))
        # A product with ones and zeros picks rows exactly, and its gradient needs no atomic additions.
        keys, values = (
            (chosen_GQ.to(x.dtype) @ x.flatten(1)).unflatten(1, x.shape[1:])
            for x in layer.cross_attn.key_value(text_QLD)
        )
        inputs = LayerInputs(
            time_G6D=time_G6D,
            scale_GSD=scale,
            shift_GSD=shift,
            rotations_GS1R2=rotations_GS1R2,
            text_GLHK=(keys, values),
            text_bias_G11L=text_bias_G11L,
        )
        return layer_forward(layer, h_GSD, inputs, self.attend)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClipInputs:
    """What clips are conditioned on.

    `timesteps_BM` are those of all segments, clean ones at 0. Rotations and translations are as
    `TrainingNetwork.camera` takes them, `positions_BF` absolute latent frames, `prompts_BN` rows of the encoded prompts
    `text_QLC` with their mask.
    """

    timesteps_BM: Tensor
    rotations_BF33: Tensor
    translations_BF3: Tensor
    positions_BF: Tensor
    prompts_BN: Tensor
    text_QLC: Tensor
    text_mask_QL: Tensor


class Clips:
    """The pass over clips of one layout. `compile` lets torch compile the layer; results change by rounding."""

    def __init__(
        self, network: TrainingNetwork, num_chunks: int, *, num_copies: int = 1, pose_layers: tuple[int, ...] = ()
    ) -> None:
        self.network = network
        self.layout = ClipLayout(num_chunks, num_copies, network.config)
        self._pose_layers = pose_layers
        self._layer: LayerFunction = self.layout.layer

    def compile(self) -> None:
        self._layer = torch.compile(self.layout.layer)

    def flow(self, clean_BCFYX: Tensor, noisy_BCFYX: Tensor, inputs: ClipInputs) -> tuple[Tensor, list[Tensor]]:
        """Predict the flow of all noisy chunks, [B, 16, copies * F, Y, X].

        Args:
            clean_BCFYX: History with its condition, 36 channels, all chunks but the last.
            noisy_BCFYX: Noisy latents with the condition, 36 channels, one copy after the other.
            inputs: What the clips are conditioned on.

        Returns:
            The flow, and the residual stream [B, M, S, D] after each of the layers asked for.
        """
        network, layout = self.network, self.layout
        frames = network.config.latent_frames_per_chunk
        segments = torch.cat([clean_BCFYX, noisy_BCFYX], dim=2).unflatten(2, (-1, frames)).transpose(1, 2)
        embedding_GD, time_G6D = network.time(inputs.timesteps_BM.flatten())
        camera_CSD = network.camera(
            *(x.unflatten(1, (-1, frames)).flatten(0, 1) for x in (inputs.rotations_BF33, inputs.translations_BF3))
        )
        rotations = layout.spread(
            network.rope(inputs.positions_BF.unflatten(1, (-1, frames)).flatten(0, 1)).unflatten(
                0, (-1, layout.num_chunks)
            )
        )
        text_QLD, bias_Q11L = network.text_rows(inputs.text_QLC, inputs.text_mask_QL)
        prompts_G = layout.spread(inputs.prompts_BN)
        chosen_GQ = (prompts_G[:, None] == torch.arange(len(text_QLD), device=prompts_G.device)).float()
        h_GSD = network.tokens(segments.flatten(0, 1))
        kept = []
        for index, layer in enumerate(network.model.layers):
            if index in self._pose_layers:
                kept.append(h_GSD.unflatten(0, (-1, layout.num_segments)))
            h_GSD = self._layer(
                layer, h_GSD, time_G6D, camera_CSD, rotations, text_QLD, chosen_GQ, bias_Q11L[prompts_G]
            )
        flow_BMCFYX = network.flow_of(h_GSD, embedding_GD).unflatten(0, (-1, layout.num_segments))
        return flow_BMCFYX[:, layout.num_chunks - 1 :].transpose(1, 2).flatten(2, 3), kept
