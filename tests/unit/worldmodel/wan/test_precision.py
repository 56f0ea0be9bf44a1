"""Which number format the VAE has: by plan, by device and by option, and that it is said."""

from __future__ import annotations

import pytest
import torch

from worldmodel.wan.precision import PLANS, precision_plan, vae_precision_of
from worldmodel.wan.precision_names import VaePrecision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REDUCED = ("bf16", "fp8", "fp8_kv")


@pytest.mark.parametrize("name", [plan.name for plan in PLANS])
def test_the_vae_of_the_reduced_plans_is_float16_on_a_gpu_and_bfloat16_on_a_cpu(name: str) -> None:
    on_cuda, on_cpu = precision_plan(name, device=CUDA), precision_plan(name, device=CPU)
    expected = (torch.float16, torch.bfloat16) if name in REDUCED else (torch.float32, torch.float32)
    assert (on_cuda.vae, on_cpu.vae) == expected
    assert precision_plan(name) == on_cuda
    assert on_cpu.linear == on_cuda.linear


@pytest.mark.parametrize("device", [CPU, CUDA, None])
@pytest.mark.parametrize("vae", list(VaePrecision))
def test_the_option_decides_on_every_device(device: torch.device | None, vae: VaePrecision) -> None:
    for plan in PLANS:
        assert vae_precision_of(precision_plan(plan.name, device=device, vae=vae).vae) is vae


def test_a_vae_that_differs_from_the_linears_is_named() -> None:
    said = {plan.name: precision_plan(plan.name, device=CUDA).description for plan in PLANS}
    assert said == {
        "fp32": "fp32",
        "bf16": "bf16, VAE float16",
        "official": "official, VAE float32",
        "fp8": "fp8, VAE float16",
        "fp8_kv": "fp8_kv, VAE float16",
    }
    assert precision_plan("bf16", device=CPU).description == "bf16"
    assert precision_plan("bf16", device=CUDA, vae=VaePrecision.BFLOAT16).description == "bf16"
    assert precision_plan("fp32", vae=VaePrecision.FLOAT16).description == "fp32, VAE float16"
