"""The bytes of streamed layers on the host, whatever memory they are in.

Everything a copy needs to know is a list of pieces: bytes of the host, and where they start in the device's buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from offload.host_plan import Binding
from offload.layout import FlatLayout
from offload.mapped_memory import MappedMemory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPiece:
    """A run of bytes in one mapping (`memory[start_byte : start_byte + num_bytes]`) and its place in the buffer."""

    memory: MappedMemory
    start_byte: int
    num_bytes: int
    buffer_start_byte: int

    @property
    def source(self) -> Tensor:
        """The bytes, a view."""
        return self.memory.bytes[self.start_byte : self.start_byte + self.num_bytes]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPart:
    """One part of one layer on the host."""

    pieces: tuple[HostPiece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def share(self, start_byte: int, end_byte: int) -> HostPart:
        """Return what lies between two bytes of the buffer."""
        return HostPart(pieces=tuple(_cut(self.pieces, start_byte, end_byte)))


def own_part(layout: FlatLayout, tensors: Mapping[str, Tensor]) -> HostPart:
    """Copy tensors into memory of this process, laid out as the device's buffer."""
    memory = MappedMemory.own(layout.num_bytes)
    layout.fill(memory.bytes, tensors)
    return HostPart(pieces=(HostPiece(memory=memory, start_byte=0, num_bytes=layout.num_bytes, buffer_start_byte=0),))


def mapped_part(layout: FlatLayout, bindings: Mapping[str, Binding], files: Mapping[str, MappedMemory]) -> HostPart:
    """Find a part's tensors in mapped files; `bindings` are by tensor name, `files` by path.

    Runs of bytes that are neighbours on both sides become one piece.
    """
    pieces = []
    for place in layout.places:
        start_byte = place.start_byte
        for stored in bindings[place.tensor.name].stored:
            memory = files[str(stored.file)]
            pieces.append(
                HostPiece(
                    memory=memory,
                    start_byte=stored.start_byte,
                    num_bytes=stored.num_bytes,
                    buffer_start_byte=start_byte,
                )
            )
            start_byte += stored.num_bytes
    part = HostPart(pieces=tuple(_merge(pieces)))
    check_no_overlap(part)
    return part


def _merge(pieces: Sequence[HostPiece]) -> Iterable[HostPiece]:
    merged: list[HostPiece] = []
    for piece in pieces:
        before = merged[-1] if merged else None
        if before is not None and _are_neighbours(before, piece):
            merged[-1] = HostPiece(
                memory=before.memory,
                start_byte=before.start_byte,
                num_bytes=before.num_bytes + piece.num_bytes,
                buffer_start_byte=before.buffer_start_byte,
            )
        else:
            merged.append(piece)
    return merged


def _are_neighbours(before: HostPiece, piece: HostPiece) -> bool:
    return (
        before.memory is piece.memory
        and before.start_byte + before.num_bytes == piece.start_byte
        and before.buffer_start_byte + before.num_bytes == piece.buffer_start_byte
    )


def _cut(pieces: Iterable[HostPiece], start_byte: int, end_byte: int) -> Iterable[HostPiece]:
    for piece in pieces:
        first = max(start_byte, piece.buffer_start_byte)
        last = min(end_byte, piece.buffer_start_byte + piece.num_bytes)
        if first < last:
            yield HostPiece(
                memory=piece.memory,
                start_byte=piece.start_byte + first - piece.buffer_start_byte,
                num_bytes=last - first,
                buffer_start_byte=first,
            )


def check_no_overlap(part: HostPart) -> None:
    """Refuse a part whose pieces write the same bytes of a buffer. Raises ValueError."""
    ordered = sorted(part.pieces, key=lambda piece: piece.buffer_start_byte)
    for before, piece in itertools.pairwise(ordered):
        if piece.buffer_start_byte < before.buffer_start_byte + before.num_bytes:
            raise ValueError(f"two pieces write byte {piece.buffer_start_byte} of the buffer")


def copy_plainly(part: HostPart, buffer: Tensor) -> None:
    """Copy a part to a buffer of the host or, waiting for it, of a device: the twin of every faster way."""
    for piece in part.pieces:
        buffer[piece.buffer_start_byte : piece.buffer_start_byte + piece.num_bytes].copy_(piece.source)
