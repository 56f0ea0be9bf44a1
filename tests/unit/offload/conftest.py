"""A weight cache in a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.cache_folder import CacheFolder
from offload.weight_cache import WeightCache
from tests.support.weight_cache import open_folder


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return open_folder(tmp_path / "cache")


@pytest.fixture
def cache(folder: CacheFolder) -> WeightCache:
    return WeightCache(folder, lock_timeout_s=1.0)
