"""How bytes travel: every way brings what a plain copy brings, and staging waits for its buffers."""

from __future__ import annotations

import pytest
import torch

from offload import transports
from offload.host_weights import HostPart, HostPiece, copy_plainly
from offload.mapped_memory import MappedMemory
from offload.transports import DirectCopies, StagedCopies, Transport

CPU = torch.device("cpu")


def scattered() -> HostPart:
    """Return a part whose pieces lie apart on the host and in the buffer, in another order."""
    memory = MappedMemory.own(4096)
    memory.bytes.copy_(torch.randint(0, 256, (4096,), dtype=torch.uint8))
    places = [(7, 1000, 600), (3000, 250, 0), (1500, 1, 2000), (2000, 333, 1650)]
    return HostPart(
        pieces=tuple(
            HostPiece(memory=memory, start_byte=start, num_bytes=size, buffer_start_byte=at)
            for start, size, at in places
        )
    )


@pytest.mark.parametrize("staging_bytes", [None, 64, 250, 251, 10_000])
def test_a_part_arrives_as_in_a_plain_copy(staging_bytes: int | None) -> None:
    part = scattered()
    expected, found = torch.full((2100,), 9, dtype=torch.uint8), torch.full((2100,), 9, dtype=torch.uint8)
    transport: Transport = DirectCopies()
    if staging_bytes is not None:
        transport = StagedCopies(CPU, staging_bytes=staging_bytes)

    copy_plainly(part, expected)
    transport.copy(part, found)

    assert torch.equal(found, expected)
    assert transport.buffer_bytes(2100) == 2100


def test_staging_fills_one_buffer_while_the_other_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    staged = StagedCopies(CPU, staging_bytes=100)
    number = {id(buffer): index for index, buffer in enumerate(staged._buffers)}
    for word in ("wait_free", "mark_copied"):
        monkeypatch.setattr(
            transports._StagingBuffer, word, lambda buffer, word=word: events.append((word, number[id(buffer)]))
        )
    memory = MappedMemory.own(250)

    staged.copy(
        HostPart(pieces=(HostPiece(memory=memory, start_byte=0, num_bytes=250, buffer_start_byte=0),)),
        torch.zeros(250, dtype=torch.uint8),
    )

    assert events == [(word, buffer) for buffer in (0, 1, 0) for word in ("wait_free", "mark_copied")]
    assert sum(buffer.bytes.nbytes for buffer in staged._buffers) == 200
