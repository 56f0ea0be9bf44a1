"""From the accounting of a chunk in flight to row and page indices of the storage. Plain Python over ints.

Rows of an extent, in tokens:

    0 .. R-1                    | R .. R + frames * T - 1
    registers, aligned to the end | sink and ring, T tokens a frame

A chunk with r registers reads rows R - r up to the end of the visible frames: one contiguous run, whatever r is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.page_table import StagedChunk, ring_slot
from kvcache.spec import KVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRun:
    """Rows `source_row ..` of a chunk's tokens that go to rows `target_row ..` of an extent."""

    source_row: int
    target_row: int
    num_rows: int


def layer_extents(spec: KVSpec, staged: StagedChunk, layer: int) -> slice:
    """Return the indices, in the storage of a layer, of the session's extents: one for each stream of the layer."""
    assert staged.extent is not None, "the chunk is not stored in extents"
    streams = spec.layer_slots(layer)
    return slice(staged.extent * streams, (staged.extent + 1) * streams)


def visible_rows(spec: KVSpec, staged: StagedChunk) -> tuple[int, int]:
    """Return first and end row of the visible frames in an extent, without registers."""
    first = spec.register_tokens
    return first, first + len(staged.visible) * spec.tokens_per_latent_frame


def write_runs(spec: KVSpec, staged: StagedChunk) -> tuple[RowRun, ...]:
    """Return where the chunk's tokens go in an extent, as few runs as there are (two when the ring wraps)."""
    return frame_runs(spec, staged.latent_frames)


def frame_runs(spec: KVSpec, latent_frames: Iterable[int]) -> tuple[RowRun, ...]:
    """Return where the tokens of frames, given one after the other, lie in an extent."""
    tokens = spec.tokens_per_latent_frame
    runs: list[RowRun] = []
    for index, frame in enumerate(latent_frames):
        target = spec.register_tokens + ring_slot(spec, frame) * tokens
        last = runs[-1] if runs else None
        if last is not None and last.target_row + last.num_rows == target:
            runs[-1] = RowRun(source_row=last.source_row, target_row=last.target_row, num_rows=last.num_rows + tokens)
        else:
            runs.append(RowRun(source_row=index * tokens, target_row=target, num_rows=tokens))
    return tuple(runs)


def first_rows(spec: KVSpec, latent_frames: Iterable[int]) -> tuple[int, ...]:
    """Return the first row of each frame in its extent."""
    tokens = spec.tokens_per_latent_frame
    return tuple(spec.register_tokens + ring_slot(spec, frame) * tokens for frame in latent_frames)


def chunk_pages(staged: StagedChunk, local_slot: int) -> tuple[int, ...]:
    """Return the page of each frame of the chunk, for one local branch."""
    return tuple(pages[local_slot] for pages in staged.pages)


def visible_pages(staged: StagedChunk, local_slot: int) -> tuple[int, ...]:
    """Return the page of each visible frame in storage order, for one local branch."""
    return tuple(pages[local_slot] for pages in staged.visible_pages)


def pages_of(staged: StagedChunk, local_slot: int, latent_frames: Iterable[int]) -> tuple[int, ...]:
    """Return the page of each of these visible frames, for one local branch."""
    places = dict(zip(staged.visible, staged.visible_pages, strict=True))
    return tuple(places[frame][local_slot] for frame in latent_frames)
