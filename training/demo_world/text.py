"""The text encoder for many prompts at once, with gradients; the parameters are those of the served `UMT5Encoder`.

Shape suffixes: Q prompts, L tokens, C text width, H heads, K head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from worldmodel.wan.umt5 import UMT5Encoder


def initialise(encoder: UMT5Encoder) -> None:
    """Give the encoder first weights: norms at one, every linear at the spread of its inputs."""
    for name, parameter in encoder.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
        elif "relative_attention_bias" in name or "shared" in name:
            nn.init.normal_(parameter, std=1.0 if "shared" in name else 0.1)
        else:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def one_hot(numbers: Tensor, count: int) -> Tensor:
    """Return float32 [..., count]. A product with it looks rows up with a gradient that needs no sorting."""
    return (numbers[..., None] == torch.arange(count, device=numbers.device)).float()


def encode_prompts(encoder: UMT5Encoder, ids_QL: Tensor, mask_QL: Tensor, distances: Tensor) -> Tensor:
    """Return rows [Q, L, C], zero where `mask_QL` is False. Float32, also under autocast.

    `distances` are the `distance_buckets` of the rows, one-hot.
    """
    with torch.autocast(ids_QL.device.type, enabled=False):
        hidden = torch.zeros_like(mask_QL, dtype=torch.float32).masked_fill(~mask_QL, -math.inf)[:, None, None]
        h_QLC = one_hot(ids_QL, encoder.config.vocab_size) @ encoder.shared.weight
        for layer in encoder.layers:
            attention, feed_forward = layer.steps
            projections = attention.SelfAttention
            a_QLC = attention.layer_norm(h_QLC)
            q, k, v = (
                linear(a_QLC).unflatten(-1, (projections.num_heads, -1)).transpose(1, 2)
                for linear in (projections.q, projections.k, projections.v)
            )
            bias_HLL = (distances @ projections.relative_attention_bias.weight).permute(2, 0, 1)
            weights_QHLL = torch.softmax(q @ k.mT + bias_HLL + hidden, dim=-1)
            h_QLC = h_QLC + projections.o((weights_QHLL @ v).transpose(1, 2).flatten(2))
            h_QLC = h_QLC + feed_forward.DenseReluDense(feed_forward.layer_norm(h_QLC))
        return encoder.finish(h_QLC) * mask_QL[..., None]
