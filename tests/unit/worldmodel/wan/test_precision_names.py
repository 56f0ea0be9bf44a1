"""The names that the server knows are those of the plans that a worker has."""

from __future__ import annotations

from worldmodel.wan.precision import PLANS
from worldmodel.wan.precision_names import Precision


def test_every_name_has_a_plan_and_every_plan_a_name() -> None:
    assert [plan.name for plan in PLANS] == [each.value for each in Precision]
    assert all(type(plan.name) is str for plan in PLANS)
