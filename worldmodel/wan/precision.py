"""Which number format each part of a transformer uses. This is the only place that decides.

    plan       weights, linears, attention, K/V    residual stream    time path, head    rotary product
    fp32       float32                             float32            float32            float32
    bf16       bfloat16                            bfloat16           float32            float32
    official   bfloat16                            float32            float32            float64

Statistics of every norm are float32. Time path and head cost nothing, so no plan rounds them; their weights still hold
values rounded to the weight format. Source of `official`: LingBot-World v2 official code, wan/modules/model_fast.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    """Number formats of one transformer."""

    name: str
    linear: torch.dtype
    residual: torch.dtype
    rope: torch.dtype


PLANS: tuple[PrecisionPlan, ...] = (
    PrecisionPlan(name="fp32", linear=torch.float32, residual=torch.float32, rope=torch.complex64),
    PrecisionPlan(name="bf16", linear=torch.bfloat16, residual=torch.bfloat16, rope=torch.complex64),
    PrecisionPlan(name="official", linear=torch.bfloat16, residual=torch.float32, rope=torch.complex128),
)


def precision_plan(name: str) -> PrecisionPlan:
    """Look a plan up by name. Raises ValueError naming the known plans."""
    for plan in PLANS:
        if plan.name == name:
            return plan
    raise ValueError(f"unknown precision {name!r}: expected one of {', '.join(plan.name for plan in PLANS)}")
