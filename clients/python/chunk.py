"""One media chunk as it came, and its pictures. Knows the stream formats, no connection."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clients.python.errors import BadServerMessage
from server.wire.messages import ChunkHeader, StreamFormat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One decoded media frame: uint8 [height, width, 3], RGB. `index` counts in its chunk."""

    image: npt.NDArray[np.uint8]
    index: int
    chunk: Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk of the session. `init` is the init segment of its epoch (fmp4 only); `received_s` the client's clock."""

    header: ChunkHeader
    payload: bytes
    format: StreamFormat
    fps: int
    received_s: float
    init: bytes = b""

    @property
    def chunk_index(self) -> int:
        assert self.header.chunk_index is not None, "media chunks have an index"
        return self.header.chunk_index

    @property
    def run(self) -> int:
        return self.header.run

    @property
    def duration_s(self) -> float:
        return self.header.num_frames / self.fps

    def frames(self) -> npt.NDArray[np.uint8]:
        """Decode the pictures: uint8 [media frames, height, width, 3], RGB.

        Blocks for some milliseconds; call it with `asyncio.to_thread` where that matters. Raises `ValueError` for the
        format `latent`, and `BadServerMessage` for a payload that does not decode to `num_frames` pictures.
        """
        match self.format:
            case StreamFormat.RGB24:
                return self._raw_frames()
            case StreamFormat.FMP4:
                return self._decode([self.init + self.payload], container="mp4")
            case StreamFormat.H264:
                return self._decode([self.payload], container="h264")
            case StreamFormat.JPEG:
                return self._decode(self._samples(), container="mjpeg")
            case StreamFormat.LATENT:
                raise ValueError("chunks of format latent hold no pictures: use latents()")

    def latents(self) -> npt.NDArray[np.float32]:
        """Return float32 [channels, latent frames, latent height, latent width]. Raises `ValueError` for pictures."""
        import numpy as np

        if self.format is not StreamFormat.LATENT:
            raise ValueError(f"chunks of format {self.format} hold pictures: use frames()")
        return np.frombuffer(self.payload, dtype="<f4").reshape(self.header.shape or [])

    def _raw_frames(self) -> npt.NDArray[np.uint8]:
        import numpy as np

        shape = self.header.shape or []
        if len(shape) != 4 or shape[0] != self.header.num_frames or shape[3] != 3:
            raise BadServerMessage(f"expected the shape [{self.header.num_frames}, height, width, 3], got {shape}")
        return np.frombuffer(self.payload, dtype=np.uint8).reshape(shape)

    def _samples(self) -> list[bytes]:
        """Cut the payload into its pictures, as `sizes` says."""
        sizes = self.header.sizes or []
        if sum(sizes) != len(self.payload):
            raise BadServerMessage(f"sizes add up to {sum(sizes)} bytes, the payload has {len(self.payload)}")
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        return [self.payload[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def _decode(self, streams: list[bytes], *, container: str) -> npt.NDArray[np.uint8]:
        # av and numpy are loaded by those who look at pictures only.
        import av
        import numpy as np
        from av.video.reformatter import ColorRange, Colorspace

        # Video is BT.709 in limited range; JPEG is BT.601 in full range by its own standard.
        jpeg = container == "mjpeg"
        colorspace = Colorspace.ITU601 if jpeg else Colorspace.ITU709
        color_range = ColorRange.JPEG if jpeg else ColorRange.MPEG
        pictures = []
        try:
            for stream in streams:
                with av.open(io.BytesIO(stream), format=container) as source:
                    pictures += [
                        frame.to_ndarray(format="rgb24", src_colorspace=colorspace, src_color_range=color_range)
                        for frame in source.decode(video=0)
                    ]
        except av.error.FFmpegError as error:
            raise BadServerMessage(f"chunk {self.chunk_index} does not decode: {error.strerror}") from error
        if len(pictures) != self.header.num_frames:
            raise BadServerMessage(
                f"chunk {self.chunk_index}: expected {self.header.num_frames} pictures, decoded {len(pictures)}"
            )
        return np.stack(pictures)
