from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext

from tests.support.browser_chromium import VIEWPORT, WatchedPage, chromium
from tests.support.browser_standin import StandIn


# Playwright runs an event loop in the main thread for as long as it lives, so no fixture of it may outlive this folder:
# asyncio tests that come after it could not start theirs.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def lasting_standin() -> Iterator[StandIn]:
    with StandIn() as standin:
        yield standin


@pytest.fixture
def standin(lasting_standin: StandIn) -> StandIn:
    lasting_standin.renew()
    return lasting_standin


@pytest.fixture(scope="module")
def modules(browser: Browser, lasting_standin: StandIn) -> Iterator[WatchedPage]:
    """One page for all tests that only import its modules."""
    lasting_standin.renew()
    watched = WatchedPage(browser, lasting_standin.url)
    yield watched
    watched.close()


@pytest.fixture(scope="package")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One cache for the page's files; what a page stored is removed before the next."""
    context = browser.new_context(**VIEWPORT, permissions=["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, standin: StandIn) -> Iterator[WatchedPage]:
    """The page of the stand-in; it must not have complained in the end."""
    watched = WatchedPage(context, standin.url)
    yield watched
    complaints = list(watched.complaints)
    watched.page.evaluate("localStorage.clear()")
    watched.close()
    assert complaints == []
