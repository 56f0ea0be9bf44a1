"""Which layers stay on the device under a budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import BudgetTooSmall
from offload.residency import LayerPart, PartPlan, plan_residency

FORWARD = LayerPart(name="forward", layer_bytes=600, uses_per_chunk=5)
CAMERA = LayerPart(name="camera", layer_bytes=200, uses_per_chunk=1)
PARTS = (FORWARD, CAMERA)


def test_without_a_budget_everything_stays() -> None:
    plan = plan_residency(PARTS, 40, None)

    assert plan.device_bytes == 40 * 800
    assert plan.host_bytes == plan.copied_bytes_per_chunk == 0


def test_the_smallest_budget_holds_two_buffers_of_each_part() -> None:
    plan = plan_residency(PARTS, 40, 1600)

    assert plan.device_bytes == 1600
    assert plan.copied_bytes_per_chunk == 40 * (5 * 600 + 200)
    assert plan.copy_ms(1000.0) == 1000 * plan.copied_bytes_per_chunk / 1000.0


def test_a_smaller_budget_is_refused_with_the_numbers() -> None:
    with pytest.raises(BudgetTooSmall, match="1600 bytes") as refusal:
        plan_residency(PARTS, 40, 1599)

    assert (refusal.value.required_bytes, refusal.value.budget_bytes) == (1600, 1599)


def test_what_is_used_most_stays_first() -> None:
    plan = plan_residency(PARTS, 40, 1600 + 10 * 600 + 599)

    assert len(plan.parts["forward"].resident) == 10
    assert len(plan.parts["camera"].resident) == 2


def test_resident_layers_are_spread_and_begin_with_the_first() -> None:
    plan = plan_residency((FORWARD,), 8, 1200 + 4 * 600)

    assert sorted(plan.parts["forward"].resident) == [0, 2, 4, 6]
    assert plan.parts["forward"].streamed == (1, 3, 5, 7)


def test_layers_that_all_have_a_buffer_are_copied_once() -> None:
    for resident, copied_bytes in ((frozenset({0, 1}), 0), (frozenset({0}), 5 * 3 * 600)):
        plan = PartPlan(part=FORWARD, num_layers=4, resident=resident)
        assert plan.copied_bytes_per_chunk == copied_bytes
        assert plan.host_bytes == (4 - len(resident)) * 600


def test_the_plan_is_told_in_words() -> None:
    assert plan_residency(PARTS, 4, 1600).describe() == (
        "forward: 0 of 4 layers resident, 0.00 GB on the device; camera: 0 of 4 layers resident, 0.00 GB on the "
        "device; 0.0 GB copied a chunk, 0.0 GB on the host"
    )


@settings(max_examples=60, deadline=None)
@given(num_layers=st.integers(1, 50), budget=st.integers(0, 60_000))
def test_a_plan_uses_the_budget_and_never_more(num_layers: int, budget: int) -> None:
    if budget < min(2, num_layers) * 800:
        with pytest.raises(BudgetTooSmall):
            plan_residency(PARTS, num_layers, budget)
        return

    plan = plan_residency(PARTS, num_layers, budget)

    assert plan.device_bytes <= budget
    for part in plan.parts.values():
        assert len(part.resident) + len(part.streamed) == num_layers
        assert all(0 <= index < num_layers for index in part.resident)
    forward = plan.parts["forward"]
    if len(forward.streamed) > 2:
        assert budget - plan.device_bytes < 600 + CAMERA.layer_bytes * num_layers
