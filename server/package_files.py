"""Files that ship with installed packages: our configurations, and checkpoints that a configuration names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from server.config_values import ConfigError
from worldmodel.clips import RANDOM_SCHEME

PACKAGE_SCHEME = "package:"


def resolve_checkpoint(checkpoint: str) -> Path:
    """Return the folder of a checkpoint; "package:worldmodel/data/x" is found beside the installed package.

    "random:NAME", a model with random weights, has no folder and stays as it is.
    """
    if checkpoint.startswith(RANDOM_SCHEME):
        return Path(checkpoint)
    if not checkpoint.startswith(PACKAGE_SCHEME):
        return Path(checkpoint).expanduser().resolve()
    package, _, rest = checkpoint.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"model.checkpoint: no package {package!r} is installed (in {checkpoint!r})")
    return Path(next(iter(spec.submodule_search_locations))) / rest


def bundled_config(name: str) -> Path:
    """Return the path of a configuration file that ships with the package, such as "demo"."""
    here = Path(__file__).resolve().parent
    folders = (here / "_configs", here.parent / "configs")
    for folder in folders:
        path = folder / f"{name}.toml"
        if path.is_file():
            return path
    raise ConfigError(f"no bundled configuration {name!r} in {' or '.join(str(folder) for folder in folders)}")
