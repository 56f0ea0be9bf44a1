"""Every configuration file in the box can be read, and its model accepts its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.config_reading import load_config
from worldmodel import catalog

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.toml"))


def test_there_are_configs():
    assert {"demo.toml", "lingbot_world_v2.toml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_loads_and_its_options_parse(path: Path):
    config = load_config(path, environment={})
    assert catalog.lookup(config.model.name)
    catalog.options_parser(config.model.name)(config.model.options)
