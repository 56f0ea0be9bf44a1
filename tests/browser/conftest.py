from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext

from tests.support.browser_chromium import VIEWPORT, WatchedPage, chromium
from tests.support.browser_standin import StandIn

FOLDER = Path(__file__).parent


class Shared:
    """What the tests of this folder share; each is made when it is first asked for."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    @cached_property
    def browser(self) -> Browser:
        return self.stack.enter_context(chromium())

    @cached_property
    def standin(self) -> StandIn:
        return self.stack.enter_context(StandIn())

    @cached_property
    def context(self) -> BrowserContext:
        """One cache for the page's files; what a page stored is removed before the next."""
        context = self.browser.new_context(**VIEWPORT, permissions=["clipboard-read", "clipboard-write"])
        self.stack.callback(context.close)
        return context


shared = Shared()


# Playwright runs an event loop in the main thread for as long as it lives, and asyncio tests of other folders could not
# start theirs. Without an `__init__.py` pytest has no scope for a folder.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    global shared
    yield
    if nextitem is None or not nextitem.path.is_relative_to(FOLDER):
        shared.stack.close()
        shared = Shared()


@pytest.fixture(scope="module")
def browser() -> Browser:
    return shared.browser


@pytest.fixture
def context() -> BrowserContext:
    return shared.context


@pytest.fixture
def standin() -> StandIn:
    shared.standin.renew()
    return shared.standin


@pytest.fixture(scope="module")
def modules() -> Iterator[WatchedPage]:
    """One page for all tests that only import its modules."""
    shared.standin.renew()
    watched = WatchedPage(shared.context, shared.standin.url)
    yield watched
    watched.close()


@pytest.fixture
def page(standin: StandIn) -> Iterator[WatchedPage]:
    """The page of the stand-in; it must not have complained in the end."""
    watched = WatchedPage(shared.context, standin.url)
    yield watched
    complaints = list(watched.complaints)
    watched.close()
    assert complaints == []
