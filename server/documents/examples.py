"""The examples that docs/protocol.md shows, so that other documents show the same."""

from __future__ import annotations

import json
import re
from typing import Any

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next one of the same or a higher level. Raises `ValueError`."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/protocol.md has no heading {heading!r}")
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", _blank_fences(rest), re.MULTILINE)
    return rest[: end.start()] if end else rest


def fenced(text: str, language: str) -> list[str]:
    """Return the bodies of all fences of a language, such as `json` or `json omni=session.start`."""
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """Return the text without its fences."""
    return _FENCE.sub("", text)


def world_examples(text: str, name: str) -> list[dict[str, Any]]:
    """Return the examples of a message of the `world` dialect."""
    return [json.loads(example) for example in fenced(section(text, f"`{name}`"), "json")]


def omni_examples(text: str, name: str) -> list[dict[str, Any]]:
    """Return the examples of a message of the `omni` dialect."""
    return [json.loads(example) for example in fenced(text, f"json omni={name}")]


def _blank_fences(text: str) -> str:
    """Blank out fences and keep all positions, since a comment in one looks like a heading."""
    return _FENCE.sub(lambda found: " " * len(found[0]), text)
