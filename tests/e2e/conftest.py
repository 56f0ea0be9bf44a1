"""Servers that most tests in here start with; a module whose servers differ defines its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.omni_server import GatedWorker
from tests.support.server_scripted import Server, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """Give a server over a scripted worker."""
    async with serving() as it:
        yield it


@pytest.fixture
async def gated() -> AsyncIterator[Server]:
    """Give a server whose first tick waits for `go`."""
    async with serving(GatedWorker(is_held=True)) as it:
        yield it
