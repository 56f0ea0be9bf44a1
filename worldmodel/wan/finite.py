"""Whether what a model has made is finite, asked on its device and answered without a wait of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worldmodel.wan.precision import vae_precision_of
from worldmodel.wan.precision_names import VaePrecision

MADE_BY_VAE = frozenset({"condition", "observed latents", "pictures"})
"""Outputs that come straight out of a VAE."""


class FiniteCheck:
    """Look for NaN and infinity in the outputs of one chunk, before pixels are clamped and rounded.

    On CUDA the answers are one small copy behind the work that made the outputs. `not_finite` waits for that copy,
    which costs nothing where the caller has waited for later work already.
    """

    def __init__(self, outputs: Mapping[str, Tensor | None], *, vae: torch.dtype) -> None:
        """Queue the question for each output by its name for people; None is an output that was not made.

        Outputs are in the order of their making. `vae` is the VAE's number format.
        """
        given = {name: output for name, output in outputs.items() if output is not None}
        self._names = tuple(given)
        self._vae = vae_precision_of(vae)
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
        """Name the outputs that hold a NaN or an infinity; with the first one, what to change if its VAE is float16."""
        if self._copied is not None:
            self._copied.synchronize()
        found = [name for name, is_finite in zip(self._names, self._flags.tolist(), strict=True) if not is_finite]
        # Whatever follows from the first one says nothing of the VAE.
        if found and found[0] in MADE_BY_VAE and self._vae is VaePrecision.FLOAT16:
            found[0] += " (of a VAE in float16, which ends at 65504: set the option vae_precision to bfloat16)"
        return tuple(found)
