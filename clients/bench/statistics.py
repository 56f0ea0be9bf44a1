"""The arithmetic of the benchmark: pure functions whose docstrings are the definitions.

Notation: chunk k of a session arrives at a[k] seconds and holds n[k] media frames; chunk 0 is the first. A viewer plays
f frames a second, so chunk k lasts d[k] = n[k] / f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from clients.bench.samples import ChunkSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A set of numbers in seven. Percentiles as `percentile` defines them."""

    count: int
    mean: float
    median: float
    p95: float
    p99: float
    min: float
    max: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share (0 to 1) of the values lies, interpolated linearly.

    With x sorted and h = share * (len(x) - 1):  x[floor h] + (h - floor h) * (x[floor h + 1] - x[floor h]).
    (R. J. Hyndman and Y. Fan, Sample Quantiles in Statistical Packages, 1996, definition 7.) Raises ValueError for no
    values or a share outside 0 to 1.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"expected values and a share from 0 to 1, got {len(values)} values and {share}")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def summarize(values: Sequence[float]) -> Summary | None:
    """Return the summary of some values, None of none."""
    if not values:
        return None
    return Summary(
        count=len(values),
        mean=math.fsum(values) / len(values),
        median=median(values),
        p95=percentile(values, 0.95),
        p99=percentile(values, 0.99),
        min=min(values),
        max=max(values),
    )


def steady(chunks: Sequence[ChunkSample], after_chunk: int) -> list[ChunkSample]:
    """Return the chunks made after chunk `after_chunk` had arrived, without that chunk: those with k > after_chunk."""
    return [chunk for chunk in chunks if chunk.chunk_index > after_chunk]


def intervals_ms(chunks: Sequence[ChunkSample], after_chunk: int) -> list[float]:
    """Return the chunk intervals after a chunk: 1000 * (a[k] - a[k - 1]) for every k > after_chunk.

    The first of them begins when chunk `after_chunk` arrives. `chunks` are consecutive and in order.
    """
    return [
        1000 * (later.arrived_s - earlier.arrived_s)
        for earlier, later in pairwise(chunks)
        if earlier.chunk_index >= after_chunk
    ]


def media_fps(sessions: Sequence[Sequence[ChunkSample]], after_chunk: int) -> float | None:
    """Return the media frames a second that one session gets, on average over the sessions.

    (sum of n[k] over k > after_chunk) / (a[last] - a[after_chunk]), both sums over all sessions. None if no session has
    a chunk after that one.
    """
    num_frames, wall_s = 0, 0.0
    for chunks in sessions:
        num_frames += sum(chunk.num_frames for chunk in steady(chunks, after_chunk))
        wall_s += math.fsum(intervals_ms(chunks, after_chunk)) / 1000
    return num_frames / wall_s if wall_s > 0 else None


def realtime_factor(rate_fps: float, viewer_fps: float) -> float:
    """Return media time over wall time: rate / viewer rate. 1 or more keeps up with the viewer; higher is better."""
    return rate_fps / viewer_fps


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewing:
    """What a viewer of one session saw. `shown_s[k]` is when chunk k came on screen, `stalls_s[k]` the wait before."""

    shown_s: list[float]
    stalls_s: list[float]
    played_s: float

    @property
    def num_on_time(self) -> int:
        """Number of chunks after the first that were there when the viewer needed them: those with stalls_s[k] = 0."""
        return sum(stall_s == 0 for stall_s in self.stalls_s[1:])

    @property
    def num_deadlines(self) -> int:
        """Number of chunks that had a deadline: all but the first."""
        return max(0, len(self.stalls_s) - 1)


def view(chunks: Sequence[ChunkSample], viewer_fps: float) -> Viewing:
    """Play a session to a viewer who starts with the first chunk, and waits for a chunk that is late.

    shown[0] = a[0];  shown[k] = max(a[k], shown[k - 1] + d[k - 1]);  stall[k] = shown[k] - (shown[k - 1] + d[k - 1]).
    The second term is the deadline of chunk k. `played_s` is the sum of d[k] without the last.
    """
    shown_s: list[float] = []
    stalls_s: list[float] = []
    deadline_s = 0.0
    for chunk in chunks:
        deadline_s = deadline_s if shown_s else chunk.arrived_s
        shown_s.append(max(chunk.arrived_s, deadline_s))
        stalls_s.append(shown_s[-1] - deadline_s)
        deadline_s = shown_s[-1] + chunk.num_frames / viewer_fps
    played_s = math.fsum(chunk.num_frames / viewer_fps for chunk in chunks[:-1])
    return Viewing(shown_s=shown_s, stalls_s=stalls_s, played_s=played_s)


def deadline_attainment(viewings: Sequence[Viewing]) -> float | None:
    """Return the share of deadlines that were met, over all sessions; None if there were none."""
    num_deadlines = sum(viewing.num_deadlines for viewing in viewings)
    return sum(viewing.num_on_time for viewing in viewings) / num_deadlines if num_deadlines else None


def stall_share(viewings: Sequence[Viewing]) -> float | None:
    """Return the viewers' waiting time over their wall time, over all sessions; None if nothing was played.

    (sum of stall[k]) / (sum of stall[k] + played). The wall time of a viewer goes from the first chunk on screen to the
    last chunk on screen, which is what stalls and played time add up to.
    """
    waited_s = math.fsum(stall_s for viewing in viewings for stall_s in viewing.stalls_s)
    wall_s = waited_s + math.fsum(viewing.played_s for viewing in viewings)
    return waited_s / wall_s if wall_s > 0 else None


def first_media_frame(latent_frame: int, *, num_media_frames: int, num_latent_frames: int, is_first_chunk: bool) -> int:
    """Return the first media frame of a latent frame, both counted from 0 inside their chunk of n frames in L.

    The first latent frame of a run is one media frame, all others are e: e = (n - 1) / (L - 1) in chunk 0, n / L later.
    So latent frame i > 0 begins at n - e * (L - i). Rounded down where e is not whole.
    """
    if latent_frame <= 0:
        return 0
    if is_first_chunk:
        return num_media_frames - (num_media_frames - 1) * (num_latent_frames - latent_frame) // (num_latent_frames - 1)
    return num_media_frames * latent_frame // num_latent_frames
