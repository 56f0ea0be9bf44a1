"""A module whose weights wait on the host between uses, and are on the device while somebody works with them.

For modules that are small beside the link's speed and used once in a while, as a whole: nothing is overlapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.layout import ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parked:
    """One parameter or buffer: its place in the flat memory, and its shape and order there."""

    tensor: Tensor
    start_byte: int
    num_bytes: int
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        data = flat[self.start_byte : self.start_byte + self.num_bytes].view(self.tensor.dtype)
        return data.as_strided(self.tensor.shape, self.stride)


class ParkedModule:
    """Takes the module's weights to the host; they keep their order in memory. Build it after the last change of them.

    Raises ValueError for a tensor that has gaps. Copies run at the speed of the link: the host memory is page-locked.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parked = list(_places(module))
        last = self._parked[-1]
        num_bytes = last.start_byte + last.num_bytes
        with torch.inference_mode(False):
            self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for parked in self._parked:
            parked.view(self._host).copy_(parked.tensor)
        self._bind(self._host)

    @property
    def num_bytes(self) -> int:
        return self._host.nbytes

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights on the device inside `with`; their memory there is given back after it."""
        flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        flat.copy_(self._host, non_blocking=True)
        self._bind(flat)
        try:
            yield
        finally:
            self._bind(self._host)

    def _bind(self, flat: Tensor) -> None:
        for parked in self._parked:
            parked.tensor.data = parked.view(flat)


def _places(module: nn.Module) -> Iterator[_Parked]:
    start_byte = 0
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if last + 1 != tensor.numel():
            raise ValueError(f"{name}: expected a tensor without gaps, got strides {tensor.stride()}")
        yield _Parked(tensor=tensor, start_byte=start_byte, num_bytes=tensor.nbytes, stride=tensor.stride())
        start_byte = -(-(start_byte + tensor.nbytes) // ALIGNMENT) * ALIGNMENT
