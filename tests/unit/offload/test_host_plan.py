"""Where runtime tensors lie on the host, and why a kind does not apply."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.errors import PlanRefused
from offload.host_plan import HostKind, Recipe, StoredTensor, plan_host_weights
from offload.layout import TensorSpec

BF16 = torch.bfloat16
FILE = Path("model.safetensors")


def stored(
    key: str, start_byte: int, *, rows: int = 4, dtype: torch.dtype = BF16, span_bytes: int | None = None
) -> StoredTensor:
    return StoredTensor(key=key, file=FILE, start_byte=start_byte, dtype=dtype, shape=(rows, 2), span_bytes=span_bytes)


def recipe(name: str, *keys: str, rows: int = 4, transform: str | None = None) -> Recipe:
    tensor = TensorSpec(name=name, dtype=BF16, shape=(rows, 2))
    return Recipe(tensor=tensor, keys=keys, transform=transform)


CHECKPOINT = {"q": [stored("q", 0)], "k": [stored("k", 100)], "o": [stored("o", 200)]}


def test_a_checkpoint_whose_bytes_stay_is_bound_to_file_and_key() -> None:
    plan = plan_host_weights(
        HostKind.CHECKPOINT_MMAP, [recipe("qk", "q", "k", rows=8), recipe("output", "o")], CHECKPOINT
    )

    assert plan.kind is HostKind.CHECKPOINT_MMAP
    assert [(each.key, each.start_byte) for each in plan.bindings["qk"].stored] == [("q", 0), ("k", 100)]
    assert plan.bindings["output"].stored[0].file == FILE


WRONG = {
    "changed": ([recipe("o", "o", transform="float8 by row")], CHECKPOINT, r"bytes change: float8 by row \(o\)"),
    "missing": ([recipe("v", "v")], CHECKPOINT, r"stored in no file \(v\)"),
    "ambiguous": ([recipe("q", "q")], {"q": [stored("q", 0), stored("q", 0)]}, "ambiguous"),
    "tied": ([recipe("a", "q"), recipe("b", "q")], CHECKPOINT, r"tied: .* \(q\)"),
    "aliased": ([recipe("a", "q")], {"q": [stored("q", 0)], "k": [stored("k", 15)]}, r"aliased: .*\(q and k\)"),
    "scattered": ([recipe("a", "q")], {"q": [stored("q", 0, span_bytes=40)]}, "not stored contiguously"),
    "other type": (
        [recipe("a", "q")],
        {"q": [stored("q", 0, dtype=torch.float32)]},
        r"stored as torch\.float32, computed with as torch\.bfloat16",
    ),
    "other columns": (
        [Recipe(tensor=TensorSpec(name="a", dtype=BF16, shape=(2, 4)), keys=("q",))],
        CHECKPOINT,
        "do not add up",
    ),
    "other rows": ([recipe("a", "q", rows=5)], CHECKPOINT, "do not add up"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_reason(name: str) -> None:
    recipes, checkpoint, reason = WRONG[name]

    with pytest.raises(PlanRefused, match=rf"host weights 'checkpoint_mmap' can't be used: .*?{reason}"):
        plan_host_weights(HostKind.CHECKPOINT_MMAP, recipes, checkpoint)


@pytest.mark.parametrize("name", WRONG)
def test_where_the_configuration_allows_it_ordinary_memory_takes_its_place(name: str) -> None:
    recipes, checkpoint, _ = WRONG[name]

    plan = plan_host_weights(HostKind.CHECKPOINT_MMAP, recipes, checkpoint, falls_back=True)

    assert plan.kind is HostKind.ORDINARY
    assert plan.bindings == {}
    assert len(plan.reasons) >= 1


def test_a_reason_that_holds_for_many_tensors_is_said_once() -> None:
    recipes = [recipe(f"w{number}", f"w{number}") for number in range(5)]

    plan = plan_host_weights(HostKind.CHECKPOINT_MMAP, recipes, {}, falls_back=True)

    assert plan.reasons == ("stored in no file (w0, w1, w2 and 2 more)",)


def test_a_runtime_cache_needs_a_folder() -> None:
    assert plan_host_weights(HostKind.RUNTIME_CACHE, [], {}, cache_folder=Path("cache")).kind is HostKind.RUNTIME_CACHE
    with pytest.raises(PlanRefused, match="no folder"):
        plan_host_weights(HostKind.RUNTIME_CACHE, [], {})


def test_ordinary_memory_always_applies() -> None:
    assert plan_host_weights(HostKind.ORDINARY, [recipe("v", "v")], {}).kind is HostKind.ORDINARY
