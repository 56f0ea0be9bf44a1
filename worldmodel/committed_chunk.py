"""A chunk that is part of its session, and the way of its media to the host."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from worldmodel.adapter import GeneratedMedia
from worldmodel.errors import OutcomeUnknown
from worldmodel.messages import ChunkMedia, MediaFormat, MediaPart, TickCommitted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedChunk:
    """A chunk that is part of its session; its media may still be on the device."""

    committed: TickCommitted
    media: GeneratedMedia
    outputs: tuple[MediaFormat, ...]

    def to_host(self) -> tuple[ChunkMedia, list[memoryview]]:
        """Wait for the media and return its message and payload parts.

        Raises `OutcomeUnknown` if the media is lost: the session has the chunk, the client never will.
        """
        tick = self.committed
        started_s = time.perf_counter()
        try:
            arrays = self.media.to_host()
        except Exception as error:
            raise _media_lost(tick) from error
        if tuple(media.format for media in arrays) != self.outputs:
            logger.error("adapter gave media %s, the session wants %s", [m.format for m in arrays], self.outputs)
            raise _media_lost(tick)
        hosted = [np.ascontiguousarray(media.array) for media in arrays]
        parts = tuple(
            MediaPart(format=media.format, shape=array.shape, num_bytes=array.nbytes)
            for media, array in zip(arrays, hosted, strict=True)
        )
        message = ChunkMedia(
            request_id=tick.request_id,
            session_id=tick.session_id,
            chunk_index=tick.chunk_index,
            num_media_frames=tick.num_media_frames,
            parts=parts,
            transfer_ms=1000.0 * (time.perf_counter() - started_s),
        )
        return message, [array.data for array in hosted]


def _media_lost(tick: TickCommitted) -> OutcomeUnknown:
    return OutcomeUnknown(f"the media of chunk {tick.chunk_index} is lost", code="media_lost")
