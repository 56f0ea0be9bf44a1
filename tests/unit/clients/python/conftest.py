"""A stand-in server, a clock that only moves when someone sleeps, and a client of both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from clients.python import WorldClient
from tests.support.client_standin_server import StandinServer, standin_server
from tests.support.python_client import PROMPT, FakeTime


@pytest.fixture
async def server() -> AsyncIterator[StandinServer]:
    async with standin_server() as standin:
        yield standin


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def connect(server: StandinServer, time: FakeTime) -> Any:
    """Make a client of the stand-in; keyword arguments replace the defaults."""

    def make(**options: Any) -> WorldClient:
        defaults = {"prompt": PROMPT, "image": "day", "clock": time.clock, "sleep": time.sleep}
        return WorldClient(server.url, **(defaults | options))

    return make
