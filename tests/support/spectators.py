"""Chunks of a session that nobody generated, for tests of those who receive them."""

from __future__ import annotations

from server.chunks import CommittedChunk, ReadyChunk
from server.media.formats import EncodedChunk
from server.wire.messages import StreamFormat
from worldmodel.messages import RequestId, StageTimings


def ready_chunk(chunk_index: int, *, run: int = 0, num_frames: int = 2) -> ReadyChunk[EncodedChunk]:
    """Return a chunk in format `rgb24` whose payload says its number."""
    return ReadyChunk(
        chunk=CommittedChunk(
            run=run,
            chunk_index=chunk_index,
            request_id=RequestId(f"r-{chunk_index}"),
            applied=(),
            num_media_frames=num_frames,
            pose=None,
            timings=StageTimings(denoise_ms=1.0, commit_ms=1.0, decode_ms=1.0),
            queue_ms=0.0,
        ),
        encoded=EncodedChunk(format=StreamFormat.RGB24, num_frames=num_frames, samples=(bytes([chunk_index]),)),
        transfer_ms=0.0,
        encode_ms=0.0,
    )
