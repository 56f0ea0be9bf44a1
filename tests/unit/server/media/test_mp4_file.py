"""An mp4 made of a session's encoded chunks."""

from __future__ import annotations

import pytest

from server.config import MediaSection
from server.media.formats import EncodedChunk, H264StreamEncoder
from server.media.mp4_file import Mp4Assembler
from server.wire.messages import StreamFormat
from tests.support.media_chunks import decode_video, part_of, psnr_db, yuv_chunk
from worldmodel.messages import MediaFormat

WIDTH, HEIGHT, FPS, FRAMES = 64, 48, 12, 5


def encoder_of(format: StreamFormat) -> H264StreamEncoder:
    return H264StreamEncoder(format, width=WIDTH, height=HEIGHT, fps=FPS, media=MediaSection())


def assembler_for(format: StreamFormat, encoder: H264StreamEncoder) -> Mp4Assembler:
    own_muxer = encoder.new_epoch() if format is StreamFormat.FMP4 else None
    return Mp4Assembler(width=WIDTH, height=HEIGHT, fps=FPS, own_muxer=own_muxer)


@pytest.mark.parametrize("format", [StreamFormat.FMP4, StreamFormat.H264])
def test_every_prefix_plays_with_the_pictures_of_the_session(format: StreamFormat) -> None:
    encoder = encoder_of(format)
    assembler = assembler_for(format, encoder)
    file = b""
    for index in range(3):
        frames = yuv_chunk(width=WIDTH, height=HEIGHT, num_frames=FRAMES, first_frame=index * FRAMES)
        parts, payload = part_of(frames, MediaFormat.YUV420)
        file += assembler.add(encoder.encode(parts, payload, FRAMES))
        decoded = decode_video(file, container="mp4")
        assert len(decoded) == (index + 1) * FRAMES
        assert all(psnr_db(decoded[index * FRAMES + i], frames[i]) > 30 for i in range(FRAMES))


def test_both_formats_give_the_same_file() -> None:
    frames = yuv_chunk(width=WIDTH, height=HEIGHT, num_frames=FRAMES)
    parts, payload = part_of(frames, MediaFormat.YUV420)
    files = []
    for format in (StreamFormat.FMP4, StreamFormat.H264):
        encoder = encoder_of(format)
        files.append(assembler_for(format, encoder).add(encoder.encode(parts, payload, FRAMES)))
    assert files[0] == files[1]


def test_a_stream_without_parameter_sets_is_refused() -> None:
    assembler = Mp4Assembler(width=WIDTH, height=HEIGHT, fps=FPS, own_muxer=None)
    sample = b"\x00\x00\x00\x01\x65picture"
    with pytest.raises(ValueError, match="expected one SPS and one PPS"):
        assembler.add(EncodedChunk(format=StreamFormat.H264, num_frames=1, samples=(sample,)))
