"""Weights shared out among ranks: each keeps one share of every layer on its host, and the devices exchange them.

    host of rank r     | share r |                              1/n of the bytes, copied over r's own link
    buffer of rank r   | share 0 | share 1 | ... | share n-1 |  after the all-gather, on every rank

All ranks must run the same model on the same schedule. Which copies are issued follows from what the buffers hold, so
that ranks compare that when a pass over the layers begins: a tick that failed on one rank only is found there, and the
next one fails on all. A rank that stops in the middle of a pass is found by the time-out of a process group: gloo's
raises `CopyFailed`, at the latest when the next pass begins, NCCL's ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import CopyFailed, RanksDisagree
from offload.host_weights import HostPart, HostPiece
from offload.layout import ALIGNMENT, FlatLayout
from offload.mapped_memory import MappedMemory
from offload.transports import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Which share of a buffer is a rank's own. All shares have the same size; the last ones may reach past the end."""

    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank: expected 0 to {self.num_ranks - 1}, got {self.rank}")

    def share_bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // (self.num_ranks * ALIGNMENT)) * ALIGNMENT

    def bounds(self, num_bytes: int) -> tuple[int, int]:
        """Return the first byte of this rank's share and the first one after it."""
        size = self.share_bytes(num_bytes)
        return self.rank * size, (self.rank + 1) * size


def own_share(layout: FlatLayout, tensors: Mapping[str, Tensor], sharing: Sharing) -> HostPart:
    """Copy this rank's share of a part into memory of this process; the rest is not kept."""
    start_byte, end_byte = sharing.bounds(layout.num_bytes)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.fill(flat, tensors)
    share = flat[start_byte:end_byte]
    if share.numel() == 0:
        return HostPart(pieces=())
    memory = MappedMemory.own(share.numel())
    memory.bytes.copy_(share)
    piece = HostPiece(memory=memory, start_byte=0, num_bytes=share.numel(), buffer_start_byte=start_byte)
    return HostPart(pieces=(piece,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankGroups:
    """The process groups of ranks that share weights out: one for the device, one for host memory (gloo).

    `leave` is called once no memory is locked or mapped any more: the time to leave the groups. A host group that
    waits less than the device's lets a tick fail by an error before a watchdog ends the process.
    """

    sharing: Sharing
    device_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    leave: Callable[[], None] = lambda: None


class ShardedCopies:
    """Copy the own share with another transport, then gather all shares on the device, on the stream of the copies.

    Parts it is given hold the own share only. `group` must have a backend for the device: NCCL, or gloo on a CPU.
    """

    def __init__(self, inner: Transport, sharing: Sharing, group: dist.ProcessGroup) -> None:
        self._inner = inner
        self._sharing = sharing
        self._group = group

    @property
    def num_ahead(self) -> int:
        return self._inner.num_ahead

    def buffer_bytes(self, num_bytes: int) -> int:
        """Return the size of a buffer that holds all shares, those past the end included."""
        return self._sharing.num_ranks * self._sharing.share_bytes(num_bytes)

    def copy(self, part: HostPart, buffer: Tensor) -> None:
        start_byte, end_byte = self._sharing.bounds(buffer.numel())
        self._inner.copy(part, buffer)
        try:
            dist.all_gather_into_tensor(buffer, buffer[start_byte:end_byte], group=self._group)
        except RuntimeError as error:
            raise CopyFailed(f"rank {self._sharing.rank}: shares could not be gathered ({error})") from error


class RankAgreement:
    """Compares what ranks are about to do. `group` is one for host memory, gloo; a comparison takes a round trip.

    `part` is the number of the part of the model that it is about, the same on all ranks.
    """

    def __init__(self, sharing: Sharing, group: dist.ProcessGroup, part: int = 0) -> None:
        self._sharing = sharing
        self._group = group
        self._part = part

    def check(self, state: Sequence[int]) -> None:
        """Raise `RanksDisagree`, on every rank, unless all are at the same part with the same state.

        States of all parts have the same length, so that ranks at different parts can be compared.
        """
        own = torch.tensor([self._part, *state], dtype=torch.int64)
        everyone = [torch.empty_like(own) for _ in range(self._sharing.num_ranks)]
        try:
            dist.all_gather(everyone, own, group=self._group)
        except RuntimeError as error:
            raise CopyFailed(f"rank {self._sharing.rank}: the other ranks do not answer ({error})") from error
        if any(not torch.equal(other, own) for other in everyone):
            shown = "; ".join(f"rank {rank} {other.tolist()}" for rank, other in enumerate(everyone))
            raise RanksDisagree(
                f"ranks hold different layers or are at different parts, one has failed before: {shown}"
            )
