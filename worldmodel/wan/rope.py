"""Rotary position embedding over three axes: latent frame, row, column.

Owns the split of a head over the axes, the frequencies and the rotation. Rows and columns restart in each latent frame;
the frame position is absolute since the start of the session, so that keys cached after rotation stay valid for ever.

Shapes: N tokens in (frame, row, column) order, H heads, D head size, P = D/2 rotated pairs.
Source: LingBot-World v2 official code, wan/modules/model_fast.py (rope_params, causal_rope_apply).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSplit:
    """Rotated pairs of a head given to each axis."""

    time_pairs: int
    row_pairs: int
    column_pairs: int


def split_head(head_dim: int) -> RopeSplit:
    """Split a head: rows and columns get floor(head_dim / 6) pairs each, time gets what is left."""
    if head_dim < 6 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 6, got {head_dim}")
    spatial = head_dim // 6
    return RopeSplit(time_pairs=head_dim // 2 - 2 * spatial, row_pairs=spatial, column_pairs=spatial)


def inverse_frequencies(num_pairs: int) -> torch.Tensor:
    """Return THETA^(-i / num_pairs) for pair i of an axis, float64 [num_pairs]."""
    exponents = torch.arange(0, 2 * num_pairs, 2, dtype=torch.float64) / (2 * num_pairs)
    return 1.0 / torch.pow(THETA, exponents)


def axis_angles(positions: torch.Tensor, num_pairs: int) -> torch.Tensor:
    """Return angles of an axis in radians, float64 [len(positions), num_pairs]."""
    return torch.outer(positions.to(torch.float64), inverse_frequencies(num_pairs))


class RopeTable:
    """Rotations of one token grid. The spatial part is made once, the time part for each chunk.

    Angles are formed in float64 on the CPU at any absolute frame; there is no table to run out of.
    """

    def __init__(self, *, head_dim: int, grid_height: int, grid_width: int) -> None:
        self._split = split_head(head_dim)
        self._grid_tokens = grid_height * grid_width
        rows = axis_angles(torch.arange(grid_height), self._split.row_pairs)
        columns = axis_angles(torch.arange(grid_width), self._split.column_pairs)
        self._spatial_angles = torch.cat(
            [
                rows[:, None, :].expand(-1, grid_width, -1),
                columns[None, :, :].expand(grid_height, -1, -1),
            ],
            dim=-1,
        ).reshape(self._grid_tokens, -1)

    def rotations(self, first_latent_frame: int, num_latent_frames: int) -> torch.Tensor:
        """Return unit rotations of a run of latent frames, complex128 [N, 1, P] on the CPU."""
        if first_latent_frame < 0:
            raise ValueError(f"first_latent_frame must be >= 0, got {first_latent_frame}")
        frames = torch.arange(first_latent_frame, first_latent_frame + num_latent_frames)
        time = axis_angles(frames, self._split.time_pairs)
        angles = torch.cat(
            [
                time[:, None, :].expand(-1, self._grid_tokens, -1),
                self._spatial_angles[None].expand(num_latent_frames, -1, -1),
            ],
            dim=-1,
        ).flatten(0, 1)
        return torch.polar(torch.ones_like(angles), angles)[:, None, :]


def rotate(x_NHD: torch.Tensor, rotations_N1P: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs (2i, 2i+1) of each head; the product is formed in the precision of `rotations_N1P`.

    Returns a new tensor of the shape and dtype of `x_NHD`.
    """
    real_dtype = torch.float64 if rotations_N1P.dtype == torch.complex128 else torch.float32
    pairs_NHP2 = x_NHD.to(real_dtype).unflatten(-1, (-1, 2))
    rotated = torch.view_as_complex(pairs_NHP2) * rotations_N1P
    return torch.view_as_real(rotated).flatten(-2).to(x_NHD.dtype)
