"""Case 6: RoPE frequencies, tables and their application, timestep sinusoid."""

from __future__ import annotations

import pytest
import torch

from tests.support.lingbot_golden import assert_close, manifest, max_abs, tensors
from worldmodel.wan.layers import sinusoid
from worldmodel.wan.rope import RopeTable, axis_angles, inverse_frequencies, rotate, split_head

TABLE_TOLERANCE = 1e-12
APPLY_TOLERANCE = 1e-6


def head_names() -> list[str]:
    names = manifest()["files"]["case6_rope_time.safetensors"]["tensors"]
    return sorted({name.split(".")[0] for name in names if name.startswith("head")})


def grids(num_tokens: int) -> list[tuple[int, int, int]]:
    """Every (frames, rows, columns) with so many tokens; the golden files do not say which one it was."""
    divisors = [n for n in range(1, num_tokens + 1) if num_tokens % n == 0]
    return [
        (frames, rows, num_tokens // (frames * rows))
        for frames in divisors
        for rows in divisors
        if num_tokens % (frames * rows) == 0
    ]


def rotated_by_grid(x_NHD: torch.Tensor, grid: tuple[int, int, int], start: int, dtype: torch.dtype) -> torch.Tensor:
    frames, rows, columns = grid
    table = RopeTable(head_dim=x_NHD.shape[-1], grid_height=rows, grid_width=columns)
    return rotate(x_NHD, table.rotations(start, frames).to(dtype))


@pytest.mark.parametrize("name", head_names())
def test_lingbot_rope_frequencies_and_tables(name: str) -> None:
    golden = tensors("case6_rope_time")
    split = split_head(int(name.removeprefix("head")))
    assert_close(inverse_frequencies(split.time_pairs), golden[f"{name}.inv_freq_t"], TABLE_TOLERANCE)
    assert_close(inverse_frequencies(split.row_pairs), golden[f"{name}.inv_freq_hw"], TABLE_TOLERANCE)
    pairs = (split.time_pairs, split.row_pairs, split.column_pairs)
    angles = torch.cat([axis_angles(golden[f"{name}.positions"], num) for num in pairs], dim=-1)
    assert_close(angles.cos(), golden[f"{name}.table_cos"], TABLE_TOLERANCE)
    assert_close(angles.sin(), golden[f"{name}.table_sin"], TABLE_TOLERANCE)


@pytest.mark.parametrize("name", head_names())
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lingbot_rope_applied(name: str, dtype: torch.dtype) -> None:
    golden = tensors("case6_rope_time")
    x_NHD = golden[f"{name}.apply_in"][0]
    prefix = f"{name}.apply_out_start"
    expected = {int(key.removeprefix(prefix)): value[0] for key, value in golden.items() if key.startswith(prefix)}
    assert expected, "no applied cases"
    fitting = [
        grid
        for grid in grids(x_NHD.shape[0])
        if all(
            max_abs(rotated_by_grid(x_NHD, grid, start, dtype), out) <= APPLY_TOLERANCE
            for start, out in expected.items()
        )
    ]
    assert fitting, f"{name}: no grid of {x_NHD.shape[0]} tokens gives the stored outputs"


def test_lingbot_time_sinusoid() -> None:
    golden = tensors("case6_rope_time")
    expected = golden["sinusoid_freq256"]
    assert_close(sinusoid(golden["timesteps"], expected.shape[1]), expected, APPLY_TOLERANCE)
