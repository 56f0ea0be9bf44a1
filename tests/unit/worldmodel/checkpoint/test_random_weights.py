"""Random weights: the same for the same name and seed, of the right scale, and different everywhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.random_checkpoint import is_random, parse_random
from worldmodel.checkpoint.random_weights import PERIOD, RandomWeights, fill_random


@pytest.fixture(scope="module")
def weights() -> RandomWeights:
    return RandomWeights(seed=5, gains={"*.o.weight": 0.25, "*": 2.0})


def test_a_tensor_depends_on_name_and_seed_only(weights: RandomWeights) -> None:
    first = weights.tensor("a.weight", (8, 16), torch.float32)
    weights.tensor("b.weight", (3, 3), torch.float32)
    assert torch.equal(weights.tensor("a.weight", (8, 16), torch.float32), first)
    assert torch.equal(RandomWeights(seed=5, gains={"*": 2.0}).tensor("a.weight", (8, 16), torch.float32), first)
    assert not torch.equal(RandomWeights(seed=6, gains={"*": 2.0}).tensor("a.weight", (8, 16), torch.float32), first)
    assert not torch.equal(weights.tensor("b.weight", (8, 16), torch.float32), first)


def test_reduced_types_are_the_rounded_float32_values(weights: RandomWeights) -> None:
    exact = weights.tensor("a.weight", (64, 64), torch.float32)
    assert torch.equal(weights.tensor("a.weight", (64, 64), torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize(
    ("name", "shape", "mean", "spread"),
    [
        ("ffn.weight", (300, 400), 0.0, 2.0 / 20.0),
        ("attn.o.weight", (300, 400), 0.0, 0.25 / 20.0),
        ("conv.weight", (100, 50, 2, 2, 2), 0.0, 2.0 / 20.0),
        ("conv.bias", (50_000,), 0.0, 0.02),
        ("norm.weight", (50_000,), 1.0, 0.02),
        ("norm.gamma", (50_000, 1, 1, 1), 1.0, 0.02),
        ("of_categories.W", (1, 400, 300), 0.0, 2.0 / 20.0),
        ("of_categories.b", (1, 50_000), 0.0, 0.02),
    ],
)
def test_scale(weights: RandomWeights, name: str, shape: tuple[int, ...], mean: float, spread: float) -> None:
    tensor = weights.tensor(name, shape, torch.float32)
    assert float(tensor.mean()) == pytest.approx(mean, abs=0.05 * spread)
    assert float(tensor.std()) == pytest.approx(spread, rel=0.05)


def test_a_tensor_longer_than_the_sequence_goes_round_it(weights: RandomWeights) -> None:
    long = weights.tensor("long.bias", (PERIOD + 1000,), torch.bfloat16)
    assert torch.equal(long[:1000], long[PERIOD:])
    assert not torch.equal(long[:1000], long[1000:2000])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scale", torch.full((2,), 0.5), persistent=False)


def test_fill_replaces_everything_a_checkpoint_would(weights: RandomWeights) -> None:
    with torch.device("meta"):
        net = Net()
    net.scale = torch.full((2,), 0.5)
    seen: list[tuple[float, str]] = []
    fill_random(
        net,
        weights,
        dtype=torch.bfloat16,
        device="cpu",
        progress=lambda fraction, detail: seen.append((fraction, detail)),
    )
    assert torch.equal(net.first.weight, weights.tensor("first.weight", (4, 3), torch.bfloat16))
    assert net.tied.weight is net.first.weight
    assert net.steps.dtype == torch.int64
    assert torch.equal(net.scale, torch.full((2,), 0.5))
    assert seen[-1][0] == 1.0
    assert "MB/s" in seen[-1][1]


def test_fill_can_be_of_some_tensors_only(weights: RandomWeights) -> None:
    whole, parts = Net(), Net()
    fill_random(whole, weights, dtype=torch.float32, device="cpu")
    untouched = parts.steps
    for is_first in (True, False):
        fill_random(
            parts,
            weights,
            dtype=torch.float32,
            device="cpu",
            only=lambda name, is_first=is_first: name != "steps" and (name == "first.weight") == is_first,
        )
    assert torch.equal(parts.first.weight, whole.first.weight)
    assert torch.equal(parts.first.bias, whole.first.bias)
    assert parts.steps is untouched


def test_a_derived_buffer_on_the_meta_device_is_refused(weights: RandomWeights) -> None:
    with torch.device("meta"):
        net = Net()
    with pytest.raises(ValueError, match="meta device that no checkpoint stores: scale"):
        fill_random(net, weights, dtype=torch.float32, device="cpu")


def test_names_of_random_checkpoints() -> None:
    assert is_random("random:lingbot-world-v2")
    assert not is_random("/checkpoints/random")
    assert parse_random("random:model") == ("model", 0)
    assert parse_random("random:model:17") == ("model", 17)


@pytest.mark.parametrize("text", ["random:", "random:model:x", "random:model:-1", "random::3"])
def test_a_malformed_name_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="expected random:NAME or random:NAME:SEED"):
        parse_random(text)
