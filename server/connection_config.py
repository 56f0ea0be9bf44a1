"""uvicorn's settings together with the limits that each connection keeps by itself."""

from __future__ import annotations

from typing import Any

import uvicorn
from starlette.types import ASGIApp

from server.config import LimitsSection


class ConnectionConfig(uvicorn.Config):
    """What uvicorn hands to every connection it makes; `options` are uvicorn's own."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: LimitsSection,
        message_bytes_key: str = "limits.max_message_bytes",
        **options: Any,
    ) -> None:
        """`message_bytes_key` is the setting that `ws_max_size` comes from."""
        super().__init__(app, **options)
        self.limits = limits
        self.message_bytes_key = message_bytes_key
        self.idle_connections: dict[Any, None] = {}
        """HTTP connections without a request under way, those that have been so for longest first."""
