"""Read MessagePack that a stranger sent, within bounds. Writing needs none and is `msgspec`'s.

A small message can ask for a lot of memory: 64 MiB of one-byte empty maps become gigabytes of Python objects. So what
is counted here is values and depth; strings and binaries can't be longer than the message. Binaries are views of the
message, not copies. Format: the MessagePack specification, https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

MsgpackKey: TypeAlias = str | bytes
MsgpackValue: TypeAlias = (
    bool | int | float | str | memoryview | list["MsgpackValue"] | dict[MsgpackKey, "MsgpackValue"] | None
)

MAX_KEY_BYTES = 256


class MalformedMsgpack(ValueError):
    """Report bytes that are no MessagePack, or more of it than is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MsgpackLimits:
    """What one message may hold. A robot's request has about fifty values at depth three.

    Each takes a microsecond on the event loop, which other robots wait for.
    """

    max_values: int = 4096
    max_depth: int = 8


def unpack(data: bytes | memoryview, limits: MsgpackLimits | None = None) -> MsgpackValue:
    """Return the one value that the message holds. Binaries are read-only views of `data`; keys may be binary.

    Raises `MalformedMsgpack`.
    """
    reader = _Reader(memoryview(data).toreadonly(), limits or MsgpackLimits())
    value = reader.read(0)
    reader.require_end()
    return value


class _Reader:
    def __init__(self, data: memoryview, limits: MsgpackLimits) -> None:
        self._data = data
        self._at = 0
        self._limits = limits
        self._num_values = 0

    def require_end(self) -> None:
        if self._at != len(self._data):
            raise MalformedMsgpack(f"{len(self._data) - self._at} bytes follow the message")

    def read(self, depth: int) -> MsgpackValue:
        self._num_values += 1
        if self._num_values > self._limits.max_values:
            raise MalformedMsgpack(f"the message holds more than {self._limits.max_values} values")
        tag = self._take(1)[0]
        if tag <= 0x7F:
            return tag
        if tag >= 0xE0:
            return tag - 0x100
        if tag <= 0x8F:
            return self.read_map(tag & 0x0F, depth)
        if tag <= 0x9F:
            return self.read_list(tag & 0x0F, depth)
        if tag <= 0xBF:
            return self.read_text(tag & 0x1F)
        reader = _TAGS.get(tag)
        if reader is None:
            raise MalformedMsgpack(f"byte {self._at - 1} is 0x{tag:02x}: extension types are not read")
        return reader(self, depth)

    def _take(self, num_bytes: int) -> memoryview:
        end = self._at + num_bytes
        if end > len(self._data):
            raise MalformedMsgpack(f"the message ends early: {end - len(self._data)} bytes are missing at {self._at}")
        part = self._data[self._at : end]
        self._at = end
        return part

    def number(self, form: struct.Struct) -> int | float:
        value: int | float = form.unpack(self._take(form.size))[0]
        return value

    def length(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "big")

    def read_binary(self, num_bytes: int) -> memoryview:
        return self._take(num_bytes)

    def read_text(self, num_bytes: int) -> str:
        try:
            return str(self._take(num_bytes), "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedMsgpack(f"the text that ends at byte {self._at} is not UTF-8") from error

    def read_list(self, num_items: int, depth: int) -> list[MsgpackValue]:
        self._require_room(num_items, 1, depth)
        return [self.read(depth + 1) for _ in range(num_items)]

    def read_map(self, num_items: int, depth: int) -> dict[MsgpackKey, MsgpackValue]:
        self._require_room(num_items, 2, depth)
        result: dict[MsgpackKey, MsgpackValue] = {}
        for _ in range(num_items):
            key = self._key(self.read(depth + 1))
            if key in result:
                raise MalformedMsgpack(f"the key {key!r} comes twice")
            result[key] = self.read(depth + 1)
        return result

    def _require_room(self, num_items: int, values_per_item: int, depth: int) -> None:
        if depth >= self._limits.max_depth:
            raise MalformedMsgpack(f"the message is nested deeper than {self._limits.max_depth} levels")
        if num_items * values_per_item > len(self._data) - self._at:
            raise MalformedMsgpack(f"the message ends early: {num_items} items can't fit in what is left of it")

    def _key(self, key: MsgpackValue) -> MsgpackKey:
        if not isinstance(key, str | memoryview):
            raise MalformedMsgpack(f"a map has a key of type {type(key).__name__}: expected text or binary")
        if len(key) > MAX_KEY_BYTES:
            raise MalformedMsgpack(f"a map has a key of {len(key)} bytes: expected at most {MAX_KEY_BYTES}")
        return key if isinstance(key, str) else bytes(key)


def _number(form: str) -> Callable[[_Reader, int], MsgpackValue]:
    parsed = struct.Struct(f">{form}")
    return lambda reader, depth: reader.number(parsed)


_TAGS: dict[int, Callable[[_Reader, int], MsgpackValue]] = {
    0xC0: lambda reader, depth: None,
    0xC2: lambda reader, depth: False,
    0xC3: lambda reader, depth: True,
    0xC4: lambda reader, depth: reader.read_binary(reader.length(1)),
    0xC5: lambda reader, depth: reader.read_binary(reader.length(2)),
    0xC6: lambda reader, depth: reader.read_binary(reader.length(4)),
    0xCA: _number("f"),
    0xCB: _number("d"),
    0xCC: _number("B"),
    0xCD: _number("H"),
    0xCE: _number("I"),
    0xCF: _number("Q"),
    0xD0: _number("b"),
    0xD1: _number("h"),
    0xD2: _number("i"),
    0xD3: _number("q"),
    0xD9: lambda reader, depth: reader.read_text(reader.length(1)),
    0xDA: lambda reader, depth: reader.read_text(reader.length(2)),
    0xDB: lambda reader, depth: reader.read_text(reader.length(4)),
    0xDC: lambda reader, depth: reader.read_list(reader.length(2), depth),
    0xDD: lambda reader, depth: reader.read_list(reader.length(4), depth),
    0xDE: lambda reader, depth: reader.read_map(reader.length(2), depth),
    0xDF: lambda reader, depth: reader.read_map(reader.length(4), depth),
}
