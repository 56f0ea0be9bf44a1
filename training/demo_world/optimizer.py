"""Muon for the matrices of the layers, AdamW for everything else, and a moving average of all of them.

Weights, gradients and averages are one flat tensor each, of which the parameters become views: a step is a few large
operations, never waits for the device, and gradients of several processes are averaged in one call.

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
ADAM_BETAS = (0.9, 0.98)
ADAM_EPSILON = 1e-8
MAX_GRADIENT_NORM = 1.0

_ALIGNMENT = 64
"""Elements to which every parameter's place is aligned."""


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
    """Steps named parameters: Muon takes the two-dimensional ones under `layer_prefix`, AdamW the rest.

    The parameters' memory is replaced; whoever fills them later must do so in place.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, layer_prefix: str, ema_decay: float = 0.998) -> None:
        muon = {n: p for n, p in parameters.items() if n.startswith(layer_prefix) and p.dim() == 2}
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in muon.values():
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        others = [p for n, p in parameters.items() if n not in muon]
        ordered = [p for group in by_shape.values() for p in group] + others
        starts = [0]
        for parameter in ordered:
            # Matrices of one shape must follow each other without gaps, or they are no batch.
            size = parameter.numel()
            if parameter.dim() == 2 and any(parameter is p for p in muon.values()):
                starts.append(starts[-1] + size)
            else:
                starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        device = ordered[0].device
        self.weights, self.gradients, self.average = (torch.zeros(starts[-1], device=device) for _ in range(3))
        for parameter, start in zip(ordered, starts[:-1], strict=True):
            place = slice(start, start + parameter.numel())
            self.weights[place] = parameter.detach().flatten()
            parameter.data = self.weights[place].view(parameter.shape)
            parameter.grad = self.gradients[place].view(parameter.shape)
        self.average.copy_(self.weights)
        self._groups: list[tuple[slice, tuple[int, ...]]] = []
        start = 0
        for shape, group in by_shape.items():
            size = len(group) * group[0].numel()
            self._groups.append((slice(start, start + size), (len(group), *shape)))
            start += size
        self._adam = slice(start, starts[-1])
        self._momentum = torch.zeros(start, device=device)
        self._first, self._second = (torch.zeros(starts[-1] - start, device=device) for _ in range(2))
        self._count = torch.zeros((), device=device)
        self._learning_rate, self._toward = torch.zeros((), device=device), torch.zeros((), device=device)
        self.ema_decay = ema_decay
        self.num_steps = 0

    def set_rate(self, learning_rate: float) -> None:
        """Set the next step's learning rate; the average follows faster while it is young."""
        decay = min(self.ema_decay, 1 - 1 / (self.num_steps + 2))
        self._learning_rate.fill_(learning_rate)
        self._toward.fill_(1 - decay)
        self.num_steps += 1

    @torch.no_grad()
    def apply(self) -> None:
        """Clip the gradient's norm, step and update the average; nothing here waits for the device."""
        self.gradients.mul_((MAX_GRADIENT_NORM / (self.gradients.norm() + 1e-6)).clamp(max=1.0))
        self._adam_step()
        for place, shape in self._groups:
            gradients = self.gradients[place].view(shape)
            momentum = self._momentum[place].view(shape).lerp_(gradients, 1 - MOMENTUM)
            update = orthogonalize(gradients.lerp(momentum, MOMENTUM)) * (0.2 * max(shape[1:]) ** 0.5)
            weights = self.weights[place].view(shape)
            weights.mul_(1 - self._learning_rate * WEIGHT_DECAY)
            weights.sub_(update * self._learning_rate)
        self.average.lerp_(self.weights, self._toward)

    def _adam_step(self) -> None:
        gradients, weights, rate = (
            self.gradients[self._adam],
            self.weights[self._adam],
            self._learning_rate * ADAM_SHARE,
        )
        self._count.add_(1)
        self._first.lerp_(gradients, 1 - ADAM_BETAS[0])
        self._second.lerp_(gradients.square(), 1 - ADAM_BETAS[1])
        first = self._first / (1 - torch.pow(ADAM_BETAS[0], self._count))
        second = self._second / (1 - torch.pow(ADAM_BETAS[1], self._count))
        weights.mul_(1 - rate * WEIGHT_DECAY)
        weights.sub_(rate * first / (second.sqrt() + ADAM_EPSILON))

    def swap_average(self) -> None:
        """Exchange weights and averages; twice is as before."""
        with torch.no_grad():
            current = self.weights.clone()
            self.weights.copy_(self.average)
            self.average.copy_(current)
