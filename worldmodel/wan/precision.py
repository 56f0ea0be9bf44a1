"""Which number format each part of a model uses. This is the only place that decides.

    plan       linears, attention, K/V    residual stream    rotary product    VAE        text encoder
    fp32       float32                    float32            float32           float32    float32
    bf16       bfloat16                   bfloat16           float32           float16    bfloat16
    official   bfloat16                   float32            float64           float32    bfloat16
    fp8        bfloat16, see below        bfloat16           float32           float16    bfloat16
    fp8_kv     bfloat16, see below        bfloat16           float32           float16    bfloat16

The VAE is float16 on a GPU: it rounds eight times finer than bfloat16 at the same speed, and its numbers stay far below
65504 (docs/performance.md). A CPU, where float16 convolutions are slow or missing, takes bfloat16 in its place; the
option `vae_precision` sets any of the three on any device.

In `fp8` the six large linears of a layer multiply float8 e4m3 numbers, with one scale per output and one per token. In
`fp8_kv` also keys and values are float8, and the queries that meet them.
Statistics of every norm, modulation, time path and head are float32 in all plans: they cost nothing. Their weights
still hold values rounded to the format of the linears. `official` rounds wherever the official code does, also where
its residual stream would not need it. Source: LingBot-World v2 official code, wan/modules/model_fast.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from worldmodel.wan.precision_names import Precision, VaePrecision

FLOAT32_BYTES = torch.float32.itemsize
"""A number of what is float32 in every plan, for memory plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    """Number formats of one model.

    `rounds_as_official`: round three more values to the format of the linears, as the official code happens to do: the
    first layer's norm before its modulation, the camera's factor 1 + scale, and the camera's rays. `quantizes_linears`:
    the large linears of the layers are float8, made from weights in the format of `linear` at load. `quantizes_kv`:
    stored keys and values are float8.
    """

    name: str
    linear: torch.dtype
    residual: torch.dtype
    rope: torch.dtype
    vae: torch.dtype
    text_encoder: torch.dtype
    rounds_as_official: bool = False
    quantizes_linears: bool = False
    quantizes_kv: bool = False

    @property
    def kv(self) -> torch.dtype:
        """Format of stored keys and values."""
        return torch.float8_e4m3fn if self.quantizes_kv else self.linear

    @property
    def description(self) -> str:
        """The plan's name, with the VAE's format where that is not the format of the linears."""
        return self.name if self.vae == self.linear else f"{self.name}, VAE {vae_precision_of(self.vae)}"


PLANS: tuple[PrecisionPlan, ...] = (
    PrecisionPlan(
        name=Precision.FP32.value,
        linear=torch.float32,
        residual=torch.float32,
        rope=torch.complex64,
        vae=torch.float32,
        text_encoder=torch.float32,
    ),
    PrecisionPlan(
        name=Precision.BF16.value,
        linear=torch.bfloat16,
        residual=torch.bfloat16,
        rope=torch.complex64,
        vae=torch.float16,
        text_encoder=torch.bfloat16,
    ),
    PrecisionPlan(
        name=Precision.OFFICIAL.value,
        linear=torch.bfloat16,
        residual=torch.float32,
        rope=torch.complex128,
        vae=torch.float32,
        text_encoder=torch.bfloat16,
        rounds_as_official=True,
    ),
    PrecisionPlan(
        name=Precision.FP8.value,
        linear=torch.bfloat16,
        residual=torch.bfloat16,
        rope=torch.complex64,
        vae=torch.float16,
        text_encoder=torch.bfloat16,
        quantizes_linears=True,
    ),
    PrecisionPlan(
        name=Precision.FP8_KV.value,
        linear=torch.bfloat16,
        residual=torch.bfloat16,
        rope=torch.complex64,
        vae=torch.float16,
        text_encoder=torch.bfloat16,
        quantizes_linears=True,
        quantizes_kv=True,
    ),
)


_VAE_FORMATS: dict[VaePrecision, torch.dtype] = {
    VaePrecision.FLOAT16: torch.float16,
    VaePrecision.BFLOAT16: torch.bfloat16,
    VaePrecision.FLOAT32: torch.float32,
}


def precision_plan(name: str, *, device: torch.device | None = None, vae: VaePrecision | None = None) -> PrecisionPlan:
    """Look a plan up by name, as it is on a device; None is any GPU.

    `vae` takes the place of the plan's format of the VAE. Raises ValueError naming the known plans.
    """
    for plan in PLANS:
        if plan.name == name:
            if vae is not None:
                return replace(plan, vae=_VAE_FORMATS[vae])
            is_slow = device is not None and device.type == "cpu" and plan.vae == torch.float16
            return replace(plan, vae=torch.bfloat16) if is_slow else plan
    raise ValueError(f"unknown precision {name!r}: expected one of {', '.join(plan.name for plan in PLANS)}")


def vae_precision_of(dtype: torch.dtype) -> VaePrecision:
    """Return the name of a VAE's number format."""
    return next(name for name, each in _VAE_FORMATS.items() if each == dtype)
