"""Our packages come from one place."""

from __future__ import annotations

import pytest

from worldmodel.errors import LoadFailed
from worldmodel.packages import check_package_origin


def test_packages_from_different_places_are_noticed() -> None:
    check_package_origin()
    with pytest.raises(LoadFailed, match=r"different places.*server from .*, json from "):
        check_package_origin(("server", "json"))
    with pytest.raises(LoadFailed, match="is not installed"):
        check_package_origin(("server", "no_such_package_of_ours"))
