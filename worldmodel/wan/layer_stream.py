"""Layers whose weights stay on the host and visit the device one after the other.

    host    | layer 0 | layer 1 | layer 2 | ...      one flat tensor each, page-locked for CUDA
               |copy     |copy while layer 0 computes
    device  | slot 0  | slot 1  |                    two copies of the structure, used in turn

The layer loop asks for the next layer and gets a module that is ready to run: nothing else of the model changes. The
slots exist while a loop runs: who streams a text encoder needs their memory for pictures the rest of the time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from offload.cuda_runtime import CudaHostRuntime
from offload.errors import OffloadError
from offload.host_registration import HostRegistration, RegistrationLimits, register_pages
from offload.host_weights import HostPiece
from offload.mapped_memory import MappedMemory
from worldmodel.errors import LoadFailed

LayerT = TypeVar("LayerT", bound=nn.Module)

NUM_SLOTS = 2
ALIGNMENT = 64
"""Elements at which a parameter starts in a flat tensor: kernels want addresses of 16 bytes or more."""


class _Slot(Generic[LayerT]):
    """One layer's structure on the device, over one flat tensor."""

    def __init__(self, layer: LayerT, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = layer
        self.flat = torch.empty(num_elements, dtype=dtype, device=device)
        _use_views(layer, self.flat)
        is_cuda = device.type == "cuda"
        self.copied = torch.cuda.Event() if is_cuda else None
        self.used = torch.cuda.Event() if is_cuda else None


class LayerStream(Generic[LayerT]):
    """Iterate over layers that are equal in structure, each on the device when it comes.

    Takes the layers' host memory over: their parameters become views of it, in whole pages. `make_layer` returns a
    layer without weights. `runtime` page-locks the host memory of all layers, None leaves it as it is. What an
    iteration yields is overwritten two steps later.

    Raises `LoadFailed` if the memory can't be locked; none of it is then.
    """

    def __init__(
        self,
        layers: Sequence[LayerT],
        make_layer: Callable[[], LayerT],
        device: torch.device,
        runtime: CudaHostRuntime | None = None,
    ) -> None:
        self._device = device
        flattened = [_flatten(layer) for layer in layers]
        self._host = [flat for flat, _ in flattened]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if runtime is not None:
            registration = _lock([memory for _, memory in flattened], runtime)
            # Unlocked before the memory is freed: the finalizer holds it until then.
            weakref.finalize(self, _unlock, registration, self._stream)
        self._make_layer = make_layer

    def __len__(self) -> int:
        return len(self._host)

    @property
    def host_bytes(self) -> int:
        """Bytes of the layers' host memory."""
        return sum(flat.nbytes for flat in self._host)

    def __iter__(self) -> Iterator[LayerT]:
        first = self._host[0]
        slots = [_Slot(self._make_layer(), first.numel(), first.dtype, self._device) for _ in range(NUM_SLOTS)]
        if self._stream is not None:
            # The slots' memory may be another tensor's that kernels in flight still use.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            self._start_copy(0, slots)
            for index in range(len(self)):
                if index + 1 < len(self):
                    self._start_copy(index + 1, slots)
                slot = slots[index % NUM_SLOTS]
                if slot.copied is not None:
                    torch.cuda.current_stream(self._device).wait_event(slot.copied)
                yield slot.layer
                if slot.used is not None:
                    slot.used.record(torch.cuda.current_stream(self._device))
        finally:
            if self._stream is not None:
                # After this the memory is given back, also where somebody stopped in the middle.
                torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _start_copy(self, index: int, slots: Sequence[_Slot[LayerT]]) -> None:
        slot = slots[index % NUM_SLOTS]
        if self._stream is None or slot.used is None or slot.copied is None:
            slot.flat.copy_(self._host[index])
            return
        self._stream.wait_event(slot.used)
        with torch.cuda.stream(self._stream):
            slot.flat.copy_(self._host[index], non_blocking=True)
            slot.copied.record(self._stream)


def _places(layer: nn.Module) -> list[tuple[nn.Parameter, int]]:
    """List the parameters with their places in a flat tensor, and the end of it as the last place plus its length."""
    places, start = [], 0
    for parameter in layer.parameters():
        places.append((parameter, start))
        start += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    return places


def _flatten(layer: nn.Module) -> tuple[Tensor, MappedMemory]:
    """Move a layer's parameters into one tensor, and make them views of it; return it and the memory it is."""
    places = _places(layer)
    last, start = places[-1]
    memory = MappedMemory.own((start + last.numel()) * last.dtype.itemsize)
    flat = memory.bytes.view(last.dtype)
    for parameter, start in places:
        flat[start : start + parameter.numel()].copy_(parameter.detach().view(-1))
    _use_views(layer, flat)
    return flat, memory


def _use_views(layer: nn.Module, flat: Tensor) -> None:
    for parameter, start in _places(layer):
        view = flat[start : start + parameter.numel()].view(parameter.shape)
        _set_parameter(layer, parameter, nn.Parameter(view, requires_grad=False))


def _set_parameter(layer: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter is old:
                setattr(module, name, new)


def _lock(memories: Sequence[MappedMemory], runtime: CudaHostRuntime) -> HostRegistration:
    """Page-lock memory in place; torch's own pinned allocations would be rounded up to a power of two."""
    pieces = [
        HostPiece(memory=memory, start_byte=0, num_bytes=memory.num_bytes, buffer_start_byte=0) for memory in memories
    ]
    try:
        return register_pages(runtime, pieces, RegistrationLimits())
    except OffloadError as error:
        raise LoadFailed(
            f"text_encoder = 'streamed': {error}; choose 'cpu' or 'resident' where memory can't be locked",
            field="text_encoder",
        ) from error


def _unlock(registration: HostRegistration, stream: torch.cuda.Stream | None) -> None:
    """Unlock the memory once nothing is copied from it any more."""
    if stream is not None:
        stream.synchronize()
    registration.close()
