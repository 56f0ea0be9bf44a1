"""Case 3: timestep and sigma tables, exact to 1e-9."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.lingbot_golden import load_json
from worldmodel.wan.flow_scheduler import COMMIT_TIMESTEP, SamplerTable, nominal_table, official_table

TOLERANCE = 1e-9


def build(table: dict[str, Any]) -> SamplerTable:
    match table["kind"]:
        case "official":
            return official_table(table["flow_shift"], [step["index"] for step in table["steps"]])
        case "nominal":
            return nominal_table(table["flow_shift"], [step["label"] for step in table["steps"]])
        case kind:
            raise AssertionError(f"unknown kind {kind!r}")


def test_lingbot_sampler_tables_match() -> None:
    content = load_json("case3_sampler.json")
    assert content["tables"], "no tables"
    for table in content["tables"]:
        for step, expected in zip(build(table), table["steps"], strict=True):
            where = f"{table['name']}, shift {table['flow_shift']}, {expected}"
            assert step.timestep == pytest.approx(expected["timestep"], abs=TOLERANCE), where
            assert step.x0_sigma == pytest.approx(expected["x0_sigma"], abs=TOLERANCE), where
            assert step.renoise_sigma == pytest.approx(expected["renoise_sigma"], abs=TOLERANCE), where


def test_lingbot_sampler_commits_at_the_clean_timestep() -> None:
    assert load_json("case3_sampler.json")["commit_timestep"] == COMMIT_TIMESTEP
