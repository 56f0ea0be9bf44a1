"""From a playhead in media time to the chunk that is on screen: what an `omni` client reports, and what pacing asks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SentChunk:
    """A chunk in the client's hands; `first_frame` counts media frames from the start of the stream."""

    first_frame: int
    run: int
    chunk_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The chunk on screen and the milliseconds of media behind the playhead."""

    chunk: SentChunk
    buffered_ms: float


class Playhead:
    """Remembers the chunks sent from the one on screen on."""

    def __init__(self) -> None:
        self._chunks: deque[SentChunk] = deque()
        self._num_frames = 0

    def sent(self, *, run: int, chunk_index: int, num_media_frames: int) -> None:
        """Note a chunk that was sent."""
        self._chunks.append(SentChunk(first_frame=self._num_frames, run=run, chunk_index=chunk_index))
        self._num_frames += num_media_frames

    def move(self, position_s: float, fps: int) -> Shown | None:
        """Go to a position and return what is shown there; None before the first chunk.

        Backwards counts as the start of the chunk on screen, beyond the end as the last chunk sent.
        """
        if not self._chunks:
            return None
        frame = position_s * fps
        while len(self._chunks) > 1 and self._chunks[1].first_frame <= frame:
            self._chunks.popleft()
        shown = self._chunks[0]
        ahead_frames = max(0.0, self._num_frames - max(frame, shown.first_frame))
        return Shown(chunk=shown, buffered_ms=1000.0 * ahead_frames / fps)
