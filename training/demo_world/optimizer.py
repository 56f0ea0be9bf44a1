"""Muon for the matrices of the layers, AdamW for everything else, and a moving average of all of them.

Muon: momentum made orthogonal by five Newton-Schulz steps (Jordan et al., 2024, "Muon: an optimizer for hidden layers
in neural networks"), scaled by 0.2 * sqrt(larger side) so that one learning rate fits both optimisers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

WEIGHT_DECAY = 0.01
MOMENTUM = 0.95
ADAM_SHARE = 0.75
"""AdamW's learning rate over Muon's."""


def orthogonalize(matrices_NIO: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices, roughly: singular values end between 0.7 and 1.2."""
    x = matrices_NIO.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Optimizer:
    """Steps named parameters: Muon takes the two-dimensional ones under `layer_prefix`, AdamW the rest."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, layer_prefix: str, ema_decay: float = 0.998) -> None:
        self.parameters = dict(parameters)
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.ema_decay = ema_decay
        self.num_steps = 0
        muon = {n: p for n, p in self.parameters.items() if n.startswith(layer_prefix) and p.dim() == 2}
        self._by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in muon.values():
            self._by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        self._momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self._by_shape.items()
        }
        others = [p for n, p in self.parameters.items() if n not in muon]
        fused = others[0].is_cuda
        self._adam = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=fused)

    def step(self, learning_rate: float) -> None:
        """Clip the gradient's norm to 1, step, update the average and drop the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate * ADAM_SHARE
        self._adam.step()
        self._muon_step(learning_rate)
        for parameter in self.parameters.values():
            parameter.grad = None
        self.num_steps += 1
        decay = min(self.ema_decay, 1 - 1 / (self.num_steps + 1))
        with torch.no_grad():
            averages = [self.average[name] for name in self.parameters]
            torch._foreach_lerp_(averages, [p.detach() for p in self.parameters.values()], 1 - decay)

    @torch.no_grad()
    def _muon_step(self, learning_rate: float) -> None:
        for shape, group in self._by_shape.items():
            gradients = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            momentum = self._momentum[shape].lerp_(gradients, 1 - MOMENTUM)
            update = orthogonalize(gradients.lerp(momentum, MOMENTUM)) * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(group, 1 - learning_rate * WEIGHT_DECAY)
            torch._foreach_add_(group, list(update.unbind(0)), alpha=-learning_rate)

    def swap_average(self) -> None:
        """Exchange weights and averages; twice is as before."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                current = parameter.detach().clone()
                parameter.copy_(self.average[name])
                self.average[name].copy_(current)
