"""The page of a robot server against a real server with the test robot in a real worker process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser
from websockets.sync.client import ClientConnection, connect

from server.wire.robot_arrays import pack_message, unpack_message
from tests.support.browser_chromium import WatchedPage
from tests.support.robot_client import CAMERAS, HEIGHT, JOINTS, WIDTH
from tests.support.server_process import ServerProcess, running_configuration

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

CONFIG = f"""\
[model]
name = "fake_robot"
checkpoint = "package:worldmodel/data/demo_world"
width = {WIDTH}
height = {HEIGHT}
fps = 5
precision = "fp32"

[kvcache]
requested_sessions = 3

[worker]
cpu_threads = 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_configuration(tmp_path_factory.mktemp("robots"), CONFIG) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[WatchedPage]:
    """The page; it must not have complained in the end."""
    watched = WatchedPage(browser, server.url)
    yield watched
    complaints = list(watched.complaints)
    watched.close()
    assert complaints == []


class Robot:
    """One robot that asks for actions."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        socket.recv()

    def ask(self, number: int, **fields: Any) -> Any:
        pictures = {name: np.full((HEIGHT, WIDTH, 3), number, np.uint8) for name in CAMERAS}
        self.socket.send(pack_message({**pictures, JOINTS: np.zeros(7, np.float32), "prompt": "go", **fields}))
        return unpack_message(self.socket.recv())


@contextmanager
def connected(url: str) -> Iterator[Robot]:
    with connect(url, proxy=None, compression=None, open_timeout=60) as socket:
        yield Robot(socket)


def robot_url(server: ServerProcess) -> str:
    return server.url.replace("http://", "ws://") + "v1/robot"


def texts(page: WatchedPage, selector: str) -> list[str]:
    return [text.strip() for text in page.page.locator(selector).all_inner_texts()]


def test_robots_come_act_and_go(page: WatchedPage, server: ServerProcess, tmp_path: Path) -> None:
    view = page.page
    view.wait_for_selector("#status[data-tone=good]")
    view.wait_for_selector("#robots-empty:not([hidden])")
    assert view.locator(".card").count() == 0
    with connected(robot_url(server)) as named, connected(robot_url(server)) as other:
        for number in range(5):
            named.ask(number, session_id="arm <b>1</b>", prompt="put the cup on the plate")
        other.ask(9)
        view.wait_for_function("() => document.querySelectorAll('.card svg.plot').length === 2")
        assert texts(page, ".card h3") == ["arm <b>1</b>", "unnamed robot"]
        assert texts(page, ".card .task") == ["put the cup on the plate", "go"]
        assert texts(page, ".card dd")[0] == "5"
        assert view.locator(".card >> nth=0 >> svg.plot polyline").count() == 8
        assert view.locator(".card >> nth=0 >> svg.times polyline").count() == 1
        # The places are asked for apart from the robots, a moment earlier.
        view.wait_for_selector("#robots-count >> text=2 connected, 2 of 3 places taken")
        view.screenshot(path=tmp_path / "robots.png", full_page=True)
        shown = view.locator(".card >> nth=0 >> svg.plot polyline >> nth=0").get_attribute("points")
        named.ask(77, session_id="arm <b>1</b>")
        view.wait_for_function(
            "(before) => document.querySelector('.card svg.plot polyline').getAttribute('points') !== before", arg=shown
        )
    view.wait_for_selector("#robots-empty:not([hidden])")
    view.wait_for_selector("#robots-count >> text=0 connected, 0 of 3 places taken")


def test_the_client_that_is_shown_runs(page: WatchedPage, server: ServerProcess) -> None:
    view = page.page
    view.wait_for_function("() => document.querySelector('#snippet').textContent.includes('wrist_image_left')")
    asked: list[Any] = []

    class Policy:
        def __init__(self, host: str) -> None:
            self.host = host

        def infer(self, observation: dict[str, Any]) -> Any:
            asked.append((self.host, observation))
            with connected(self.host) as robot:
                robot.socket.send(pack_message(observation))
                return unpack_message(robot.socket.recv())

    source = view.locator("#snippet").inner_text()
    lines = [line for line in source.splitlines() if not line.startswith("from openpi_client")]
    printed: list[Any] = []
    exec("\n".join(lines), {"WebsocketClientPolicy": Policy, "print": printed.append})
    assert printed == [(24, 8)]
    assert asked[0][0] == robot_url(server)
    with page.passing("['Copied', 'Marked'].includes(document.querySelector('#copy').textContent)"):
        view.click("#copy")


def test_a_narrow_window_shows_everything(browser: Browser, server: ServerProcess) -> None:
    watched = WatchedPage(browser, server.url, viewport={"width": 360, "height": 640})
    watched.page.wait_for_selector("#status[data-tone=good]")
    with connected(robot_url(server)) as robot:
        robot.ask(1, session_id="x" * 128, prompt="y" * 500)
        watched.page.wait_for_selector(".card svg.plot")
        card = "document.querySelector('.card')"
        assert watched.page.evaluate(f"{card}.scrollWidth - {card}.clientWidth") == 0
        wide = watched.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0
    assert watched.complaints == []
    watched.close()
