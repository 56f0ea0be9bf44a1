"""The host weight plan: where every runtime tensor lies on the host, decided before anything is loaded or changed.

    kind              the bytes are                                        applies if
    checkpoint_mmap   those of the checkpoint's own files, mapped          nothing about them has to change
    runtime_cache     a file with the final layout, mapped                 a folder for it is configured
    ordinary          memory of this process                               always

Both mapped kinds are shared by all processes of a host that serve the same weights.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from offload.errors import PlanRefused
from offload.layout import TensorSpec

MAX_NAMES = 3
"""Names per reason: one reason usually holds for hundreds of tensors."""


class HostKind(StrEnum):
    """What kind of host memory the weights of streamed layers are in."""

    CHECKPOINT_MMAP = "checkpoint_mmap"
    RUNTIME_CACHE = "runtime_cache"
    ORDINARY = "ordinary"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint, from its file's header. `dtype` of None: a type that torch does not have.

    `span_bytes` are those from its first to its last in the file, None for as many as it has.
    """

    key: str
    file: Path
    start_byte: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    span_bytes: int | None = None

    @property
    def is_contiguous(self) -> bool:
        """Tell whether nothing else lies between its numbers."""
        return self.dtype is None or self.span_bytes in (None, self.num_bytes)

    @property
    def num_bytes(self) -> int:
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    @property
    def end_byte(self) -> int:
        return self.start_byte + self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a runtime tensor comes out of a checkpoint: the rows of `keys` below each other, then maybe `transform`.

    `transform` names what changes the bytes ("float8 by row"); None says that nothing does.
    """

    tensor: TensorSpec
    keys: tuple[str, ...]
    transform: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A runtime tensor and the stored ones whose bytes, one after the other, are its own."""

    tensor: TensorSpec
    stored: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The decision. `reasons` say why a kind that was wished for does not apply; `bindings` are of mapped checkpoints.

    The binding of a tensor in a runtime cache is its name: the cache's own header says where it lies.
    """

    kind: HostKind
    bindings: Mapping[str, Binding]
    reasons: tuple[str, ...] = ()


def plan_host_weights(
    wished: HostKind,
    recipes: Sequence[Recipe],
    stored: Mapping[str, Sequence[StoredTensor]],
    *,
    cache_folder: Path | None = None,
    falls_back: bool = False,
) -> HostPlan:
    """Decide where the weights will be. Reads and changes nothing.

    `stored` has every tensor of the checkpoint by key, with all the places where the key was found. With `falls_back`
    what does not apply becomes `ORDINARY`, with the reasons in the plan. Raises `PlanRefused` without it.
    """
    match wished:
        case HostKind.ORDINARY:
            return HostPlan(kind=wished, bindings={})
        case HostKind.RUNTIME_CACHE:
            reasons = [] if cache_folder is not None else ["no folder for the cache is configured"]
        case HostKind.CHECKPOINT_MMAP:
            reasons = list(find_reasons(recipes, stored))
    if not reasons:
        return HostPlan(kind=wished, bindings=_bind(recipes, stored) if wished is HostKind.CHECKPOINT_MMAP else {})
    if not falls_back:
        raise PlanRefused(f"host weights {wished.value!r}", *reasons)
    return HostPlan(kind=HostKind.ORDINARY, bindings={}, reasons=tuple(reasons))


def find_reasons(recipes: Sequence[Recipe], stored: Mapping[str, Sequence[StoredTensor]]) -> Iterator[str]:
    """Yield a sentence for everything that keeps the runtime tensors from being the checkpoint's bytes."""
    found: dict[str, list[str]] = {}
    for recipe in recipes:
        for reason in _reasons_of(recipe, stored):
            found.setdefault(reason, []).append(recipe.tensor.name)
    uses = Counter(key for recipe in recipes if recipe.transform is None for key in recipe.keys)
    tied = [key for key, count in uses.items() if count > 1]
    if tied:
        found["tied: used by several runtime tensors"] = tied
    aliased = list(_aliased(stored))
    if aliased:
        found["aliased: two names share bytes"] = aliased
    for reason, names in found.items():
        shown = ", ".join(names[:MAX_NAMES])
        rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        yield f"{reason} ({shown}{rest})"


def _reasons_of(recipe: Recipe, stored: Mapping[str, Sequence[StoredTensor]]) -> Iterator[str]:
    if recipe.transform is not None:
        yield f"the bytes change: {recipe.transform}"
    places = [stored.get(key, ()) for key in recipe.keys]
    if any(not candidates for candidates in places):
        yield "stored in no file"
        return
    if any(len(candidates) > 1 for candidates in places):
        yield "ambiguous: stored several times"
        return
    tensors = [candidates[0] for candidates in places]
    if any(not tensor.is_contiguous for tensor in tensors):
        yield "not stored contiguously"
    types = {tensor.dtype for tensor in tensors}
    if types != {recipe.tensor.dtype}:
        shown = ", ".join(sorted(str(dtype) for dtype in types))
        yield f"stored as {shown}, computed with as {recipe.tensor.dtype}"
    elif sum(tensor.num_bytes for tensor in tensors) != recipe.tensor.num_bytes or any(
        tensor.shape[1:] != recipe.tensor.shape[1:] for tensor in tensors
    ):
        yield "the stored rows do not add up to the tensor"


def _aliased(stored: Mapping[str, Sequence[StoredTensor]]) -> Iterator[str]:
    by_file: dict[Path, list[StoredTensor]] = {}
    for candidates in stored.values():
        for tensor in candidates:
            if tensor.num_bytes:
                by_file.setdefault(tensor.file, []).append(tensor)
    for tensors in by_file.values():
        ordered = sorted(tensors, key=lambda tensor: tensor.start_byte)
        for before, tensor in itertools.pairwise(ordered):
            if tensor.start_byte < before.end_byte:
                yield f"{before.key} and {tensor.key}"


def _bind(recipes: Sequence[Recipe], stored: Mapping[str, Sequence[StoredTensor]]) -> dict[str, Binding]:
    return {
        recipe.tensor.name: Binding(tensor=recipe.tensor, stored=tuple(stored[key][0] for key in recipe.keys))
        for recipe in recipes
    }
