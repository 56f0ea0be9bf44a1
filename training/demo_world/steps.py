"""One training step: the loss, its gradients, their mean over processes, the optimiser.

On a GPU the two halves are captured as graphs once the first steps have compiled and warmed everything up; a step is
then two launches, and the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as distributed
from torch import Tensor

from training.demo_world.batches import Batch
from training.demo_world.optimizer import Optimizer

_EAGER_STEPS = 3
"""Steps before the capture; the work that only a first step does is over by then."""


class Stepper:
    """Runs steps of `loss_of`, which returns the loss and numbers to watch, each a scalar on the device."""

    def __init__(
        self, loss_of: Callable[[Batch], tuple[Tensor, Tensor]], optimizer: Optimizer, *, uses_graphs: bool
    ) -> None:
        self._loss_of, self._optimizer = loss_of, optimizer
        self._batch: Batch | None = None
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self._watched = torch.zeros(())
        self._side = torch.cuda.Stream() if uses_graphs else None

    @property
    def is_captured(self) -> bool:
        return self._graphs is not None

    def step(self, batch: Batch, learning_rate: float) -> Tensor:
        """Learn from a batch; batches have one shape. Returns the numbers to watch, overwritten by the next step."""
        self._optimizer.set_rate(learning_rate)
        if self._side is None:
            self._watched = self._gradients(batch)
            self._average_gradients()
            self._optimizer.apply()
            return self._watched
        if self._batch is None:
            self._batch = batch
        for target, source in zip(self._batch.tensors(), batch.tensors(), strict=True):
            if target is not source:
                target.copy_(source)
        if self._graphs is None and self._optimizer.num_steps > _EAGER_STEPS:
            self._capture(self._batch)
        if self._graphs is None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._watched = self._gradients(self._batch)
            torch.cuda.current_stream().wait_stream(self._side)
            self._average_gradients()
            self._optimizer.apply()
            return self._watched
        gradients, apply = self._graphs
        gradients.replay()
        self._average_gradients()
        apply.replay()
        return self._watched

    def _gradients(self, batch: Batch) -> Tensor:
        self._optimizer.gradients.zero_()
        loss, watched = self._loss_of(batch)
        loss.backward()
        return watched.detach()

    def _average_gradients(self) -> None:
        if distributed.is_initialized():
            distributed.all_reduce(self._optimizer.gradients)
            self._optimizer.gradients.div_(distributed.get_world_size())

    def _capture(self, batch: Batch) -> None:
        """Record both halves; recording computes nothing."""
        torch.cuda.synchronize()
        graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        # The threads of NCCL ask for events meanwhile, which only this mode allows.
        with torch.cuda.graph(graphs[0], capture_error_mode="thread_local"):
            self._watched = self._gradients(batch)
        with torch.cuda.graph(graphs[1], capture_error_mode="thread_local"):
            self._optimizer.apply()
        self._graphs = graphs
