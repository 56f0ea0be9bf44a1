"""A transport that is only looked at."""

from __future__ import annotations

import asyncio


class Wire(asyncio.Transport):
    """Keeps what is written to it, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.BaseProtocol | None = None
        self.is_closed = False
        self.is_reading = True
        self.written = b""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True
