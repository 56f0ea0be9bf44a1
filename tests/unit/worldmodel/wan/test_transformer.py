"""The base of both transformers: number formats of a plan, and the modulation of a timestep against the formula."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from worldmodel.wan.layers import PATCH, AttentionProjections
from worldmodel.wan.precision import precision_plan
from worldmodel.wan.transformer import Head, WanLayer, WanTransformer, text_projection, time_networks

WIDTH, CHANNELS, FREQ, EPS = 16, 4, 8, 1e-6


@dataclass(frozen=True)
class Sizes:
    head_dim: int = 8
    freq_dim: int = FREQ


class Network(WanTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.config = Sizes()
        self.patch_embedding = nn.Conv3d(CHANNELS, WIDTH, (1, PATCH, PATCH), (1, PATCH, PATCH))
        self.text_embedding = text_projection(6, WIDTH)
        self.time_embedding, self.time_projection = time_networks(FREQ, WIDTH)
        cross = [AttentionProjections(WIDTH, 2, EPS) for _ in range(2)]
        self.layers = [WanLayer(each, width=WIDTH, num_heads=2, ffn_dim=24, eps=EPS) for each in cross]
        self.blocks = nn.ModuleList(self.layers)
        self.head = Head(width=WIDTH, out_channels=CHANNELS, eps=EPS)


@pytest.fixture
def network() -> Network:
    torch.manual_seed(3)
    made = Network()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def test_a_plan_keeps_statistics_time_and_head_in_float32(network: Network) -> None:
    plan = precision_plan("bf16")
    network.apply_precision(plan)
    dtypes = {name: parameter.dtype for name, parameter in network.named_parameters()}
    exact = ("time_", "head.", "norm3.", "modulation")
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if any(part in name for part in exact) else torch.bfloat16), name
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert all(layer.plan is plan for layer in network.layers)


@torch.no_grad()
def test_the_constants_of_a_timestep_follow_the_formula(network: Network) -> None:
    timestep = 937.5
    angles = [timestep * 10000.0 ** (-2 * index / FREQ) for index in range(FREQ // 2)]
    features = torch.tensor([math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles])
    embedding_D = network.time_embedding(features)
    rows_6D = network.time_projection(embedding_D).view(6, WIDTH)
    found = network.time_constants(timestep)
    for layer, constants in zip(network.layers, found.layers, strict=True):
        want = layer.modulation[0] + rows_6D
        got = [constants.attention_shift, constants.attention_scale - 1, constants.attention_gate]
        got += [constants.feed_forward_shift, constants.feed_forward_scale - 1, constants.feed_forward_gate]
        torch.testing.assert_close(torch.stack(got), want, atol=1e-6, rtol=0)
    head = torch.stack([found.head_shift, found.head_scale - 1])
    torch.testing.assert_close(head, network.head.modulation[0] + embedding_D, atol=1e-6, rtol=0)


@torch.no_grad()
def test_patches_are_projected_as_the_convolution_does(network: Network) -> None:
    x_CFYX = torch.randn(CHANNELS, 2, 4, 6)
    split = x_CFYX.view(CHANNELS, 2, 2, PATCH, 3, PATCH).permute(1, 2, 4, 0, 3, 5)
    got = network.project_patches(split.reshape(-1, CHANNELS * PATCH * PATCH))
    want = network.patch_embedding(x_CFYX[None])[0].flatten(1).t()
    torch.testing.assert_close(got, want)


def test_a_rotary_table_is_made_once_for_a_size(network: Network) -> None:
    assert network.rope_table(4, 6) is network.rope_table(4, 6)
    assert network.rope_table(4, 6) is not network.rope_table(6, 4)
