"""Few-step sampler tables of flow-matching models: which timestep the network sees and which sigmas are used.

Convention: x = (1 - sigma) * x0 + sigma * noise, flow = noise - x0, timestep = 1000 * sigma up to rounding.
Nothing is stepped here; a table is four rows of numbers computed from the flow shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NUM_TRAIN_TIMESTEPS = 1000
COMMIT_TIMESTEP = 0.0
"""Timestep of the forward that stores K and V of the clean latents; its sigma is 0."""

NOMINAL_LABELS = (1000, 750, 500, 250)
OFFICIAL_INDICES = (0, 250, 500, 750)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStep:
    """One denoising step.

    `x0_sigma` turns flow into x0 after the forward; `renoise_sigma` is used when noise is added to arrive at this step
    (never for the first one, which starts from unscaled noise).
    """

    timestep: float
    x0_sigma: float
    renoise_sigma: float


SamplerTable = tuple[SamplerStep, ...]


def shift_sigma(sigma: float, shift: float) -> float:
    """Move a base sigma towards noise: shift * sigma / (1 + (shift - 1) * sigma)."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def nominal_table(shift: float, labels: Sequence[int] = NOMINAL_LABELS) -> SamplerTable:
    """Build the table with exact sigmas: one sigma per step, timestep = 1000 * sigma, not rounded.

    Source: vLLM-Omni, diffusion/models/lingbot_world/pipeline.py.
    """
    _check_shift(shift)
    sigmas = [shift_sigma(label / NUM_TRAIN_TIMESTEPS, shift) for label in labels]
    return tuple(
        SamplerStep(timestep=NUM_TRAIN_TIMESTEPS * sigma, x0_sigma=sigma, renoise_sigma=sigma) for sigma in sigmas
    )


def official_table(shift: float, indices: Sequence[int] = OFFICIAL_INDICES) -> SamplerTable:
    """Build the table on the integer lattice of the official scheduler.

    The lattice holds 1000 shifted float32 sigmas whose timesteps are truncated to integers and so repeat near 1000. The
    sigma for x0 is that of the first entry with the step's integer, the sigma for re-noising that of the second.

    Source: LingBot-World v2 official code, wan/utils/fm_solvers_unipc.py (set_timesteps, index_for_timestep) and
    wan/image2video.py (the two look-ups).
    """
    _check_shift(shift)
    sigmas, timesteps = _official_lattice(shift)
    return tuple(_official_step(sigmas, timesteps, index) for index in indices)


def _official_lattice(shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    # The upper end has been through float32 before the lattice is laid out in float64.
    top = torch.tensor(1.0 - 1.0 / NUM_TRAIN_TIMESTEPS, dtype=torch.float32).item()
    base = torch.linspace(top, 0.0, NUM_TRAIN_TIMESTEPS + 1, dtype=torch.float64)[:-1]
    sigmas = shift * base / (1.0 + (shift - 1.0) * base)
    return sigmas.to(torch.float32), (sigmas * NUM_TRAIN_TIMESTEPS).to(torch.int64)


def _official_step(sigmas: torch.Tensor, timesteps: torch.Tensor, index: int) -> SamplerStep:
    timestep = int(timesteps[index])
    same = (timesteps == timestep).nonzero().flatten().tolist()
    return SamplerStep(
        timestep=float(timestep),
        x0_sigma=float(sigmas[same[0]]),
        renoise_sigma=float(sigmas[same[min(1, len(same) - 1)]]),
    )


def _check_shift(shift: float) -> None:
    if not shift > 0:
        raise ValueError(f"flow shift must be > 0, got {shift}")


def clean_from_flow(x_t: torch.Tensor, flow: torch.Tensor, sigma: float) -> torch.Tensor:
    """Return x0 = x_t - sigma * flow, formed in float64, in the dtype of `x_t`."""
    return torch.sub(x_t.to(torch.float64), flow.to(torch.float64), alpha=sigma).to(x_t.dtype)


def add_noise(x0: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """Return (1 - sigma) * x0 + sigma * noise."""
    return torch.add(x0 * (1.0 - sigma), noise, alpha=sigma)
