"""The binary frames in clients/examples/games/fixtures, as the server makes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from server.config import MediaSection
from server.media.formats import create_stream_encoder
from server.wire.binary import pack_chunk
from server.wire.messages import AppliedEventHeader, ChunkHeader, ChunkTimings, StreamFormat
from tests.support.media_chunks import part_of, yuv_chunk
from worldmodel.messages import MediaFormat

WIDTH, HEIGHT, FPS, FRAMES = 16, 12, 12, 3
CHUNK_INDEX = 4


def rgb_pictures() -> npt.NDArray[np.uint8]:
    """Return uint8 [frames, height, width, 3]: red rises with x, green with y, blue with the frame."""
    frame, y, x = np.meshgrid(np.arange(FRAMES), np.arange(HEIGHT), np.arange(WIDTH), indexing="ij")
    return np.stack([16 * x, 20 * y, 80 * frame], axis=-1).astype(np.uint8)


def fixture_frame(format: StreamFormat) -> bytes:
    """Return a whole binary frame of format rgb24 or h264, with the second chunk of an epoch in it."""
    encoder = create_stream_encoder(format, width=WIDTH, height=HEIGHT, fps=FPS, media=MediaSection())
    if format is StreamFormat.RGB24:
        parts, payload = part_of(rgb_pictures(), MediaFormat.RGB24)
    else:
        frames = yuv_chunk(width=WIDTH, height=HEIGHT, num_frames=FRAMES, first_frame=0)
        parts, payload = part_of(frames, MediaFormat.YUV420)
    encoded = encoder.encode(parts, payload, FRAMES)
    encoder.close()
    muxer = encoder.new_epoch()
    muxer.mux(encoded)
    muxed = muxer.mux(encoded)
    header = ChunkHeader(
        kind="media",
        session_id="s-71c2",
        epoch=1,
        run=0,
        chunk_index=CHUNK_INDEX,
        request_id="s-71c2-6",
        applied=[AppliedEventHeader(event_id=7, latent_frame=1, wait_ms=83.125)],
        num_frames=muxed.num_frames,
        pts=muxed.pts,
        timescale=muxed.timescale,
        timings_ms=ChunkTimings(queue=0.5, denoise=612.0, commit=140.25, decode=171.5, transfer=2.0, encode=3.5),
        shape=None if muxed.shape is None else list(muxed.shape),
        sizes=None if muxed.sizes is None else list(muxed.sizes),
    )
    return pack_chunk(header, muxed.payload)
