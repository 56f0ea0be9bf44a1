"""Python client of the `world` dialect: `from clients.python import connect`, or with asyncio `WorldClient`.

Importing this package loads nothing; its names load their modules when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clients.python.blocking import BlockingReceipt, WatchedWorld, World, connect, watch
    from clients.python.chunk import Chunk, Frame
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
    from clients.python.spectator import Spectator
    from clients.python.world import WorldClient

_MODULES = {
    "Applied": "receipts",
    "BadServerMessage": "errors",
    "BlockingReceipt": "blocking",
    "Chunk": "chunk",
    "ConnectFailed": "errors",
    "EventDropped": "errors",
    "Frame": "chunk",
    "LinkLost": "errors",
    "Mp4Writer": "mp4",
    "Receipt": "receipts",
    "Refused": "errors",
    "SessionFailed": "errors",
    "SessionLost": "errors",
    "Spectator": "spectator",
    "WatchedWorld": "blocking",
    "World": "blocking",
    "WorldClient": "world",
    "WorldClientError": "errors",
    "connect": "blocking",
    "watch": "blocking",
}

__all__ = [
    "Applied",
    "BadServerMessage",
    "BlockingReceipt",
    "Chunk",
    "ConnectFailed",
    "EventDropped",
    "Frame",
    "LinkLost",
    "Mp4Writer",
    "Receipt",
    "Refused",
    "SessionFailed",
    "SessionLost",
    "Spectator",
    "WatchedWorld",
    "World",
    "WorldClient",
    "WorldClientError",
    "connect",
    "watch",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
