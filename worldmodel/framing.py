"""Frames on the socket between server and worker: encoding, limits, and incremental reading. Torch-free, both sides.

The layout is drawn in `worldmodel/messages.py`. `FrameReader` knows no socket: it hands out the memory that the next
bytes belong in, so that a payload is received once, straight into its final buffer. Drivers: `send_frame` and
`receive_frame` for a blocking socket (worker), `asyncio.BufferedProtocol` in `server/worker_link.py`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from worldmodel.errors import WorldModelError
from worldmodel.messages import ServerMessage, WorkerMessage

Message = ServerMessage | WorkerMessage

_PREFIX = struct.Struct("!IQ")
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Message)
}


class FramingError(WorldModelError):
    """Report bytes that are no frame of ours, or a message that makes no legal frame. The stream can't go on."""

    code = "bad_frame"


class FrameTooLarge(FramingError):
    """Report a header or payload above its limit, before memory is taken for it."""

    code = "frame_too_large"


class FrameTruncated(FramingError):
    """Report that the stream ended inside a frame."""

    code = "frame_truncated"


class MalformedMessage(FramingError):
    """Report a header that is no known message."""

    code = "malformed_message"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """Largest frame either side sends or accepts. A payload of 1 GiB holds 70 s of raw RGB at 832x480 and 16 fps."""

    max_header_bytes: int = 16 * 1024**2
    max_payload_bytes: int = 1024**3


DEFAULT_LIMITS = FrameLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One received message; `payload` is empty for most and is owned by the receiver."""

    message: Message
    payload: memoryview


def encode_frame(
    message: Message, payload: Sequence[bytes | memoryview] = (), limits: FrameLimits = DEFAULT_LIMITS
) -> list[bytes | memoryview]:
    """Return the buffers of one frame, in order. Payload parts are passed on, not copied; they must stay unchanged.

    Raises `FrameTooLarge`; nothing has been sent then.
    """
    parts = [_as_bytes_view(part) for part in payload]
    header = _ENCODER.encode([type(message).__name__, message])
    num_payload_bytes = sum(part.nbytes for part in parts)
    _check_sizes(len(header), num_payload_bytes, limits)
    return [_PREFIX.pack(len(header), num_payload_bytes) + header, *(part for part in parts if part.nbytes)]


def decode_header(header: bytes | bytearray | memoryview) -> Message:
    """Decode `[type name, body]`. Raises `MalformedMessage` naming the type or the field that is wrong."""
    try:
        name, body = _ENVELOPE.decode(header)
    except msgspec.DecodeError as error:
        raise MalformedMessage(
            f"expected a header [type name, body], got {len(header)} other bytes: {error}"
        ) from error
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise MalformedMessage(f"unknown message type {name[:80]!r}: expected one of {', '.join(_DECODERS)}")
    try:
        message: Message = decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise MalformedMessage(f"bad {name} message: {error}") from error
    return message


class FrameReader:
    """Assembles frames from bytes that arrive in pieces. After an error it must not be used again.

    The driver fills `buffer()` from its start and reports the count to `advance`, which returns a frame once one is
    complete. `buffer()` is never larger than what the current part of the current frame lacks.
    """

    def __init__(self, limits: FrameLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._start_frame()

    def _start_frame(self) -> None:
        self._prefix: tuple[int, int] | None = None
        self._message: Message | None = None
        self._expect(_PREFIX.size)

    def _expect(self, num_bytes: int) -> None:
        self._target = memoryview(bytearray(num_bytes))
        self._filled = 0

    def buffer(self) -> memoryview:
        """Return the writable memory for the next bytes, never empty."""
        return self._target[self._filled :]

    def advance(self, num_bytes: int) -> Frame | None:
        """Take note of `num_bytes` written to `buffer()`. Raises `FramingError`."""
        self._filled += num_bytes
        if self._filled < len(self._target):
            return None
        if self._prefix is None:
            self._prefix = self._read_prefix()
            self._expect(self._prefix[0])
            return None
        if self._message is None:
            self._message = decode_header(self._target)
            self._expect(self._prefix[1])
            if self._prefix[1] > 0:
                return None
        frame = Frame(message=self._message, payload=self._target)
        self._start_frame()
        return frame

    def end(self) -> None:
        """Take note of the end of the stream. Raises `FrameTruncated` unless it lies between two frames."""
        if self._prefix is None and self._filled == 0:
            return
        part = "prefix" if self._prefix is None else "header" if self._message is None else "payload"
        raise FrameTruncated(
            f"the stream ended inside a frame: expected {len(self._target)} bytes of {part}, got {self._filled}"
        )

    def _read_prefix(self) -> tuple[int, int]:
        header_bytes, payload_bytes = _PREFIX.unpack(self._target)
        _check_sizes(header_bytes, payload_bytes, self._limits)
        if header_bytes == 0:
            raise MalformedMessage("expected a header of at least 1 byte, got header length 0")
        return header_bytes, payload_bytes


def send_frame(
    sock: socket.socket,
    message: Message,
    payload: Sequence[bytes | memoryview] = (),
    limits: FrameLimits = DEFAULT_LIMITS,
) -> None:
    """Send one frame on a blocking socket. Raises `FrameTooLarge`, or `OSError` when the peer is gone."""
    for buffer in encode_frame(message, payload, limits):
        sock.sendall(buffer)


def receive_frame(sock: socket.socket, reader: FrameReader) -> Frame | None:
    """Receive one frame from a blocking socket; None if the peer closed between two frames. Raises `FramingError`."""
    while True:
        received = sock.recv_into(reader.buffer())
        if received == 0:
            reader.end()
            return None
        frame = reader.advance(received)
        if frame is not None:
            return frame


def _as_bytes_view(part: bytes | memoryview) -> memoryview:
    view = memoryview(part)
    # An empty array can't be cast to a flat view, and has nothing to send.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _check_sizes(header_bytes: int, payload_bytes: int, limits: FrameLimits) -> None:
    if header_bytes > limits.max_header_bytes:
        raise FrameTooLarge(f"header of {header_bytes} bytes: expected at most {limits.max_header_bytes}")
    if payload_bytes > limits.max_payload_bytes:
        raise FrameTooLarge(f"payload of {payload_bytes} bytes: expected at most {limits.max_payload_bytes}")
