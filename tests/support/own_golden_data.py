"""Tests that take the golden weights for any small model keep to those of the repository.

`WORLDSERVE_GOLDEN_DIR` names another set for the tests that compare with it; sizes that other tests are written for
need not be its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_golden_data() -> Iterator[None]:
    """Forget the other set while the tests of a module run, in processes that they start, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLDSERVE_GOLDEN_DIR", raising=False)
        yield
