"""One mp4 file from the chunks of a session, without encoding anything again."""

from __future__ import annotations

from server.media import fmp4, h264
from server.media.formats import EncodedChunk, EpochMuxer
from server.wire.messages import StreamFormat

MP4_FORMATS = frozenset({StreamFormat.FMP4, StreamFormat.H264})
"""Formats whose chunks hold H.264; the others can't become an mp4."""


class Mp4Assembler:
    """Turns chunk after chunk into the bytes to append to a file. Every prefix of them that ends at a chunk plays."""

    def __init__(self, *, width: int, height: int, fps: int, own_muxer: EpochMuxer | None) -> None:
        """`own_muxer` is a new epoch of a session in format `fmp4`; None for `h264`, which brings its headers along."""
        self._width = width
        self._height = height
        self._fps = fps
        self._muxer = own_muxer
        self._begun = False

    def add(self, encoded: EncodedChunk) -> bytes:
        """Return the next fragment, before the first one with the init segment."""
        if encoded.format is StreamFormat.H264:
            encoded = _to_fmp4(encoded) if self._muxer else self._begin_annex_b(encoded)
        muxer = self._muxer
        assert muxer is not None, f"no mp4 can hold a chunk in format {encoded.format}"
        fragment = muxer.mux(encoded).payload
        if self._begun:
            return fragment
        self._begun = True
        init = muxer.init_segment()
        assert init is not None, "an fMP4 stream has an init segment"
        return init.payload + fragment

    def _begin_annex_b(self, encoded: EncodedChunk) -> EncodedChunk:
        """Take the parameter sets from in front of the first key frame."""
        track = fmp4.VideoTrack(
            width=self._width,
            height=self._height,
            timescale=self._fps * fmp4.TICKS_PER_FRAME,
            parameter_sets=h264.find_parameter_sets(h264.split_annex_b(encoded.samples[0])),
        )
        self._muxer = EpochMuxer(format=StreamFormat.FMP4, fps=self._fps, track=track)
        return _to_fmp4(encoded)


def _to_fmp4(encoded: EncodedChunk) -> EncodedChunk:
    """Write Annex B samples with length prefixes and without parameter sets."""
    samples = tuple(
        h264.to_length_prefixed(nal for nal in h264.split_annex_b(sample) if h264.is_picture_data(nal))
        for sample in encoded.samples
    )
    return EncodedChunk(format=StreamFormat.FMP4, num_frames=encoded.num_frames, samples=samples)
