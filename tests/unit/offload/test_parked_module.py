"""Weights that wait on the host between uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.parked_module import ParkedModule

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 1)).requires_grad_(False).eval()
    made[0].weight.data = made[0].weight.data.contiguous(memory_format=torch.channels_last)
    return made


@pytest.mark.parametrize("is_inference", [False, True])
def test_every_use_computes_what_the_module_computed(is_inference: bool) -> None:
    module, image = net(), torch.randn(1, 3, 8, 8)
    expected = module(image)
    order = module[0].weight.stride()

    parked = ParkedModule(module, CPU)

    with torch.inference_mode(is_inference):
        for _ in range(3):
            with parked.on_device():
                assert torch.equal(module(image), expected)
                assert module[0].weight.stride() == order


def test_between_uses_the_weights_are_those_of_the_host() -> None:
    module = net()
    parked = ParkedModule(module, CPU)
    before = module[0].weight.data_ptr()
    with parked.on_device():
        inside = module[0].weight.data_ptr()
        assert inside != before
    assert module[0].weight.data_ptr() == before
    with pytest.raises(RuntimeError, match="fell"), parked.on_device():
        raise RuntimeError("fell")
    assert module[0].weight.data_ptr() == before
    assert parked.num_bytes >= sum(tensor.nbytes for tensor in module.state_dict().values())


def test_a_tensor_with_gaps_is_refused() -> None:
    module = nn.Linear(4, 4)
    module.weight.data = torch.zeros(4, 8)[:, :4]
    with pytest.raises(ValueError, match="weight: expected a tensor without gaps"):
        ParkedModule(module, CPU)
