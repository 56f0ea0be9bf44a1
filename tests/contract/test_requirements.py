"""What the packages import is named in `pyproject.toml`, not left to what other packages happen to bring."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("server", "worldmodel", "kvcache", "offload", "clients")
NAMES = {"pil": "pillow", "yaml": "pyyaml", "pydantic-core": "pydantic", "starlette": "fastapi"}
"""Where a module has another name than its distribution, or belongs to one that is named."""


def test_what_is_imported_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["media"], *extras["model"], *extras["cuda"], *extras["window"]]
    named = {re.split(r"[\s;<>=\[]", requirement)[0] for requirement in requirements}
    assert _imported() - named == set()


def test_a_worker_installs_nothing_that_it_does_not_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]["model"]) - _imported() == set()


def _imported() -> set[str]:
    """Return the distributions whose modules our packages import, at the top of a file or inside it."""
    modules: set[str] = set()
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                modules.add(node.module)
    tops = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - set(PACKAGES)
    distributions = {top.lower().replace("_", "-") for top in tops}
    return {NAMES.get(name, name) for name in distributions}
