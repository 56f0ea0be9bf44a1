"""The order of copies and computations on a device: events, no waiting of the host.

compute stream   | layer n          | layer n+1 (waits for its copy) |
copy stream            | copy n+1        | copy n+2 (waits until layer n has used its buffer) |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class CopyQueue(Protocol):
    """Ordering of the copies into the numbered buffers of one part of the model."""

    @contextmanager
    def copying(self, slot: int) -> Iterator[None]:
        """Issue copies into a buffer: they begin when what was computed with it is done."""
        yield

    def wait_copied(self, slot: int) -> None:
        """Let what is computed next wait for the last copies into a buffer."""
        ...

    def mark_used(self, slot: int) -> None:
        """Note that what has been issued so far is the last that uses a buffer's content."""
        ...

    def drain(self) -> None:
        """Wait on the host until no copy is under way."""
        ...


class HostQueue:
    """The queue of a device that is the host itself: everything is done when it was issued."""

    @contextmanager
    def copying(self, slot: int) -> Iterator[None]:
        yield

    def wait_copied(self, slot: int) -> None:
        pass

    def mark_used(self, slot: int) -> None:
        pass

    def drain(self) -> None:
        pass


class CudaQueue:
    """A queue on a CUDA device. `stream` carries the copies; the parts of a model share one.

    Computation is what the current stream of the calling thread does.
    """

    def __init__(self, stream: torch.cuda.Stream, num_slots: int) -> None:
        self._stream = stream
        self._copied = [torch.cuda.Event() for _ in range(num_slots)]
        self._used = [torch.cuda.Event() for _ in range(num_slots)]
        # The buffers' memory may be another tensor's that kernels in flight still use.
        stream.wait_stream(self._compute)

    @property
    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device)

    @contextmanager
    def copying(self, slot: int) -> Iterator[None]:
        self._stream.wait_event(self._used[slot])
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._copied[slot].record(self._stream)

    def wait_copied(self, slot: int) -> None:
        self._compute.wait_event(self._copied[slot])

    def mark_used(self, slot: int) -> None:
        self._used[slot].record(self._compute)

    def drain(self) -> None:
        self._stream.synchronize()
