"""Whether what a model has made is finite, asked on its device and answered without a wait of its own."""

from __future__ import annotations

import torch
from torch import Tensor


class FiniteCheck:
    """Look for NaN and infinity in the outputs of one chunk, before pixels are clamped and rounded.

    On CUDA the answers are one small copy behind the work that made the outputs. `not_finite` waits for that copy,
    which costs nothing where the caller has waited for later work already.
    """

    def __init__(self, **outputs: Tensor | None) -> None:
        """Queue the question for each output by its name for people; None is an output that was not made."""
        given = {name: output for name, output in outputs.items() if output is not None}
        self._names = tuple(given)
        flags = torch.stack([torch.isfinite(output).all() for output in given.values()])
        self._copied: torch.cuda.Event | None = None
        if not flags.is_cuda:
            self._flags = flags
            return
        self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        self._flags.copy_(flags, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(flags.device))

    def not_finite(self) -> tuple[str, ...]:
        """Name the outputs that hold a NaN or an infinity."""
        if self._copied is not None:
            self._copied.synchronize()
        return tuple(name for name, is_finite in zip(self._names, self._flags.tolist(), strict=True) if not is_finite)
