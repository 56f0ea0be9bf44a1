"""The UniPC sampler of flow models: noise levels, and each step as a sum of few tensors with known factors.

Second order, B2 form, predicting x0, with the corrector on from the second step and first order on the first and the
last. Everything but the tensors is known before the first step, so that a step has no branches and no host arithmetic
on device values. Video and actions step through tables of their own.

Convention: x = (1 - sigma) * x0 + sigma * noise, flow = noise - x0, lambda = ln((1 - sigma) / sigma).
Source: UniPC (Zhao et al., 2023, arXiv 2302.04867), in the form that Wan 2.1 uses for flow matching.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_TRAIN_TIMESTEPS = 1000
ORDER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLevels:
    """Sigmas of all steps and the one they end at, float32 values, and the integer timestep of each step."""

    sigmas: tuple[float, ...]
    timesteps: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)


def noise_levels(num_steps: int, shift: float, *, final_noise: float | None = None) -> NoiseLevels:
    """Lay out the grid: even from 1 - 1/1000 to 0 without its end, moved towards noise by `shift`.

    With `final_noise` the levels are squeezed linearly so that they end there instead of at 0, which keeps the video
    noisy while the actions become clean.
    """
    if num_steps < 1 or not shift > 0:
        raise ValueError(f"expected at least 1 step and a shift above 0, got {num_steps} and {shift}")
    # The upper end has been through float32 before the grid is laid out in float64.
    top = torch.tensor(1.0 - 1.0 / NUM_TRAIN_TIMESTEPS, dtype=torch.float32).item()
    base = torch.linspace(top, 0.0, num_steps + 1, dtype=torch.float64)[:-1]
    sigmas = shift * base / (1.0 + (shift - 1.0) * base)
    if final_noise is not None:
        if not 0.0 <= final_noise < 1.0:
            raise ValueError(f"final_noise must be from 0 up to below 1, got {final_noise}")
        largest = float(sigmas[0])
        sigmas = sigmas * (largest - final_noise) / largest + final_noise
    timesteps = (sigmas * NUM_TRAIN_TIMESTEPS).to(torch.int64)
    return NoiseLevels(
        sigmas=(*sigmas.to(torch.float32).tolist(), final_noise or 0.0),
        timesteps=tuple(int(timestep) for timestep in timesteps),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factors:
    """x = sample * `sample` + x0 * `newest` + x0 before that * `older` (+ x0 of this step * `current`)."""

    sample: float
    newest: float
    older: float = 0.0
    current: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    sigma: float
    corrector: _Factors | None
    predictor: _Factors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UniPCState:
    """What a trajectory carries from step to step; never changed in place.

    `sample` is the noisy tensor the network sees next. `last_sample` and the x0s are of the steps before.
    """

    sample: Tensor
    step: int = 0
    last_sample: Tensor | None = None
    x0: Tensor | None = None
    older_x0: Tensor | None = None


class UniPC:
    """The steps of one table of noise levels. Holds no trajectory."""

    def __init__(self, levels: NoiseLevels) -> None:
        self.levels = levels
        self._steps = tuple(_plan_step(levels.sigmas, index) for index in range(levels.num_steps))

    def start(self, noise: Tensor) -> UniPCState:
        """Begin a trajectory at pure noise, kept in float32."""
        return UniPCState(sample=noise.float())

    def advance(self, state: UniPCState, flow: Tensor) -> UniPCState:
        """Take one step with the flow that the network predicted for `state.sample`."""
        step = self._steps[state.step]
        x0 = torch.sub(state.sample, flow.float(), alpha=step.sigma)
        sample = state.sample
        if step.corrector is not None:
            assert state.last_sample is not None
            assert state.x0 is not None
            sample = _combine(step.corrector, state.last_sample, state.x0, state.older_x0).add_(
                x0, alpha=step.corrector.current
            )
        return UniPCState(
            sample=_combine(step.predictor, sample, x0, state.x0),
            step=state.step + 1,
            last_sample=sample,
            x0=x0,
            older_x0=state.x0,
        )


def _combine(factors: _Factors, sample: Tensor, newest: Tensor, older: Tensor | None) -> Tensor:
    out = torch.mul(sample, factors.sample).add_(newest, alpha=factors.newest)
    if factors.older:
        assert older is not None
        out.add_(older, alpha=factors.older)
    return out


def _plan_step(sigmas: tuple[float, ...], index: int) -> _Step:
    """Work out the factors of one step: correct the sample it starts from, then predict the next one."""
    last = len(sigmas) - 2
    corrector = None if index == 0 else _corrector(sigmas, index, order=_order(index - 1, last))
    return _Step(sigma=sigmas[index], corrector=corrector, predictor=_predictor(sigmas, index, _order(index, last)))


def _order(index: int, last: int) -> int:
    """Order of the predictor of a step: limited by the steps before it and by those left."""
    return min(ORDER, index + 1, last - index + 1)


def _log_ratio(sigma: float) -> float:
    return math.inf if sigma == 0.0 else math.log((1.0 - sigma) / sigma)


def _b_form(h: float) -> tuple[float, float]:
    """Return e^-h - 1, which is also the B2 weight, and the second phi function of -h."""
    first = math.expm1(-h)
    second = -1.0 if math.isinf(h) else first / -h - 1.0
    return first, second


def _predictor(sigmas: tuple[float, ...], index: int, order: int) -> _Factors:
    sigma, sigma_next = sigmas[index], sigmas[index + 1]
    h = _log_ratio(sigma_next) - _log_ratio(sigma)
    alpha_next = 1.0 - sigma_next
    first, _ = _b_form(h)
    newest, older = -alpha_next * first, 0.0
    if order == ORDER:
        # A second-order predictor weights the difference quotient by one half, whatever its spacing.
        ratio = (_log_ratio(sigmas[index - 1]) - _log_ratio(sigma)) / h
        older = -alpha_next * first * 0.5 / ratio
        newest -= older
    return _Factors(sample=sigma_next / sigma, newest=newest, older=older)


def _corrector(sigmas: tuple[float, ...], index: int, order: int) -> _Factors:
    """Correct the sample of step `index`, reached from step `index - 1`, with the x0 found at it."""
    sigma_before, sigma = sigmas[index - 1], sigmas[index]
    h = _log_ratio(sigma) - _log_ratio(sigma_before)
    alpha = 1.0 - sigma
    first, second = _b_form(h)
    if order == 1:
        current, older = -alpha * first * 0.5, 0.0
    else:
        ratio = (_log_ratio(sigmas[index - 2]) - _log_ratio(sigma_before)) / h
        # The two weights solve w1 + w2 = b1, ratio * w1 + w2 = b2.
        b1 = second / first
        b2 = 2.0 * (second / -h - 0.5) / first
        w1 = (b1 - b2) / (1.0 - ratio)
        older, current = -alpha * first * w1 / ratio, -alpha * first * (b1 - w1)
    return _Factors(sample=sigma / sigma_before, newest=-alpha * first - older - current, older=older, current=current)
