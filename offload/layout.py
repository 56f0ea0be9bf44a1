"""Where the tensors of one part of a layer lie in one flat piece of memory.

    | qkv.weight        | qkv.bias | pad | output.weight | ...      every tensor starts at a multiple of ALIGNMENT

A *part* of a layer is what one loop of the model uses of it. All layers of a model have equal parts, so that one
layout, and one pair of device buffers, serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes at which a tensor starts: what torch's own allocations on a device give their kernels is 512, what kernels ask
for is 16, and every large weight of a published model is a multiple of 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, type and shape of one tensor as the model computes with it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        """Describe a tensor, which may be on the meta device."""
        return cls(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor and the byte at which it starts."""

    tensor: TensorSpec
    start_byte: int

    @property
    def end_byte(self) -> int:
        return self.start_byte + self.tensor.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """The places of a part's tensors, ascending. `num_bytes` is the size of the flat memory."""

    places: tuple[Place, ...]
    num_bytes: int

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return every tensor as a view of flat memory, uint8 [num_bytes]."""
        if flat.dtype != torch.uint8 or flat.numel() != self.num_bytes:
            raise ValueError(f"flat: expected {self.num_bytes} bytes, got {flat.numel()} of {flat.dtype}")
        return {
            place.tensor.name: flat[place.start_byte : place.end_byte].view(place.tensor.dtype).view(place.tensor.shape)
            for place in self.places
        }

    def fill(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors to their places. Raises ValueError for one that is missing, misshaped or of another type."""
        for name, view in self.views(flat).items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != view.shape or tensor.dtype != view.dtype:
                found = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name}: expected {view.dtype} {list(view.shape)}, got {found}")
            view.copy_(tensor)


def flat_layout(tensors: Sequence[TensorSpec]) -> FlatLayout:
    """Place tensors one after the other. Raises ValueError for none, and for names that are not unique."""
    names = [tensor.name for tensor in tensors]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"tensors: expected at least one, with names of their own, got {names}")
    places = []
    start_byte = 0
    for tensor in tensors:
        places.append(Place(tensor=tensor, start_byte=start_byte))
        start_byte = -(-(start_byte + tensor.num_bytes) // ALIGNMENT) * ALIGNMENT
    return FlatLayout(places=tuple(places), num_bytes=start_byte)
