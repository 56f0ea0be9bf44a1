"""Layers whose weights visit the device one after the other. The layer loop asks for each of them, in plain sight:

    for index in range(num_layers):
        with weights.layer(index):
            h = run_layer(index, h)

A streamed layer owns no device memory. Its tensors are views of one of two buffers, always the same one, so that a
layer's addresses never change and the model's modules stay as they are; they hold the layer's numbers inside `with`.

    streamed layers   0     1     2     3   ...  n-1
    buffer            A     B     A     B         the copy of 0 for the next step begins when n-1 is under way
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from offload.copy_queue import CopyQueue
from offload.errors import RanksDisagree
from offload.host_weights import HostPart
from offload.layout import FlatLayout
from offload.residency import NUM_SLOTS
from offload.sharded import RankAgreement
from offload.transports import Transport


class LayerWeights(Protocol):
    """What a layer loop asks for the weights it is about to use."""

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Enter to have the layer's weights on the device; leave after the last operation with them was issued."""
        ...


class ResidentLayers:
    """Weights that are on the device all the time: there is nothing to do."""

    def layer(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()


RESIDENT = ResidentLayers()


class LayerStreamer:
    """One part of a model's layers, the streamed ones in `host` by index, the others resident.

    Host parts stay the caller's, who closes their memory after `close`. Not safe for several threads. Ranks that share
    weights out give an `agreement`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        host: Mapping[int, HostPart],
        transport: Transport,
        queue: CopyQueue,
        device: torch.device,
        agreement: RankAgreement | None = None,
    ) -> None:
        self._order = sorted(host)
        self._position = {index: position for position, index in enumerate(self._order)}
        self._host = host
        self._layout = layout
        self._transport = transport
        self._queue = queue
        self._agreement = agreement
        # Not made in inference mode: copies must be able to change them in any mode.
        with torch.inference_mode(False):
            self._buffers = [
                torch.zeros(transport.buffer_bytes(layout.num_bytes), dtype=torch.uint8, device=device)
                for _ in range(min(NUM_SLOTS, len(self._order)))
            ]
        self._holds: list[int | None] = [None] * len(self._buffers)

    @property
    def device_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of a streamed layer as views of its buffer, by name."""
        return self._layout.views(self._buffers[self._position[index] % NUM_SLOTS][: self._layout.num_bytes])

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Do what `LayerWeights` says. Raises `CopyFailed` or `RanksDisagree`."""
        position = self._position.get(index)
        if position is None:
            yield
            return
        if position == 0 and self._agreement is not None:
            self._agree(self._agreement)
        self._fetch(position)
        slot = position % NUM_SLOTS
        self._queue.wait_copied(slot)
        try:
            yield
        finally:
            self._queue.mark_used(slot)
        self._prefetch(position)

    def _prefetch(self, position: int) -> None:
        """Begin the copies of the layers after this one, the first ones of the next step included."""
        claimed: set[int] = set()
        for distance in range(1, self._transport.num_ahead + 1):
            coming = (position + distance) % len(self._order)
            if coming % NUM_SLOTS in claimed:
                # An odd number of layers: the last and the first share a buffer, and the last one comes before.
                return
            claimed.add(coming % NUM_SLOTS)
            self._fetch(coming)

    def _agree(self, agreement: RankAgreement) -> None:
        """Compare with the other ranks what the buffers hold, which decides all copies of this pass."""
        try:
            held = [-1 if held is None else held for held in self._holds]
            agreement.check(held + [-1] * (NUM_SLOTS - len(held)))
        except RanksDisagree:
            # On all ranks alike, so that the next pass begins from the same state.
            self.forget()
            raise

    def _fetch(self, position: int) -> None:
        """Begin the copy of a layer unless its buffer holds it."""
        slot = position % NUM_SLOTS
        if self._holds[slot] == position:
            return
        # A copy that fails leaves a mixture.
        self._holds[slot] = None
        with self._queue.copying(slot):
            self._transport.copy(self._host[self._order[position]], self._buffers[slot])
        self._holds[slot] = position

    def forget(self) -> None:
        """Copy every layer anew when it is used next."""
        self._holds = [None] * len(self._buffers)

    def close(self) -> None:
        """Wait for the copies under way; host memory may be unlocked and unmapped then."""
        self._queue.drain()
        self.forget()
