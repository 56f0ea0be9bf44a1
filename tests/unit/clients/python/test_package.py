"""The package loads its parts when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, clients.python; heavy = {'websockets', 'pydantic', 'av', 'numpy', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy; from clients.python import WorldClient; late = {'av', 'torch'} & set(sys.modules);"
        "assert not late, late"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    import clients.python

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        clients.python.Nothing  # noqa: B018
