"""Where our packages come from. Torch-free, used by the command line and by the worker."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from worldmodel.errors import LoadFailed

PACKAGES = ("server", "worldmodel", "kvcache", "offload", "clients")


def check_package_origin(packages: tuple[str, ...] = PACKAGES) -> None:
    """Stop if our packages come from different places: their names are generic, and strangers exist.

    Looks for the packages without importing them. Raises `LoadFailed`.
    """
    parents: dict[str, Path] = {}
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise LoadFailed(f"the package {name!r} of worldserve is not installed", code="bad_installation")
        parents[name] = Path(spec.origin).resolve().parents[1]
    if len(set(parents.values())) > 1:
        found = ", ".join(f"{name} from {parent}" for name, parent in parents.items())
        raise LoadFailed(
            f"worldserve's packages come from different places; use an environment of its own ({found})",
            code="bad_installation",
        )
