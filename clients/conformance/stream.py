"""What must hold for every frame a server ever sends on one socket, whatever is being checked. No I/O."""

from __future__ import annotations

import json
import struct
from typing import Any

from pydantic import ValidationError

from clients.conformance.errors import CheckFailed, require
from server.wire import messages
from server.wire.messages import SERVER_MESSAGE, ChunkHeader, StreamFormat

MAX_HEADER_BYTES = 1024 * 1024
_TYPES_BY_NAME = {
    "session.queued": messages.SessionQueued,
    "session.started": messages.SessionStarted,
    "session.watching": messages.SessionWatching,
    "event.queued": messages.EventQueued,
    "event.dropped": messages.EventDropped,
    "session.state": messages.SessionStateMessage,
    "session.closed": messages.SessionClosedMessage,
    "pong": messages.Pong,
    "error": messages.ErrorMessage,
}


def read_text(text: str) -> dict[str, Any]:
    """Check a text frame against its message. Raises `CheckFailed`."""
    try:
        message = json.loads(text)
    except ValueError as error:
        raise CheckFailed(f"a text frame is not JSON: {text[:80]!r}") from error
    require(isinstance(message, dict), f"a text frame is no JSON object: {text[:80]!r}")
    kind = message.get("type")
    require(kind in _TYPES_BY_NAME, f"a message of unknown type {kind!r}")
    try:
        SERVER_MESSAGE.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        raise CheckFailed(f"{kind}: {where}: {first['msg']}") from error
    result: dict[str, Any] = message
    return result


def read_binary(frame: bytes) -> tuple[ChunkHeader, bytes]:
    """Split a binary frame as docs/protocol.md says. Raises `CheckFailed`."""
    require(len(frame) >= 4, f"a binary frame of {len(frame)} bytes has no header length")
    (length,) = struct.unpack_from(">I", frame)
    require(length <= MAX_HEADER_BYTES, f"a binary frame says that its header has {length} bytes")
    require(4 + length <= len(frame), f"a header of {length} bytes in a frame of {len(frame)}")
    try:
        header = ChunkHeader.model_validate_json(frame[4 : 4 + length])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckFailed(f"chunk header: {where}: {first['msg']}") from error
    return header, frame[4 + length :]


class StreamRules:
    """The order of chunks of one socket, from `session.started` or `session.watching` on.

    A spectator may miss chunks, so that only its `pts` has no gap.
    """

    def __init__(self, started: dict[str, Any], *, next_chunk_index: int | None) -> None:
        self.started = started
        self.watching = started["type"] == "session.watching"
        self._format = StreamFormat(started["format"])
        self._epoch = 0 if self.watching else int(started["epoch"])
        self._run = int(started["run"])
        self._next = None if self.watching else next_chunk_index
        self._pts: int | None = None
        self._timescale: int | None = None
        self._needs_init = self._format is StreamFormat.FMP4
        self._applied: set[int] = set()

    def check(self, header: ChunkHeader, payload: bytes) -> None:
        """Raises `CheckFailed` for a frame that cannot come now."""
        where = "init segment" if header.kind == "init" else f"chunk {header.chunk_index}"
        require(
            header.session_id == self.started["session_id"],
            f"{where}: session_id {header.session_id!r}, session.started said {self.started['session_id']!r}",
        )
        require(header.epoch == self._epoch, f"{where}: epoch {header.epoch}, this socket's is {self._epoch}")
        require(header.timescale > 0, f"{where}: timescale {header.timescale}")
        if header.kind == "init":
            self._check_init(header, payload)
        else:
            self._check_media(header, payload, where)

    def _check_init(self, header: ChunkHeader, payload: bytes) -> None:
        require(self._needs_init, "an init segment that is not the first of its epoch, or of another format than fmp4")
        require(header.chunk_index is None, f"an init segment with chunk_index {header.chunk_index}")
        require(bool(header.codec), "an init segment without codec")
        require(
            header.codec in (self.started["mime"] or ""),
            f"codec {header.codec!r} is not that of mime {self.started['mime']!r}",
        )
        boxes = box_kinds(payload)
        require(boxes[:1] == ["ftyp"] and "moov" in boxes, f"an init segment of boxes {boxes}")
        self._needs_init = False
        self._timescale = header.timescale

    def _check_media(self, header: ChunkHeader, payload: bytes, where: str) -> None:
        require(not self._needs_init, f"{where} came before the init segment")
        require(header.chunk_index is not None, "a media chunk without chunk_index")
        require(bool(header.request_id), f"{where}: no request_id")
        require(header.num_frames > 0, f"{where}: num_frames {header.num_frames}")
        require(header.keyframe, f"{where}: keyframe false")
        self._check_order(header, where)
        self._check_time(header, where)
        self._check_applied(header, where)
        if header.timings_ms is not None:
            negative = [name for name, value in header.timings_ms.model_dump().items() if value < 0]
            require(not negative, f"{where}: negative timings_ms: {', '.join(negative)}")
        require(header.pose is None or len(header.pose) == 16, f"{where}: a pose of {len(header.pose or [])} numbers")
        check_payload(self._format, header, payload, self.started)

    def _check_order(self, header: ChunkHeader, where: str) -> None:
        assert header.chunk_index is not None
        if header.run != self._run:
            require(header.run > self._run, f"{where} of run {header.run} after run {self._run} had begun")
            self._run, self._next = header.run, None if self.watching else 0
        if self._next is not None:
            require(header.chunk_index == self._next, f"expected chunk {self._next} of run {self._run}, got {where}")
        self._next = None if self.watching else header.chunk_index + 1

    def _check_time(self, header: ChunkHeader, where: str) -> None:
        if self._timescale is None:
            self._timescale = header.timescale
        require(header.timescale == self._timescale, f"{where}: timescale {header.timescale}, was {self._timescale}")
        expected = 0 if self._pts is None else self._pts
        require(header.pts == expected, f"{where}: pts {header.pts}, expected {expected}")
        self._pts = header.pts + header.num_frames * header.timescale // int(self.started["fps"])

    def _check_applied(self, header: ChunkHeader, where: str) -> None:
        num_latent_frames = int(self.started["latent_frames_per_chunk"])
        for event in header.applied:
            require(
                event.event_id not in self._applied, f"{where}: event {event.event_id} is applied for a second time"
            )
            require(
                0 <= event.latent_frame < num_latent_frames,
                f"{where}: event {event.event_id} acts from latent frame {event.latent_frame} of {num_latent_frames}",
            )
            require(event.wait_ms >= 0, f"{where}: event {event.event_id} waited {event.wait_ms} ms")
            self._applied.add(event.event_id)


def box_kinds(data: bytes) -> list[str]:
    """List the kinds of the MP4 boxes that fill some bytes. Raises `CheckFailed` if they do not."""
    kinds, at = [], 0
    while at < len(data):
        require(at + 8 <= len(data), f"{len(data) - at} bytes after the last MP4 box")
        size, kind = struct.unpack_from(">I4s", data, at)
        require(8 <= size <= len(data) - at, f"an MP4 box of {size} bytes, {len(data) - at} are left")
        kinds.append(kind.decode("latin-1"))
        at += size
    return kinds


def check_payload(format: StreamFormat, header: ChunkHeader, payload: bytes, started: dict[str, Any]) -> None:
    """Check the payload of a media chunk as far as its format shows from outside. Raises `CheckFailed`."""
    where = f"chunk {header.chunk_index}"
    match format:
        case StreamFormat.FMP4:
            boxes = box_kinds(payload)
            require(boxes == ["moof", "mdat"], f"{where}: expected the boxes moof and mdat, got {boxes}")
        case StreamFormat.H264:
            samples = _samples(header, payload, where)
            starts = all(sample.startswith((b"\x00\x00\x00\x01", b"\x00\x00\x01")) for sample in samples)
            require(starts, f"{where}: a frame that does not begin with an Annex B start code")
            kinds = _nal_kinds(samples[0])
            require({7, 8, 5} <= kinds, f"{where}: the first frame has NAL units {sorted(kinds)}, no SPS, PPS and IDR")
        case StreamFormat.JPEG:
            samples = _samples(header, payload, where)
            require(all(sample.startswith(b"\xff\xd8") for sample in samples), f"{where}: a frame that is no JPEG")
        case StreamFormat.RGB24:
            expected = [header.num_frames, started["height"], started["width"], 3]
            require(header.shape == expected, f"{where}: shape {header.shape}, expected {expected}")
            num_bytes = header.num_frames * started["height"] * started["width"] * 3
            require(len(payload) == num_bytes, f"{where}: {len(payload)} bytes, shape says {num_bytes}")
        case StreamFormat.LATENT:
            shape = header.shape or []
            require(len(shape) == 4, f"{where}: shape {shape}, expected four numbers")
            num_bytes = 4 * shape[0] * shape[1] * shape[2] * shape[3]
            require(len(payload) == num_bytes, f"{where}: {len(payload)} bytes, shape says {num_bytes}")


def _samples(header: ChunkHeader, payload: bytes, where: str) -> list[bytes]:
    sizes = header.sizes or []
    require(len(sizes) == header.num_frames, f"{where}: {len(sizes)} sizes for {header.num_frames} frames")
    require(sum(sizes) == len(payload), f"{where}: sizes add up to {sum(sizes)} of {len(payload)} bytes")
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [payload[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _nal_kinds(sample: bytes) -> set[int]:
    """Return the nal_unit_type of each unit of an Annex B access unit (ITU-T H.264, 7.3.1)."""
    return {part[0] & 31 for part in sample.split(b"\x00\x00\x01")[1:] if part}
