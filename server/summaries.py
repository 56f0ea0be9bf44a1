"""What the OpenAPI documents say about each route in a line: its docstring's, where FastAPI would take a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute


class DescribedRoute(APIRoute):
    """A route whose summary is the first sentence of its function's docstring."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        paragraph, _, _ = (inspect.getdoc(endpoint) or "").partition("\n\n")
        sentence, _, _ = " ".join(paragraph.split()).partition(". ")
        if sentence:
            options["summary"] = sentence.removesuffix(".")
        super().__init__(path, endpoint, **options)
