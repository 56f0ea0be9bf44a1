"""YUV 4:2:0 frames to H.264 access units with libx264. Knows nothing of containers and sessions.

Every chunk starts with an IDR picture and every frame comes out of the call that took it in: no B-frames, no lookahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

from server.config import MediaSection
from server.media import h264

X264_PARAMS = "keyint=infinite:scenecut=0:bframes=0:rc-lookahead=0:sliced-threads=0"
"""An IDR comes where a chunk starts and nowhere else."""


class EncoderFailed(RuntimeError):
    """The encoder is closed, or libx264 did not do what it is set up for; the session can't go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessUnit:
    """One coded frame: its NAL units without start codes, parameter sets and encoder text left out."""

    nals: tuple[bytes, ...]
    keyframe: bool


class H264Encoder:
    """One H.264 stream. Not for use by two threads at a time, except `close`.

    `parameter_sets` are known from the start and never change.
    """

    def __init__(self, *, width: int, height: int, fps: int, media: MediaSection) -> None:
        if width <= 0 or height <= 0 or width % 2 or height % 2:
            raise ValueError(f"width and height must be positive and even, got {width}x{height}")
        if fps <= 0:
            raise ValueError(f"fps must be positive, got {fps}")
        self._width = width
        self._height = height
        self._num_encoded = 0
        context = _open_context(width=width, height=height, fps=fps, media=media)
        self.parameter_sets = h264.find_parameter_sets(h264.split_annex_b(context.extradata))
        self._context: av.CodecContext | None = context

    def encode(self, frames: npt.NDArray[np.uint8]) -> tuple[AccessUnit, ...]:
        """Encode one chunk, uint8 [frames, height * 3 / 2, width]; return one access unit per frame.

        The frames are read during the call only. Raises `ValueError` on a wrong shape, `EncoderFailed` otherwise.
        """
        expected = (self._height * 3 // 2, self._width)
        if frames.ndim != 3 or frames.shape[1:] != expected or len(frames) == 0:
            raise ValueError(f"expected frames of shape [n, {expected[0]}, {expected[1]}], got {list(frames.shape)}")
        context = self._context
        if context is None:
            raise EncoderFailed("the encoder is closed")
        units = []
        for frame in self._video_frames(frames):
            try:
                packets = context.encode(frame)
            except av.FFmpegError as error:
                raise EncoderFailed(f"libx264 failed at frame {self._num_encoded}: {error}") from error
            if len(packets) != 1:
                raise EncoderFailed(f"expected one packet for frame {self._num_encoded}, got {len(packets)}")
            units.append(_access_unit(bytes(packets[0])))
            self._num_encoded += 1
        if not units[0].keyframe or any(unit.keyframe for unit in units[1:]):
            raise EncoderFailed(f"expected an IDR at the chunk's first frame only, got {[u.keyframe for u in units]}")
        return tuple(units)

    def close(self) -> None:
        """Free libx264, once an `encode` in flight has returned. Calling it again does nothing."""
        self._context = None

    def _video_frames(self, frames: npt.NDArray[np.uint8]) -> Iterator[VideoFrame]:
        for index, array in enumerate(frames):
            frame = VideoFrame.from_ndarray(array, format="yuv420p")
            frame.pts = self._num_encoded
            frame.pict_type = PictureType.I if index == 0 else PictureType.NONE
            yield frame


def _open_context(*, width: int, height: int, fps: int, media: MediaSection) -> av.CodecContext:
    context = av.CodecContext.create("libx264", "w")
    context.width = width
    context.height = height
    context.pix_fmt = "yuv420p"
    context.framerate = Fraction(fps)
    context.time_base = Fraction(1, fps)
    # Several sessions share the cores; one thread each gives more chunks per second than slices do.
    context.thread_count = 1
    context.color_range = ColorRange.MPEG
    context.color_primaries = ColorPrimaries.BT709
    context.color_trc = ColorTrc.BT709
    context.colorspace = Colorspace.ITU709
    # Parameter sets go to `extradata`, so that they are known before the first frame.
    context.flags |= av.codec.context.Flags.global_header
    context.options = {
        "preset": media.preset,
        # The most that browsers play; rules out lossless coding, which is another profile.
        "profile": "high",
        "tune": "zerolatency",
        "crf": str(media.crf),
        "forced-idr": "1",
        "x264-params": X264_PARAMS,
    }
    try:
        context.open()
    except av.FFmpegError as error:
        settings = f"{width}x{height} at {fps} fps, preset {media.preset}, crf {media.crf}"
        raise ValueError(f"libx264 refused {settings}: {error}") from error
    return context


def _access_unit(packet: bytes) -> AccessUnit:
    nals = tuple(nal for nal in h264.split_annex_b(packet) if h264.is_picture_data(nal))
    return AccessUnit(nals=nals, keyframe=any(h264.nal_type(nal) == h264.NalType.IDR_SLICE for nal in nals))
