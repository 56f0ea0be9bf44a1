"""From a chunk of a worker to bytes for a client, one way per `StreamFormat`.

    ChunkMedia payload --StreamEncoder.encode--> EncodedChunk --EpochMuxer.mux--> MuxedChunk

A `StreamEncoder` belongs to a session and lives through reconnects. An `EpochMuxer` belongs to one epoch: time starts
at 0 in it and goes on without a gap, also across reset. An `EncodedChunk` can be muxed in several epochs, as resume
does.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace
from PIL import Image

from server.config import MediaSection
from server.media import fmp4, h264
from server.media.encoder import EncoderFailed, H264Encoder
from server.wire.messages import StreamFormat
from worldmodel.messages import MediaFormat, MediaPart

JPEG_QUALITY = 85


# ---------------------------------------------------------------- values


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChunk:
    """One chunk in its final coding, not yet placed in time.

    `samples` has one entry per media frame (raw formats: one for the chunk). `shape` is set for raw formats, and
    `has_sizes` where a client must cut the payload into samples itself.
    """

    format: StreamFormat
    num_frames: int
    samples: tuple[bytes, ...]
    shape: tuple[int, ...] | None = None
    has_sizes: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(len(sample) for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitSegment:
    """What a player needs before the first chunk of an epoch."""

    payload: bytes
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxedChunk:
    """Payload of a binary frame and the facts for its header. `pts` counts in units of `1 / timescale` seconds."""

    payload: bytes
    pts: int
    timescale: int
    num_frames: int
    keyframe: bool
    shape: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


# ---------------------------------------------------------------- muxing


class EpochMuxer:
    """Places the chunks of one epoch in time. `track` is given for fragmented MP4 only."""

    def __init__(self, *, format: StreamFormat, fps: int, track: fmp4.VideoTrack | None = None) -> None:
        self._format = format
        self._timescale = fps * fmp4.TICKS_PER_FRAME
        self._track = track
        self._next_pts = 0
        self._num_fragments = 0

    @property
    def timescale(self) -> int:
        return self._timescale

    def init_segment(self) -> InitSegment | None:
        """Return the init segment of the epoch, None if the format has none."""
        if self._track is None:
            return None
        return InitSegment(payload=fmp4.init_segment(self._track), codec=self._track.parameter_sets.codec)

    def mux(self, encoded: EncodedChunk) -> MuxedChunk:
        """Place the next chunk right behind the one before."""
        if encoded.format is not self._format:
            raise ValueError(f"expected a chunk in format {self._format}, got {encoded.format}")
        pts = self._next_pts
        payload = b"".join(encoded.samples) if self._track is None else self._fragment(encoded, pts)
        self._next_pts += encoded.num_frames * fmp4.TICKS_PER_FRAME
        self._num_fragments += 1
        return MuxedChunk(
            payload=payload,
            pts=pts,
            timescale=self._timescale,
            num_frames=encoded.num_frames,
            keyframe=True,
            shape=encoded.shape,
            sizes=tuple(len(sample) for sample in encoded.samples) if encoded.has_sizes else None,
        )

    def _fragment(self, encoded: EncodedChunk, pts: int) -> bytes:
        samples = [
            fmp4.Sample(data=data, duration=fmp4.TICKS_PER_FRAME, sync=index == 0)
            for index, data in enumerate(encoded.samples)
        ]
        return fmp4.media_fragment(sequence_number=self._num_fragments + 1, decode_time=pts, samples=samples)


# ---------------------------------------------------------------- encoding


class StreamEncoder(Protocol):
    """Encodes the chunks of one session. Not for use by two threads at a time, except `close`.

    `outputs` is what the worker must send. `mime` is known before the first chunk; None for raw formats.
    """

    @property
    def outputs(self) -> tuple[MediaFormat, ...]: ...

    @property
    def mime(self) -> str | None: ...

    def encode(self, parts: tuple[MediaPart, ...], payload: memoryview, num_frames: int) -> EncodedChunk:
        """Encode one chunk; blocks. `payload` is read during the call only.

        Raises `ValueError` if parts, payload and `num_frames` do not fit together, `EncoderFailed` otherwise.
        """
        ...

    def new_epoch(self) -> EpochMuxer:
        """Return a muxer whose time starts at 0."""
        ...

    def close(self) -> None:
        """Free the encoder. Calling it again does nothing; `encode` fails from now on."""
        ...


def create_stream_encoder(
    format: StreamFormat, *, width: int, height: int, fps: int, media: MediaSection
) -> StreamEncoder:
    """Create the encoder for a format. Raises `ValueError` for a size or media settings that it can't do."""
    match format:
        case StreamFormat.FMP4 | StreamFormat.H264:
            return H264StreamEncoder(format, width=width, height=height, fps=fps, media=media)
        case StreamFormat.JPEG:
            return JpegStreamEncoder(width=width, height=height, fps=fps)
        case StreamFormat.RGB24:
            return RawStreamEncoder(format, MediaFormat.RGB24, width=width, height=height, fps=fps)
        case StreamFormat.LATENT:
            return RawStreamEncoder(format, MediaFormat.LATENT, width=width, height=height, fps=fps)


class H264StreamEncoder:
    """`fmp4`: length-prefixed samples in fragments. `h264`: Annex B, parameter sets before each IDR."""

    def __init__(self, format: StreamFormat, *, width: int, height: int, fps: int, media: MediaSection) -> None:
        self._format = format
        self._width = width
        self._height = height
        self._fps = fps
        self._encoder = H264Encoder(width=width, height=height, fps=fps, media=media)
        self._parameter_sets = self._encoder.parameter_sets

    @property
    def outputs(self) -> tuple[MediaFormat, ...]:
        return (MediaFormat.YUV420,)

    @property
    def mime(self) -> str | None:
        container = "video/mp4" if self._format is StreamFormat.FMP4 else "video/h264"
        return f'{container}; codecs="{self._parameter_sets.codec}"'

    def encode(self, parts: tuple[MediaPart, ...], payload: memoryview, num_frames: int) -> EncodedChunk:
        frames = _yuv_frames(parts, payload, num_frames, width=self._width, height=self._height)
        units = self._encoder.encode(frames)
        if self._format is StreamFormat.FMP4:
            samples = tuple(h264.to_length_prefixed(unit.nals) for unit in units)
        else:
            headers = self._parameter_sets.annex_b
            samples = tuple((headers if unit.keyframe else b"") + h264.to_annex_b(unit.nals) for unit in units)
        return EncodedChunk(
            format=self._format,
            num_frames=num_frames,
            samples=samples,
            has_sizes=self._format is StreamFormat.H264,
        )

    def new_epoch(self) -> EpochMuxer:
        track = fmp4.VideoTrack(
            width=self._width,
            height=self._height,
            timescale=self._fps * fmp4.TICKS_PER_FRAME,
            parameter_sets=self._parameter_sets,
        )
        return EpochMuxer(
            format=self._format, fps=self._fps, track=track if self._format is StreamFormat.FMP4 else None
        )

    def close(self) -> None:
        self._encoder.close()


class JpegStreamEncoder:
    """One JPEG per media frame, one after the other; the header's `sizes` cut them apart."""

    def __init__(self, *, width: int, height: int, fps: int) -> None:
        self._width = width
        self._height = height
        self._fps = fps
        self._closed = False

    @property
    def outputs(self) -> tuple[MediaFormat, ...]:
        return (MediaFormat.YUV420,)

    @property
    def mime(self) -> str | None:
        return "image/jpeg"

    def encode(self, parts: tuple[MediaPart, ...], payload: memoryview, num_frames: int) -> EncodedChunk:
        _require_open(self._closed)
        frames = _yuv_frames(parts, payload, num_frames, width=self._width, height=self._height)
        samples = tuple(_jpeg(frame) for frame in frames)
        return EncodedChunk(format=StreamFormat.JPEG, num_frames=num_frames, samples=samples, has_sizes=True)

    def new_epoch(self) -> EpochMuxer:
        return EpochMuxer(format=StreamFormat.JPEG, fps=self._fps)

    def close(self) -> None:
        self._closed = True


class RawStreamEncoder:
    """Hands the worker's array on as it is, with its shape: `rgb24` or `latent` of `MediaFormat`."""

    def __init__(self, format: StreamFormat, output: MediaFormat, *, width: int, height: int, fps: int) -> None:
        self._format = format
        self._output = output
        self._width = width
        self._height = height
        self._fps = fps
        self._closed = False

    @property
    def outputs(self) -> tuple[MediaFormat, ...]:
        return (self._output,)

    @property
    def mime(self) -> str | None:
        return None

    def encode(self, parts: tuple[MediaPart, ...], payload: memoryview, num_frames: int) -> EncodedChunk:
        _require_open(self._closed)
        part, data = _find_part(parts, payload, num_frames, self._output)
        if self._output is MediaFormat.RGB24:
            _check_shape(part, (num_frames, self._height, self._width, 3))
        return EncodedChunk(format=self._format, num_frames=num_frames, samples=(bytes(data),), shape=part.shape)

    def new_epoch(self) -> EpochMuxer:
        return EpochMuxer(format=self._format, fps=self._fps)

    def close(self) -> None:
        self._closed = True


# ---------------------------------------------------------------- payloads

ITEM_BYTES = {MediaFormat.YUV420: 1, MediaFormat.RGB24: 1, MediaFormat.LATENT: 4}


def _find_part(
    parts: Iterable[MediaPart], payload: memoryview, num_frames: int, wanted: MediaFormat
) -> tuple[MediaPart, memoryview]:
    """Find the part of a format and its bytes in the payload."""
    parts = tuple(parts)
    if num_frames < 1:
        raise ValueError(f"num_frames must be at least 1, got {num_frames}")
    total_bytes = sum(part.num_bytes for part in parts)
    if payload.nbytes != total_bytes:
        raise ValueError(f"payload has {payload.nbytes} bytes, but its parts add up to {total_bytes}")
    offset = 0
    for part in parts:
        if part.format is wanted:
            expected = math.prod(part.shape) * ITEM_BYTES[wanted]
            if part.num_bytes != expected:
                raise ValueError(f"{wanted} of shape {list(part.shape)} is {expected} bytes, got {part.num_bytes}")
            return part, payload.cast("B")[offset : offset + part.num_bytes]
        offset += part.num_bytes
    raise ValueError(f"expected a part in format {wanted}, got {[str(part.format) for part in parts]}")


def _check_shape(part: MediaPart, expected: tuple[int, ...]) -> None:
    if part.shape != expected:
        raise ValueError(f"expected {part.format} of shape {list(expected)}, got {list(part.shape)}")


def _yuv_frames(
    parts: Iterable[MediaPart], payload: memoryview, num_frames: int, *, width: int, height: int
) -> npt.NDArray[np.uint8]:
    part, data = _find_part(parts, payload, num_frames, MediaFormat.YUV420)
    _check_shape(part, (num_frames, height * 3 // 2, width))
    return np.frombuffer(data, dtype=np.uint8).reshape(part.shape)


def _jpeg(frame: npt.NDArray[np.uint8]) -> bytes:
    """Encode uint8 [height * 3 / 2, width]. JPEG is BT.601 full range, so the colours go through RGB."""
    rgb = VideoFrame.from_ndarray(frame, format="yuv420p").to_ndarray(
        format="rgb24", src_colorspace=Colorspace.ITU709, src_color_range=ColorRange.MPEG
    )
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def _require_open(closed: bool) -> None:
    if closed:
        raise EncoderFailed("the encoder is closed")
