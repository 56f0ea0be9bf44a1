"""LingBot-World v2 a second time, as plainly as possible: float64, full history, nothing shared with the real code.

Written from a description of the model alone and slow on purpose: keys and values of every frame are kept for ever,
those a chunk may see are picked by a list of frame numbers, each token is rotated by its own angles, all text rows are
attended to one by one. Formulas: LingBot-World v2 official code, wan/modules/model_fast.py, wan/utils/cam_utils.py.

Shape suffixes: T tokens in (frame, row, column) order, D model width, H heads, K head size, L text rows, C channels,
F latent frames, Y and X latent rows and columns, n poses, h and w pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Steps = Sequence[tuple[float, float, float]]
"""Timestep, sigma for x0, sigma for noise added to come to this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinSizes:
    """`visible` counts the sink and the chunk in flight; None for all frames."""

    num_layers: int
    num_heads: int
    head_dim: int
    freq_dim: int
    text_rows: int
    sink: int
    visible: int | None
    eps: float = 1e-6


def visible_frames(first: int, count: int, sink: int, visible: int | None) -> list[int]:
    """List the frames that a chunk sees, itself included."""
    end = first + count
    if visible is None or end <= visible:
        return list(range(end))
    return [*range(sink), *range(max(sink, end - (visible - sink)), end)]


def packed_camera(relative_n44: Tensor, intrinsics_n4: Tensor, height: int, width: int) -> Tensor:
    """Return rays [384, n, h/8, w/8]: origin xyz and direction xyz of each pixel, 8x8 pixels folded into channels."""
    out = torch.zeros(384, len(relative_n44), height // 8, width // 8, dtype=torch.float64)
    for n, (pose, (fx, fy, cx, cy)) in enumerate(zip(relative_n44.double(), intrinsics_n4.double(), strict=True)):
        y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
        direction = torch.stack([(x.double() - cx) / fx, (y.double() - cy) / fy, torch.ones_like(x).double()])
        direction = direction / direction.square().sum(0).sqrt()
        turned = torch.einsum("ij,jhw->ihw", pose[:3, :3], direction)
        rays = torch.cat([pose[:3, 3, None, None].expand(3, height, width), turned])
        for component in range(6):
            for dy in range(8):
                for dx in range(8):
                    out[component * 64 + dy * 8 + dx, n] = rays[component, dy::8, dx::8]
    return out


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _tokens(x_CFYX: Tensor) -> Tensor:
    """Fold 2x2 patches: feature = channel * 4 + dy * 2 + dx."""
    channels, frames, rows, columns = x_CFYX.shape
    out = x_CFYX.new_zeros(frames, rows // 2, columns // 2, channels * 4)
    for dy in range(2):
        for dx in range(2):
            out[..., dy * 2 + dx :: 4] = x_CFYX[:, :, dy::2, dx::2].permute(1, 2, 3, 0)
    return out.flatten(0, 2)


@dataclass(slots=True, kw_only=True)
class Float64Twin:
    """One session. `weights` have the checkpoint's names."""

    sizes: TwinSizes
    weights: dict[str, Tensor]
    text_LC: Tensor | None = None
    frames_done: int = 0
    history: list[dict[int, tuple[Tensor, Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = {name: tensor.double() for name, tensor in self.weights.items()}
        self.history = [{} for _ in range(self.sizes.num_layers)]

    def set_text(self, rows_LC: Tensor) -> None:
        """Change the text that is attended to from here on; history stays."""
        padded = torch.zeros(self.sizes.text_rows, rows_LC.shape[1], dtype=torch.float64)
        padded[: len(rows_LC)] = rows_LC.double()
        self.text_LC = self._linear("text_embedding.2", _gelu(self._linear("text_embedding.0", padded)))

    def chunk(self, noise: Sequence[Tensor], condition_CFYX: Tensor, camera_CFYX: Tensor, steps: Steps) -> Tensor:
        """Denoise the next chunk, keep its clean keys and values, and return its latents [C, F, Y, X]."""
        x = noise[0].double()
        for index, (timestep, x0_sigma, _) in enumerate(steps):
            flow, _ = self._forward(x, condition_CFYX.double(), camera_CFYX.double(), timestep)
            x0 = x - x0_sigma * flow
            if index + 1 < len(steps):
                sigma = steps[index + 1][2]
                x = (1 - sigma) * x0 + sigma * noise[index + 1].double()
        _, key_values = self._forward(x0, condition_CFYX.double(), camera_CFYX.double(), 0.0)
        num_frames = x0.shape[1]
        for layer, (key_THK, value_THK) in enumerate(key_values):
            for offset, frame in enumerate(zip(key_THK.chunk(num_frames), value_THK.chunk(num_frames), strict=True)):
                self.history[layer][self.frames_done + offset] = frame
        self.frames_done += num_frames
        return x0

    # ------------------------------------------------------------ one forward

    def _forward(
        self, x_CFYX: Tensor, condition_CFYX: Tensor, camera_CFYX: Tensor, timestep: float
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the flow, and the chunk's keys and values by layer."""
        _, frames, rows, columns = x_CFYX.shape
        h_TD = self._patches(torch.cat([x_CFYX, condition_CFYX]))
        projected = self._linear("patch_embedding_wancamctrl", _tokens(camera_CFYX))
        hidden = _silu(self._linear("c2ws_hidden_states_layer1", projected))
        camera_TD = projected + self._linear("c2ws_hidden_states_layer2", hidden)
        e_D, e6_6D = self._time(timestep)
        angles_TP = self._angles(frames, rows // 2, columns // 2)
        key_values = []
        for layer in range(self.sizes.num_layers):
            h_TD, key_value = self._layer(layer, h_TD, camera_TD, e6_6D, angles_TP, frames)
            key_values.append(key_value)
        shift, scale = self.weights["head.modulation"][0] + e_D
        patches_TO = self._linear("head.head", self._norm(h_TD) * (1 + scale) + shift)
        return self._unpatch(patches_TO, frames, rows, columns), key_values

    def _layer(
        self, layer: int, h_TD: Tensor, camera_TD: Tensor, e6_6D: Tensor, angles_TP: Tensor, frames: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        name = f"blocks.{layer}"
        m = self.weights[f"{name}.modulation"][0] + e6_6D
        a = self._norm(h_TD) * (1 + m[1]) + m[0]
        query = self._rotate(
            self._heads(self._rms(f"{name}.self_attn.norm_q", self._linear(f"{name}.self_attn.q", a))), angles_TP
        )
        key = self._rotate(
            self._heads(self._rms(f"{name}.self_attn.norm_k", self._linear(f"{name}.self_attn.k", a))), angles_TP
        )
        value = self._heads(self._linear(f"{name}.self_attn.v", a))
        keys, values = [], []
        for frame in visible_frames(self.frames_done, frames, self.sizes.sink, self.sizes.visible):
            if frame < self.frames_done:
                old_key, old_value = self.history[layer][frame]
            else:
                offset = frame - self.frames_done
                old_key, old_value = key.chunk(frames)[offset], value.chunk(frames)[offset]
            keys.append(old_key)
            values.append(old_value)
        attended = self._attend(query, torch.cat(keys), torch.cat(values))
        h = h_TD + m[2] * self._linear(f"{name}.self_attn.o", attended)
        inner = _silu(self._linear(f"{name}.cam_injector_layer1", camera_TD))
        z = camera_TD + self._linear(f"{name}.cam_injector_layer2", inner)
        h = (1 + self._linear(f"{name}.cam_scale_layer", z)) * h + self._linear(f"{name}.cam_shift_layer", z)
        b = self._norm(h) * self.weights[f"{name}.norm3.weight"] + self.weights[f"{name}.norm3.bias"]
        assert self.text_LC is not None
        text_query = self._heads(self._rms(f"{name}.cross_attn.norm_q", self._linear(f"{name}.cross_attn.q", b)))
        text_key = self._heads(
            self._rms(f"{name}.cross_attn.norm_k", self._linear(f"{name}.cross_attn.k", self.text_LC))
        )
        text_value = self._heads(self._linear(f"{name}.cross_attn.v", self.text_LC))
        h = h + self._linear(f"{name}.cross_attn.o", self._attend(text_query, text_key, text_value))
        a = self._norm(h) * (1 + m[4]) + m[3]
        h = h + m[5] * self._linear(f"{name}.ffn.2", _gelu(self._linear(f"{name}.ffn.0", a)))
        return h, (key, value)

    # ------------------------------------------------------------ its parts

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _patches(self, u_CFYX: Tensor) -> Tensor:
        weight = self.weights["patch_embedding.weight"].flatten(1)
        return _tokens(u_CFYX) @ weight.T + self.weights["patch_embedding.bias"]

    def _time(self, timestep: float) -> tuple[Tensor, Tensor]:
        half = self.sizes.freq_dim // 2
        phases = torch.tensor([timestep * 10000.0 ** (-j / half) for j in range(half)], dtype=torch.float64)
        vector = torch.cat([phases.cos(), phases.sin()])
        e_D = self._linear("time_embedding.2", _silu(self._linear("time_embedding.0", vector)))
        return e_D, self._linear("time_projection.1", _silu(e_D)).reshape(6, -1)

    def _angles(self, frames: int, rows: int, columns: int) -> Tensor:
        """Return the angle of each rotated pair of each token: time pairs, then row pairs, then column pairs."""
        spatial = self.sizes.head_dim // 6
        pairs = (self.sizes.head_dim // 2 - 2 * spatial, spatial, spatial)
        out = []
        for frame in range(self.frames_done, self.frames_done + frames):
            for row in range(rows):
                for column in range(columns):
                    places = zip((frame, row, column), pairs, strict=True)
                    out.append([place * 10000.0 ** (-i / count) for place, count in places for i in range(count)])
        return torch.tensor(out, dtype=torch.float64)

    def _rotate(self, x_THK: Tensor, angles_TP: Tensor) -> Tensor:
        even, odd = x_THK[..., 0::2], x_THK[..., 1::2]
        cos, sin = angles_TP.cos()[:, None], angles_TP.sin()[:, None]
        out = torch.empty_like(x_THK)
        out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
        return out

    def _heads(self, x_TD: Tensor) -> Tensor:
        return x_TD.reshape(len(x_TD), self.sizes.num_heads, self.sizes.head_dim)

    def _attend(self, query_THK: Tensor, key_SHK: Tensor, value_SHK: Tensor) -> Tensor:
        logits = torch.einsum("thk,shk->hts", query_THK, key_SHK) / math.sqrt(self.sizes.head_dim)
        return torch.einsum("hts,shk->thk", logits.softmax(-1), value_SHK).flatten(1)

    def _norm(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.sizes.eps).sqrt()

    def _rms(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.sizes.eps).sqrt() * self.weights[f"{name}.weight"]

    def _unpatch(self, patches_TO: Tensor, frames: int, rows: int, columns: int) -> Tensor:
        channels = patches_TO.shape[1] // 4
        grid = patches_TO.reshape(frames, rows // 2, columns // 2, 4, channels)
        out = patches_TO.new_zeros(channels, frames, rows, columns)
        for dy in range(2):
            for dx in range(2):
                out[:, :, dy::2, dx::2] = grid[..., dy * 2 + dx, :].permute(3, 0, 1, 2)
        return out
