"""History written anew inside a chunk in flight: a copy of what the chunk sees, replaced part by part.

The copy lies in spare storage, so that the session's own K/V stays until the commit. A part is a run of history frames
that one forward computes together. It attends to the history before its end, as it stands in the copy: parts that are
run in ascending order see each other as later ones of a session's first life would.

Does not import torch when imported. Shapes: N tokens of a part, or query tokens; S visible rows; H heads; D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvcache.checks import check_rows
from kvcache.errors import ChunkIncomplete
from kvcache.spec import KVSpec

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.attention import Attention
    from kvcache.cross_store import CrossStore
    from kvcache.pool import BoundChunk, WritableRows


class Locate(Protocol):
    """Check that the chunk is open and a layer and branch exist; return the branch's local slot."""

    def __call__(self, action: str, layer: int, branch: int) -> int: ...


class FindCrossStore(Protocol):
    def __call__(self, name: str, *, branch: int = 0) -> CrossStore: ...


class HistoryRewrite:
    """Made by `ChunkTransaction.rewrite_history`; valid until the chunk ends. Frames of no part stay as they were."""

    def __init__(
        self,
        *,
        spec: KVSpec,
        latent_frames: tuple[int, ...],
        bound: BoundChunk,
        like: Tensor,
        attention: Attention,
        locate: Locate,
        cross_store: FindCrossStore,
    ) -> None:
        self.latent_frames = latent_frames
        """The committed frames that the chunk sees, ascending."""
        self.spec = spec
        self.bound = bound
        self.like = like
        self.attention = attention
        self.locate = locate
        self.cross_store = cross_store
        self._parts: list[HistoryPart] = []

    def part(self, latent_frames: range) -> HistoryPart:
        """Begin to write these frames anew. Raises ValueError unless all are history and of no part yet."""
        begun = {frame for part in self._parts for frame in part.latent_frames}
        wrong = [frame for frame in latent_frames if frame not in self.latent_frames or frame in begun]
        if wrong or not latent_frames or latent_frames.step != 1:
            raise ValueError(
                f"latent_frames: expected a run of the history {self.latent_frames} outside the parts before, got "
                f"{latent_frames}, of which {wrong} do not fit"
            )
        part = HistoryPart(self, latent_frames)
        self._parts.append(part)
        return part

    def require_complete(self) -> None:
        """Raise ChunkIncomplete if a part lacks K/V of a layer."""
        for part in self._parts:
            part.require_complete()


class HistoryPart:
    """A run of history frames in the copy; has the methods that a forward needs of a chunk."""

    def __init__(self, rewrite: HistoryRewrite, latent_frames: range) -> None:
        self.latent_frames = latent_frames
        self._rewrite = rewrite
        self._visible = tuple(frame for frame in rewrite.latent_frames if frame < latent_frames.stop)
        self._written: set[tuple[int, int]] = set()

    @property
    def first_latent_frame(self) -> int:
        return self.latent_frames.start

    @property
    def num_latent_frames(self) -> int:
        return len(self.latent_frames)

    def write(self, layer: int, k_NHD: Tensor, v_NHD: Tensor, *, branch: int = 0) -> None:
        """Copy K and V of one layer to the rows of the part. May be repeated.

        Raises ValueError for another shape, dtype or device than the cache's.
        """
        slot = self._rewrite.locate("write", layer, branch)
        spec = self._rewrite.spec
        shape = (len(self.latent_frames) * spec.tokens_per_latent_frame, spec.num_kv_heads, spec.head_dim)
        check_rows(f"K of layer {layer}", k_NHD, shape, self._rewrite.like)
        check_rows(f"V of layer {layer}", v_NHD, shape, self._rewrite.like)
        self._rewrite.bound.write_frames(layer, slot, self.latent_frames, k_NHD, v_NHD)
        self._written.add((layer, slot))

    def rows_to_write(self, layer: int, *, branch: int = 0) -> WritableRows:
        """Return the part's rows of one layer for a kernel that writes K and V in place; counts as `write`."""
        slot = self._rewrite.locate("rows_to_write", layer, branch)
        self._written.add((layer, slot))
        return self._rewrite.bound.writable(layer, slot, self.latent_frames)

    def attend(self, layer: int, q_NHD: Tensor, *, branch: int = 0) -> Tensor:
        """Return attention [N, H, D] of any queries over the part and the history before it, registers left out.

        Raises ChunkIncomplete if the part's own K/V of this layer was not written.
        """
        slot = self._rewrite.locate("attend", layer, branch)
        if (layer, slot) not in self._written:
            raise ChunkIncomplete(f"attend: {self.latent_frames} has no new K/V of layer {layer} of branch {branch}")
        k_SHD, v_SHD = self._rewrite.bound.read_frames(layer, slot, self._visible)
        return self._rewrite.attention(q_NHD, k_SHD, v_SHD)

    def cross_store(self, name: str, *, branch: int = 0) -> CrossStore:
        """Return a cross store as the chunk in flight sees it."""
        return self._rewrite.cross_store(name, branch=branch)

    def require_complete(self) -> None:
        """Raise ChunkIncomplete unless every layer of every local branch was written."""
        spec = self._rewrite.spec
        expected = sum(spec.layer_slots(layer) for layer in range(spec.num_layers))
        if len(self._written) != expected:
            raise ChunkIncomplete(
                f"commit: history frames {self.latent_frames} were begun anew, but only {len(self._written)} of "
                f"{expected} layers were written"
            )
