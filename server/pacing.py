"""When may the next chunk start, and when will the viewer run dry. No clock of its own: every call says the time.

With `lead_chunks` = 1, and chunk 3 the last whose first frame was shown:

    shown ... 3 |  4 playing next  |  5 may start once 4 was sent  |  6 waits

A chunk takes up the events that are there when it starts. Because 5 waits until 4 was sent, whoever has not received 4
is heard by 5 at the latest: of the chunks that arrive after a key was pressed, the second one shows it.
"""

from __future__ import annotations

import math
from collections import deque

from server.wire.messages import Pacing


class PacingGate:
    """Decide when chunk k of a run may start.

    `free`: k <= sent + 1 + lead_chunks, so a socket that doesn't drain stops its own ticks.
    `playback` and `clock`: k <= shown + 1 + lead_chunks, with `shown` reported by the client or by a virtual viewer who
    plays at media rate and waits for chunks that come late, and k <= sent + max(1, lead_chunks).

    An event thus acts at most max(2, lead_chunks + 1) chunks after the last one sent. Longer leads let a chunk start
    while the one before is still encoded, which is worth a few per cent to a model slower than its media.
    """

    def __init__(self, *, mode: Pacing, lead_chunks: int, fps: int) -> None:
        self.mode = mode
        self._lead_chunks = lead_chunks
        self._fps = fps
        self._shown = -1
        self._sent = -1
        self._dry_at: float | None = None
        self._plays_until: float | None = None
        self._viewer_starts: deque[tuple[int, float]] = deque()

    @property
    def shown(self) -> int:
        return self._shown

    @property
    def sent(self) -> int:
        """Last chunk of this run that was handed to a socket, or that the client says it has."""
        return self._sent

    def opens_at(self, chunk_index: int, now: float) -> float | None:
        """Return when the chunk may start: `now` or earlier if it may, None if that depends on the client."""
        needed = chunk_index - 1 - self._lead_chunks
        needed_sent = needed if self.mode is Pacing.FREE else chunk_index - max(1, self._lead_chunks)
        if needed_sent > self._sent:
            return None
        match self.mode:
            case Pacing.FREE:
                return now
            case Pacing.PLAYBACK:
                return now if needed <= self._shown else None
            case Pacing.CLOCK:
                return self._viewer_reaches(needed, now)

    def deadline(self) -> float | None:
        """Return when the viewer has nothing left to show; None before the first chunk, infinity for `free`."""
        return math.inf if self.mode is Pacing.FREE else self._dry_at

    def chunk_ready(self, chunk_index: int, num_media_frames: int, now: float) -> None:
        """Note that a chunk could be sent from now on."""
        duration_s = num_media_frames / self._fps
        self._dry_at = max(now, self._dry_at or now) + duration_s
        if self.mode is Pacing.CLOCK:
            starts_at = max(now, self._plays_until or now)
            self._plays_until = starts_at + duration_s
            self._viewer_starts.append((chunk_index, starts_at))

    def chunk_sent(self, chunk_index: int) -> None:
        self._sent = max(self._sent, chunk_index)

    def chunk_shown(self, chunk_index: int, buffered_ms: float, now: float) -> None:
        """Note a client's report. Reports of other modes than `playback` only correct the deadline.

        The virtual viewer isn't moved: whoever reports an empty buffer would otherwise be ahead of him for ever more.
        """
        if self.mode is Pacing.PLAYBACK:
            self._shown = max(self._shown, chunk_index)
        self._dry_at = now + buffered_ms / 1000

    def resume(self, last_chunk_index: int, now: float) -> None:
        """Go on with a client that holds everything up to `last_chunk_index` and may have lost its player's buffer."""
        self._sent = last_chunk_index
        self._shown = max(self._shown, last_chunk_index)
        self._dry_at = self._plays_until = now
        self._viewer_starts = deque(entry for entry in self._viewer_starts if entry[0] > last_chunk_index)

    def restart(self) -> None:
        """Begin a run."""
        self._shown = -1
        self._sent = -1
        self._dry_at = self._plays_until = None
        self._viewer_starts.clear()

    def _viewer_reaches(self, chunk_index: int, now: float) -> float | None:
        while self._viewer_starts and self._viewer_starts[0][1] <= now:
            self._shown = max(self._shown, self._viewer_starts.popleft()[0])
        if chunk_index <= self._shown:
            return now
        for index, starts_at in self._viewer_starts:
            if index >= chunk_index:
                return starts_at
        return None
