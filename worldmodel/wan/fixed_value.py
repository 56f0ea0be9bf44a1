"""Values that are trees of tensors, and copies of them at fixed addresses, for launches that read the same memory.

A value is a tensor, a tuple or a dataclass of values, or anything else, which is taken as it is; a list, dict or set is
refused, since tensors in it would stay the caller's own. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

ValueT = TypeVar("ValueT")

ALIGNMENT_BYTES = 256
"""Distance of tensors in one piece of memory: vector loads see the alignment that the allocator gives."""


def map_tensors(value: ValueT, change: Callable[[Tensor], Tensor]) -> ValueT:
    """Return a value with each of its tensors changed. What occurs in it twice is changed once and stays one object."""
    return _map(value, change, {})


def _map(value: Any, change: Callable[[Tensor], Tensor], known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    made: Any
    if isinstance(value, Tensor):
        made = change(value)
    elif isinstance(value, tuple):
        made = tuple(_map(each, change, known) for each in value)
    elif is_dataclass(value) and not isinstance(value, type):
        made = replace(value, **{each.name: _map(getattr(value, each.name), change, known) for each in fields(value)})
    elif isinstance(value, (list, dict, set)):
        raise TypeError(f"expected a tensor, a tuple or a dataclass of values, got a {type(value).__name__}")
    else:
        return value
    known[id(value)] = made
    return made


def tensors_of(value: object) -> list[Tensor]:
    """Return the tensors of a value in order, each once."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def allocate_alike(example: ValueT, device: torch.device) -> tuple[ValueT, Tensor]:
    """Return a value of the same make, filled with zeros, and the one piece of memory (uint8) that its tensors lie in.

    `example` may be on the meta device.
    """
    sizes_bytes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors_of(example)]
    memory = torch.zeros(sum(sizes_bytes), dtype=torch.uint8, device=device)
    pieces = iter(memory.split(sizes_bytes))

    def place(tensor: Tensor) -> Tensor:
        return next(pieces)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return map_tensors(example, place), memory


class FixedValue(Generic[ValueT]):
    """A copy of a value whose tensors stay where they are; `load` replaces what they hold.

    All of them lie in one piece of memory, so that a constant of the model, once packed alike, is loaded in one copy.
    """

    def __init__(self, example: ValueT) -> None:
        tensors = tensors_of(example)
        device = tensors[0].device if tensors else torch.device("cpu")
        self.value, self._memory = allocate_alike(example, device)
        self._tensors = tensors_of(self.value)
        self._packed: dict[int, tuple[ValueT, Tensor]] = {}
        self.load(example)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device, packed constants included."""
        return self._memory.nbytes + sum(packed.nbytes for _, packed in self._packed.values())

    def load(self, value: ValueT) -> None:
        """Copy the tensors of a value to their places. Raises ValueError for one of another make."""
        tensors = tensors_of(value)
        if len(tensors) != len(self._tensors):
            raise ValueError(f"expected a value of {len(self._tensors)} tensors, got {len(tensors)}")
        for index, (place, tensor) in enumerate(zip(self._tensors, tensors, strict=True)):
            if place.shape != tensor.shape or place.dtype != tensor.dtype:
                raise ValueError(
                    f"tensor {index}: expected {place.dtype} {tuple(place.shape)}, got {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
        for place, tensor in zip(self._tensors, tensors, strict=True):
            place.copy_(tensor)

    def load_constant(self, value: ValueT) -> None:
        """Do the same with a value that never changes and comes again: it is kept, packed, from its first time on."""
        known = self._packed.get(id(value))
        if known is not None:
            self._memory.copy_(known[1])
            return
        self.load(value)
        # The value is kept too, so that no other one can have its id.
        self._packed[id(value)] = (value, self._memory.clone())
