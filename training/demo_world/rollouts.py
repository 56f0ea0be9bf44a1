"""Closed loops of many sessions side by side, with the K/V window of a session.

Shape suffixes: B sessions, S tokens of a chunk, D width, L text rows, C channels, F latent frames, Y X latent rows and
columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.demo_world.network import Attend, LayerInputs, TrainingNetwork, attention_of, history_of, layer_forward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkInputs:
    """What one chunk of every session is conditioned on, at all its timesteps."""

    condition_BCFYX: Tensor
    layers: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]
    rotations_BS1R2: Tensor
    text_bias_B11L: Tensor


class Rollouts:
    """Sessions that advance together. Their chunks are made as a server makes them."""

    def __init__(self, network: TrainingNetwork) -> None:
        self._network = network
        self._kv: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in network.model.layers]
        self._chunk = 0

    def inputs(
        self,
        *,
        condition_BCFYX: Tensor,
        rotations_BF33: Tensor,
        translations_BF3: Tensor,
        positions_BF: Tensor,
        text_BLD: Tensor,
        text_bias_B11L: Tensor,
    ) -> ChunkInputs:
        """Prepare a chunk; text as `TrainingNetwork.text_rows` gives it, one prompt for each session."""
        network = self._network
        camera_BSD = network.camera(rotations_BF33, translations_BF3)
        layers = []
        for layer in network.model.layers:
            camera = layer.camera_modulation(camera_BSD)
            layers.append((camera.scale, camera.shift, *layer.cross_attn.key_value(text_BLD)))
        return ChunkInputs(
            condition_BCFYX=condition_BCFYX,
            layers=tuple(layers),
            rotations_BS1R2=network.rope(positions_BF),
            text_bias_B11L=text_bias_B11L,
        )

    @torch.no_grad()
    def chunk(self, inputs: ChunkInputs, sigmas: tuple[float, ...]) -> Tensor:
        """Generate the next chunk of every session, float32 latents [B, 16, F, Y, X], and keep its K/V.

        The sampler is that of a session: predict the clean latents, add fresh noise at the next level.
        """
        x = torch.randn_like(inputs.condition_BCFYX[:, 4:].float())
        clean = x
        for index, sigma in enumerate(sigmas):
            clean = x - sigma * self.flow(x, inputs, 1000.0 * sigma)
            if index + 1 < len(sigmas):
                following = sigmas[index + 1]
                x = (1 - following) * clean + following * torch.randn_like(clean)
        self.keep(clean, inputs)
        return clean

    def flow(self, x_BCFYX: Tensor, inputs: ChunkInputs, timestep: float) -> Tensor:
        """Predict the flow of the next chunk's noisy latents; nothing is kept."""
        return self._forward(x_BCFYX, inputs, timestep, keeps=False)

    def keep(self, clean_BCFYX: Tensor, inputs: ChunkInputs) -> None:
        """Make clean latents the history of what follows."""
        self._forward(clean_BCFYX, inputs, 0.0, keeps=True)
        self._chunk += 1

    def _forward(self, x: Tensor, inputs: ChunkInputs, timestep: float, *, keeps: bool) -> Tensor:
        network = self._network
        embedding_BD, time_B6D = network.time(torch.full((len(x),), timestep, device=x.device))
        h_BSD = network.tokens(torch.cat([x.to(inputs.condition_BCFYX.dtype), inputs.condition_BCFYX], dim=1))
        for index, layer in enumerate(network.model.layers):
            scale, shift, keys, values = inputs.layers[index]
            layer_inputs = LayerInputs(
                time_G6D=time_B6D,
                scale_GSD=scale,
                shift_GSD=shift,
                rotations_GS1R2=inputs.rotations_BS1R2,
                text_GLHK=(keys, values),
                text_bias_G11L=inputs.text_bias_B11L,
            )
            h_BSD = layer_forward(layer, h_BSD, layer_inputs, self._attention(index, keeps=keeps))
        return network.flow_of(h_BSD, embedding_BD)

    def _attention(self, index: int, *, keeps: bool) -> Attend:
        config, kept = self._network.config, self._kv[index]
        history = history_of(self._chunk, config)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = torch.cat([*(kept[chunk][0] for chunk in history), k], dim=1)
            values = torch.cat([*(kept[chunk][1] for chunk in history), v], dim=1)
            if keeps:
                kept[self._chunk] = (k, v)
                for chunk in set(kept) - {*history_of(self._chunk + 1, config), self._chunk}:
                    del kept[chunk]
            return attention_of(q, keys, values)

        return attend
