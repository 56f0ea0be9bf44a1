"""Python client of the `world` dialect: `from clients.python import WorldClient`.

Importing this package loads nothing; its names load their modules when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clients.python.chunk import Chunk
    from clients.python.errors import (
        BadServerMessage,
        ConnectFailed,
        EventDropped,
        LinkLost,
        Refused,
        SessionFailed,
        SessionLost,
        WorldClientError,
    )
    from clients.python.mp4 import Mp4Writer
    from clients.python.receipts import Applied, Receipt
    from clients.python.world import WorldClient

_MODULES = {
    "Applied": "receipts",
    "BadServerMessage": "errors",
    "Chunk": "chunk",
    "ConnectFailed": "errors",
    "EventDropped": "errors",
    "LinkLost": "errors",
    "Mp4Writer": "mp4",
    "Receipt": "receipts",
    "Refused": "errors",
    "SessionFailed": "errors",
    "SessionLost": "errors",
    "WorldClient": "world",
    "WorldClientError": "errors",
}

__all__ = [
    "Applied",
    "BadServerMessage",
    "Chunk",
    "ConnectFailed",
    "EventDropped",
    "LinkLost",
    "Mp4Writer",
    "Receipt",
    "Refused",
    "SessionFailed",
    "SessionLost",
    "WorldClient",
    "WorldClientError",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
