"""Which latent frames of a session are resident, in which pages, and what a chunk sees. Plain Python over ints.

Sink S, window W, chunk in flight [first, end): frames 0..S-1 and the last W frames before `end` are visible (all frames
while `end` <= S + W, or if the window is unlimited). Frames carry absolute indices since the start of the run.

In an extent, frame f lies in slot f while f < S, else in slot S + (f - S) % W:

    slot   0 .. S-1 | S .. S+W-1
           sink     | ring: frame f replaces frame f - W, which a chunk that ends after f can't see

so the visible set always fills slots 0 .. count-1, and a chunk writes only where frames outside its own visible set
lie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcache.errors import FramesLost, WindowFull
from kvcache.pages import PageId, PageLedger
from kvcache.spec import AtWindow, KVSpec, Storage


def visible_latent_frames(spec: KVSpec, end: int) -> tuple[int, ...]:
    """Return the frames that a chunk ending before frame `end` sees, ascending, its own included."""
    sink, window = spec.sink_latent_frames, spec.window_latent_frames
    if window is None or end <= sink + window:
        return tuple(range(end))
    return (*range(sink), *range(end - window, end))


def ring_slot(spec: KVSpec, frame: int) -> int:
    """Return the slot of `frame` in its extent, in latent frames."""
    sink, window = spec.sink_latent_frames, spec.window_latent_frames
    assert window is not None, "extents have a bounded window"
    return frame if frame < sink else sink + (frame - sink) % window


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChunk:
    """A chunk in flight as the accounting sees it.

    `visible` is in storage order: by slot in an extent, ascending in pages. `pages` and `visible_pages` give per frame
    the page of each local branch. `taken` are the pages that a rollback gives back. `extent` is the index of the
    extent that holds all of these, None in pages.
    """

    first_latent_frame: int
    num_latent_frames: int
    visible: tuple[int, ...]
    pages: tuple[tuple[PageId, ...], ...]
    visible_pages: tuple[tuple[PageId, ...], ...]
    taken: tuple[PageId, ...]
    overwritten: tuple[int, ...]
    extent: int | None

    @property
    def latent_frames(self) -> range:
        return range(self.first_latent_frame, self.end_latent_frame)

    @property
    def end_latent_frame(self) -> int:
        return self.first_latent_frame + self.num_latent_frames

    @property
    def history(self) -> tuple[int, ...]:
        """The committed frames that the chunk sees, ascending."""
        return tuple(sorted(frame for frame in self.visible if frame < self.first_latent_frame))


class PageTable:
    """Resident frames of one session. A chunk is staged, then committed or rolled back; eviction is part of commit.

    `extent` is the index of the session's extent, or None if pages come from the ledger's free list. `extents` counts
    the extents of the pool; only a chunk that writes history anew needs it.
    """

    def __init__(
        self,
        spec: KVSpec,
        ledger: PageLedger,
        session_id: str,
        *,
        extent: int | None,
        extents: PageLedger | None = None,
    ) -> None:
        assert (extent is None) == (spec.effective_storage is Storage.PAGES), "an extent belongs to extent storage"
        self._spec = spec
        self._ledger = ledger
        self._session_id = session_id
        self._extent = extent
        self._extents = extents
        self._pages: dict[int, tuple[PageId, ...]] = {}
        self._lost: frozenset[int] = frozenset()
        self.num_latent_frames = 0

    @property
    def extent(self) -> int | None:
        return self._extent

    @property
    def resident(self) -> tuple[int, ...]:
        """Committed frames that hold pages, ascending."""
        return tuple(sorted(self._pages))

    def held_pages(self) -> list[PageId]:
        return [page for pages in self._pages.values() for page in pages]

    def stage(self, num_latent_frames: int) -> StagedChunk:
        """Plan the next chunk and take its pages.

        Raises ValueError for a chunk longer than the spec's, WindowFull if frames would have to go and may not,
        FramesLost if an earlier rolled-back chunk overwrote frames of the visible set.
        """
        chunk = self._spec.latent_frames_per_chunk
        if not 1 <= num_latent_frames <= chunk:
            raise ValueError(f"num_latent_frames must be 1..{chunk}, got {num_latent_frames}")
        first, end = self.num_latent_frames, self.num_latent_frames + num_latent_frames
        self._check_room(first, end)
        visible = visible_latent_frames(self._spec, end)
        lost = tuple(sorted(self._lost.intersection(visible)))
        if lost:
            raise FramesLost(lost, num_latent_frames=num_latent_frames)
        if self._extent is not None:
            visible = tuple(sorted(visible, key=lambda frame: ring_slot(self._spec, frame)))
        pages, taken = self._take(range(first, end), self._extent)
        staged_pages = dict(zip(range(first, end), pages, strict=True))
        reused = {page for frame_pages in pages for page in frame_pages}.difference(taken)
        return StagedChunk(
            first_latent_frame=first,
            num_latent_frames=num_latent_frames,
            visible=visible,
            pages=pages,
            visible_pages=tuple(staged_pages.get(frame) or self._pages[frame] for frame in visible),
            taken=taken,
            overwritten=tuple(sorted(frame for frame, held in self._pages.items() if reused.intersection(held))),
            extent=self._extent,
        )

    def _check_room(self, first: int, end: int) -> None:
        spec = self._spec
        slides = spec.at_window is AtWindow.SLIDE and spec.window_latent_frames is not None
        if not slides and end > spec.session_latent_frames:
            raise WindowFull(
                first_latent_frame=first,
                num_latent_frames=end - first,
                max_latent_frames=spec.session_latent_frames,
            )

    def _take(self, frames: range, extent: int | None) -> tuple[tuple[tuple[PageId, ...], ...], tuple[PageId, ...]]:
        """Return the pages of each frame, and those among them that were free until now."""
        pages: list[tuple[PageId, ...]] = []
        taken: list[PageId] = []
        for frame in frames:
            frame_pages: list[PageId] = []
            for slot in range(self._spec.num_local_branches):
                if extent is None:
                    page = self._ledger.take(self._session_id)
                    taken.append(page)
                else:
                    page = self._extent_page(extent, frame, slot)
                    # A page that this session owns holds the frame that this one replaces.
                    if self._ledger.owner_of(page) != self._session_id:
                        taken.append(self._ledger.take_exact(page, self._session_id))
                frame_pages.append(page)
            pages.append(tuple(frame_pages))
        return tuple(pages), tuple(taken)

    def _extent_page(self, extent: int, frame: int, slot: int) -> PageId:
        index = extent * self._spec.num_local_branches + slot
        return PageId(index * self._spec.session_latent_frames + ring_slot(self._spec, frame))

    def stage_copy(self, staged: StagedChunk) -> StagedChunk:
        """Plan the same chunk with new places for all frames it sees; gives back what `staged` had taken.

        Nothing that the session holds is written over. A commit frees the old places, a rollback the new ones.
        """
        assert self._spec.rewritable_history, "storage for a copy of history was not planned"
        self.rollback(staged)
        extent = None if self._extent is None else self._take_extent()
        places = {frame: self._take_new(frame, extent) for frame in staged.visible}
        return replace(
            staged,
            pages=tuple(places[frame] for frame in staged.latent_frames),
            visible_pages=tuple(places.values()),
            taken=tuple(page for pages in places.values() for page in pages),
            overwritten=(),
            extent=extent,
        )

    def stage_restart(self, staged: StagedChunk, num_latent_frames: int) -> StagedChunk:
        """Plan a chunk at frame 0 that sees no history, in new places; gives back what `staged` had taken.

        A commit frees all that the session held, a rollback the new places. Raises ValueError for a chunk longer than
        the spec's.
        """
        assert self._spec.rewritable_history, "storage for a second run was not planned"
        chunk = self._spec.latent_frames_per_chunk
        if not 1 <= num_latent_frames <= chunk:
            raise ValueError(f"num_latent_frames must be 1..{chunk}, got {num_latent_frames}")
        self.rollback(staged)
        extent = None if self._extent is None else self._take_extent()
        frames = range(num_latent_frames)
        places = {frame: self._take_new(frame, extent) for frame in frames}
        return StagedChunk(
            first_latent_frame=0,
            num_latent_frames=num_latent_frames,
            visible=tuple(frames),
            pages=tuple(places.values()),
            visible_pages=tuple(places.values()),
            taken=tuple(page for pages in places.values() for page in pages),
            overwritten=(),
            extent=extent,
        )

    def stage_draft(self, staged: StagedChunk, num_latent_frames: int) -> StagedChunk:
        """Plan frames after those of a chunk in flight, which see it and its history. `drop_draft` ends them.

        Raises ValueError for more frames than the spec's, WindowFull if they do not fit beside what they see.
        """
        most = self._spec.draft_latent_frames
        if not 1 <= num_latent_frames <= most:
            raise ValueError(f"a draft must have 1..{most} latent frames, got {num_latent_frames}")
        first, end = staged.end_latent_frame, staged.end_latent_frame + num_latent_frames
        self._check_room(first, end)
        pages, taken = self._take(range(first, end), staged.extent)
        return StagedChunk(
            first_latent_frame=first,
            num_latent_frames=num_latent_frames,
            visible=(*staged.visible, *range(first, end)),
            pages=pages,
            visible_pages=(*staged.visible_pages, *pages),
            taken=taken,
            overwritten=(),
            extent=staged.extent,
        )

    def drop_draft(self, draft: StagedChunk) -> None:
        """Give back what a draft took."""
        for page in draft.taken:
            self._ledger.give_back(page, self._session_id)

    def _take_extent(self) -> int:
        assert self._extents is not None, "another extent needs the ledger of extents"
        return int(self._extents.take(self._session_id))

    def _take_new(self, frame: int, extent: int | None) -> tuple[PageId, ...]:
        slots = range(self._spec.num_local_branches)
        if extent is None:
            return tuple(self._ledger.take(self._session_id) for _ in slots)
        pages = (self._extent_page(extent, frame, slot) for slot in slots)
        return tuple(self._ledger.take_exact(page, self._session_id) for page in pages)

    def mark_overwritten(self, staged: StagedChunk) -> None:
        """Remember that the chunk in flight has begun to write over the frames it evicts."""
        self._lost = self._lost.union(staged.overwritten)

    def commit(self, staged: StagedChunk) -> None:
        """Make the chunk's frames resident and free the pages of frames that left the window."""
        kept = {page for pages in staged.visible_pages for page in pages}
        for page in self.held_pages():
            if page not in kept:
                self._ledger.give_back(page, self._session_id)
        self._pages = dict(zip(staged.visible, staged.visible_pages, strict=True))
        if staged.extent != self._extent:
            self._free_extent(self._extent)
            self._extent = staged.extent
        self._lost = frozenset()
        self.num_latent_frames = staged.end_latent_frame

    def rollback(self, staged: StagedChunk) -> None:
        """Give back what the chunk took; the resident frames stay."""
        for page in staged.taken:
            self._ledger.give_back(page, self._session_id)
        if staged.extent != self._extent:
            self._free_extent(staged.extent)

    def _free_extent(self, extent: int | None) -> None:
        assert extent is not None, "only extents move"
        assert self._extents is not None, "a copy needs the ledger of extents"
        self._extents.give_back(PageId(extent), self._session_id)

    def clear(self) -> None:
        """Free all pages and count frames from 0 again."""
        for page in self.held_pages():
            self._ledger.give_back(page, self._session_id)
        self._pages.clear()
        self._lost = frozenset()
        self.num_latent_frames = 0
