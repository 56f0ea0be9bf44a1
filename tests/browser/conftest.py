from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser_chromium import WatchedPage, chromium
from tests.support.browser_standin import StandIn


# Playwright runs an event loop in the main thread for as long as it lives, so no fixture of it may outlive its module:
# asyncio tests that come after it could not start theirs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def standin() -> Iterator[StandIn]:
    with StandIn() as standin:
        yield standin


@pytest.fixture(scope="module")
def modules(browser: Browser) -> Iterator[WatchedPage]:
    """One page for all tests that only import its modules."""
    with StandIn() as standin:
        watched = WatchedPage(browser, standin.url)
        yield watched
        watched.close()


@pytest.fixture
def page(browser: Browser, standin: StandIn) -> Iterator[WatchedPage]:
    """The page of the stand-in; it must not have complained in the end."""
    watched = WatchedPage(browser, standin.url)
    yield watched
    complaints = list(watched.complaints)
    watched.close()
    assert complaints == []
