"""Values at fixed addresses: what is copied, what stays, and what is refused."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pytest
import torch

from worldmodel.wan.fixed_value import ALIGNMENT_BYTES, FixedValue, map_tensors, tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    first: torch.Tensor
    second: torch.Tensor | None
    number: int = 3


def value(start: float, *, rows: int = 2) -> tuple[Pair, tuple[torch.Tensor, ...]]:
    shared = Pair(first=torch.full((rows, 3), start, dtype=torch.bfloat16), second=None)
    return shared, (torch.tensor(start + 1), torch.full((5,), start + 2, dtype=torch.complex64))


def test_a_value_keeps_its_make_and_its_places() -> None:
    fixed = FixedValue(value(1.0))
    places = [tensor.data_ptr() for tensor in tensors_of(fixed.value)]
    assert all((place - places[0]) % ALIGNMENT_BYTES == 0 for place in places)
    fixed.load(value(4.0))
    for got, want in zip(tensors_of(fixed.value), tensors_of(value(4.0)), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert [tensor.data_ptr() for tensor in tensors_of(fixed.value)] == places
    assert (fixed.value[0].second, fixed.value[0].number) == (None, 3)


def test_what_occurs_twice_stays_one_object() -> None:
    pair = Pair(first=torch.ones(2), second=torch.zeros(2))
    made = map_tensors((pair, pair, pair.first), torch.neg)
    assert made[0] is made[1]
    assert made[2] is made[0].first
    assert len(tensors_of((pair, pair, pair.first))) == 2


@pytest.mark.parametrize("holder", [[torch.ones(1)], {"first": torch.ones(1)}], ids=["list", "dict"])
def test_what_would_hide_tensors_is_refused(holder: object) -> None:
    with pytest.raises(TypeError, match=f"got a {type(holder).__name__}"):
        FixedValue((torch.ones(1), holder))


def test_a_tensor_that_is_not_contiguous_is_copied_as_it_is_read() -> None:
    given = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(FixedValue((given,)).value[0], given)


def test_constants_are_packed_once_and_come_back() -> None:
    first, second = value(1.0), value(2.0)
    fixed = FixedValue(first)
    own_bytes = fixed.num_bytes
    for given in (first, second, first, second, second):
        fixed.load_constant(given)
        assert all(map(torch.equal, tensors_of(fixed.value), tensors_of(given)))
    assert fixed.num_bytes == 3 * own_bytes


def test_a_constant_that_was_packed_lives_on_so_that_no_other_one_gets_its_identity() -> None:
    constant = torch.tensor([2.0])
    alive = weakref.ref(constant)
    fixed = FixedValue(constant)
    fixed.load_constant(constant)
    del constant
    assert alive() is not None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (value(1.0, rows=3), r"tensor 0: expected torch.bfloat16 \(2, 3\), got torch.bfloat16 \(3, 3\)"),
        ((value(1.0)[0], (torch.tensor(2), value(1.0)[1][1])), "tensor 1: expected torch.float32"),
        ((value(1.0)[0], ()), "expected a value of 3 tensors, got 1"),
    ],
)
def test_another_make_is_refused_and_changes_nothing(other: object, message: str) -> None:
    fixed = FixedValue(value(1.0))
    with pytest.raises(ValueError, match=message):
        fixed.load(other)
    assert all(map(torch.equal, tensors_of(fixed.value), tensors_of(value(1.0))))
