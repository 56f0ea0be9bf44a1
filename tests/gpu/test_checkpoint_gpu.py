"""Checkpoints onto CUDA: pinned pieces and casts on the device give what the CPU reads; random weights are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worldmodel.checkpoint.random_weights import RandomWeights
from worldmodel.checkpoint.writer import write_checkpoint
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.layout import Layout, plan_checkpoint
from worldmodel.lingbot.published import TINY
from worldmodel.lingbot.weights import load_model
from worldmodel.wan.precision import precision_plan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", list(Layout))
def test_a_checkpoint_on_cuda_equals_one_on_the_cpu(
    tmp_path: Path, layout: Layout, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small pieces, so that tensors are cut and buffers are used again while their copies are under way.
    monkeypatch.setattr("worldmodel.checkpoint.tensor_stream.PIECE_BYTES", 4096)
    write_checkpoint(plan_checkpoint(TINY, layout=layout), tmp_path / "made", seed=7)
    plan = precision_plan(precision)
    models = [
        load_model(tmp_path / "made", LingBotOptions(), plan, torch.device(device), lambda *_: None)
        for device in ("cpu", "cuda")
    ]
    for part in ("transformer", "vae"):
        expected, got = (getattr(model, part).state_dict() for model in models)
        assert {tensor.device.type for tensor in got.values()} == {"cuda"}
        assert [name for name, tensor in expected.items() if not torch.equal(got[name].cpu(), tensor)] == []


def test_random_weights_do_not_depend_on_the_device() -> None:
    cpu, cuda = (RandomWeights(seed=3, device=device) for device in ("cpu", "cuda"))
    for dtype in (torch.float32, torch.bfloat16):
        got = cuda.tensor("a.weight", (300, 500), dtype)
        assert torch.equal(got.cpu(), cpu.tensor("a.weight", (300, 500), dtype))
