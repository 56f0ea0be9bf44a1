"""One flat step of Muon and AdamW."""

from __future__ import annotations

import torch
from torch import nn

from training.demo_world.optimizer import ADAM_BETAS, ADAM_SHARE, WEIGHT_DECAY, Optimizer, orthogonalize

RATE = 3e-3


def _parameters() -> dict[str, nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    shapes = {"rest.bias": (5,), "blocks.a": (8, 8), "blocks.wide": (8, 24), "rest.matrix": (6, 3), "blocks.b": (8, 8)}
    return {name: nn.Parameter(torch.randn(shape, generator=rng)) for name, shape in shapes.items()}


def _step(parameters: dict[str, nn.Parameter], optimizer: Optimizer, gradients: dict[str, torch.Tensor]) -> None:
    optimizer.gradients.zero_()
    sum((parameters[name] * gradient).sum() for name, gradient in gradients.items()).backward()
    optimizer.set_rate(RATE)
    optimizer.apply()


def test_vectors_and_outer_matrices_step_as_with_adamw() -> None:
    parameters = _parameters()
    twins = [nn.Parameter(parameters[name].detach().clone()) for name in ("rest.bias", "rest.matrix")]
    adam = torch.optim.AdamW(twins, lr=RATE * ADAM_SHARE, betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY)
    optimizer = Optimizer(parameters, layer_prefix="blocks")
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed + 1)
        gradients = {n: 0.01 * torch.randn(p.shape, generator=rng) for n, p in parameters.items()}
        _step(parameters, optimizer, gradients)
        for twin, name in zip(twins, ("rest.bias", "rest.matrix"), strict=True):
            twin.grad = gradients[name]
        adam.step()
    torch.testing.assert_close(parameters["rest.bias"], twins[0])
    torch.testing.assert_close(parameters["rest.matrix"], twins[1])


def test_matrices_of_layers_step_along_the_orthogonalised_gradient() -> None:
    parameters = _parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = Optimizer(parameters, layer_prefix="blocks")
    gradients = {n: 0.01 * torch.randn(p.shape) for n, p in parameters.items()}
    _step(parameters, optimizer, gradients)
    for name in ("blocks.a", "blocks.b", "blocks.wide"):
        gradient = gradients[name]
        update = orthogonalize(gradient[None])[0] * 0.2 * max(gradient.shape) ** 0.5
        expected = before[name] * (1 - RATE * WEIGHT_DECAY) - RATE * update
        # Newton-Schulz runs in bfloat16, whose rounding depends on the gradient's clipped scale.
        torch.testing.assert_close(parameters[name], expected, atol=0.1 * RATE, rtol=0)
        assert (parameters[name] - before[name]).abs().max() > 0.3 * RATE


def test_a_large_gradient_is_clipped_and_the_average_swaps_in_and_out() -> None:
    parameters = _parameters()
    optimizer = Optimizer(parameters, layer_prefix="blocks")
    start = optimizer.weights.clone()
    _step(parameters, optimizer, {n: 100.0 * torch.ones_like(p) for n, p in parameters.items()})
    assert abs(optimizer.gradients.norm().item() - 1.0) < 1e-4
    torch.testing.assert_close(optimizer.average, (start + optimizer.weights) / 2)
    weights, average = optimizer.weights.clone(), optimizer.average.clone()
    optimizer.swap_average()
    assert torch.equal(optimizer.weights, average)
    assert parameters["rest.bias"].data_ptr() >= optimizer.weights.data_ptr()
    optimizer.swap_average()
    assert torch.equal(optimizer.weights, weights)


def test_orthogonal_matrices_have_singular_values_near_one() -> None:
    for shape in ((2, 16, 16), (2, 48, 16), (2, 16, 48)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(3))))
        assert values.min() > 0.3
        assert values.max() < 1.3
