"""The temporal memory of a VAE stream: immutable values that a session owns, and the cursor that layers read by.

A causal layer needs the last frames of its own earlier input. Those frames are one tensor per layer, in execution
order, and all of them together are a `VAECache`. Missing history is zeros, so every tensor has its final shape from the
first call on. Caches are values: a call reads one and returns the next one, so dropping the new one undoes the call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VAECache:
    """History of one encoder or decoder stream: a tensor [batch, frames, height, width, channels] per causal layer.

    Tensors own their storage and are never written after construction; caches of successive calls share nothing.
    """

    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def equals(self, other: VAECache) -> bool:
        """Tell whether both caches hold the same bits (NaN equals itself, 0.0 does not equal -0.0).

        Waits for the device once.
        """
        if len(self.tensors) != len(other.tensors):
            return False
        pairs = list(zip(self.tensors, other.tensors, strict=True))
        if any(a.shape != b.shape or a.dtype != b.dtype or a.device != b.device for a, b in pairs):
            return False
        if not pairs:
            return True
        return bool(torch.stack([(_bits(a) == _bits(b)).all() for a, b in pairs]).all())


class CacheCursor:
    """Hand each causal layer its history in execution order and collect what it wants to remember.

    One cursor serves one pass through one network. It holds a history no longer than until that is taken.
    """

    def __init__(self, cache: VAECache | None) -> None:
        self.is_stream_start = cache is None
        self._old: deque[Tensor] = deque(() if cache is None else cache.tensors)
        self._new: list[Tensor] = []

    def take(self, frames_BTHWC: Tensor, num_frames: int) -> Tensor:
        """Return the calling layer's history of `num_frames` frames, zeros at the start of a stream."""
        batch, _, height, width, channels = frames_BTHWC.shape
        shape = (batch, num_frames, height, width, channels)
        if self.is_stream_start:
            return frames_BTHWC.new_zeros(shape)
        history_BTHWC = self._old.popleft() if self._old else None
        if history_BTHWC is None or history_BTHWC.shape != shape:
            found = "nothing" if history_BTHWC is None else str(tuple(history_BTHWC.shape))
            raise ValueError(
                f"VAE cache of another model or size: layer {len(self._new)} expected {shape}, found {found}"
            )
        return history_BTHWC

    def keep(self, tail_BTHWC: Tensor) -> None:
        """Remember a copy of `tail_BTHWC` as the calling layer's next history.

        A copy, because a view would keep the whole activation alive for as long as the session lives.
        """
        self._new.append(tail_BTHWC.clone(memory_format=torch.contiguous_format))

    def finish(self) -> VAECache:
        """Return the cache after this pass."""
        if self._old:
            raise ValueError(f"VAE cache of another model: it has more than {len(self._new)} layers")
        return VAECache(tensors=tuple(self._new))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
