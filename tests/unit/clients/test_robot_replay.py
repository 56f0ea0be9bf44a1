"""The drawing of a robot's actions, and that its robot shows what it does."""

from __future__ import annotations

import json
import re
import socket
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from clients.examples.robot_replay import Call, Robot, draw, look, main, observe

SVG = "{http://www.w3.org/2000/svg}"
ROBOT = Robot(cameras=("a", "b"), states=(("joints", 7), ("gripper", 1)), height=18, width=32)


def make_call(actions: np.ndarray, total_ms: float = 5.0) -> Call:
    return Call(actions=actions.astype(np.float32), total_ms=total_ms, server_timing={})


def test_every_action_of_every_call_is_a_point_at_its_height() -> None:
    calls = [make_call(np.arange(12).reshape(4, 3)), make_call(np.arange(12, 24).reshape(4, 3))]
    root = ElementTree.fromstring(draw(calls, "a < b & c"))
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == 3 * 2
    points = [[tuple(map(float, point.split(","))) for point in line.get("points", "").split()] for line in lines]
    first_strip = points[0] + points[1]
    xs, ys = zip(*first_strip, strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys, reverse=True), "larger values stand higher"
    assert np.allclose(np.diff(ys), np.diff(ys)[0], atol=0.11)
    assert "a < b & c" in [text.text for text in root.findall(f"{SVG}text")]


def test_an_action_that_never_changes_is_a_line_in_the_middle() -> None:
    root = ElementTree.fromstring(draw([make_call(np.ones((4, 1)))], "still"))
    (line,) = root.findall(f"{SVG}polyline")
    assert len({point.split(",")[1] for point in line.get("points", "").split()}) == 1


def test_labels_of_calls_do_not_touch() -> None:
    calls = [make_call(np.zeros((2, 1)), total_ms=float(index)) for index in range(100)]
    root = ElementTree.fromstring(draw(calls, "many"))
    places = [float(text.get("x", "")) for text in root.findall(f"{SVG}text") if (text.text or "").endswith(" ms")]
    assert 5 < len(places) < 30
    assert min(np.diff(places)) >= 60


def test_cameras_see_the_arm_move() -> None:
    here, there = np.zeros(8), np.zeros(8)
    there[3] = 1.0
    for camera in range(2):
        before, after = look(ROBOT, camera, here), look(ROBOT, camera, there)
        assert (before.shape, before.dtype) == ((18, 32, 3), np.uint8)
        assert not np.array_equal(before, after)
    assert not np.array_equal(look(ROBOT, 0, here), look(ROBOT, 1, here))


@pytest.mark.parametrize("num_frames", [1, 4])
def test_an_observation_has_all_cameras_and_the_last_pose(num_frames: int) -> None:
    poses = [np.full(8, float(index)) for index in range(num_frames)]
    arrays = observe(ROBOT, poses)
    assert {name: array.shape for name, array in arrays.items()} == {
        "a": (num_frames, 18, 32, 3),
        "b": (num_frames, 18, 32, 3),
        "joints": (7,),
        "gripper": (1,),
    }
    assert arrays["joints"][0] == num_frames - 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--calls", "0"], "--calls: expected a whole number from 1 up, got '0'"),
        (["--calls", "many"], "--calls: expected a whole number from 1 up, got 'many'"),
        (["http://127.0.0.1:1/v1/robot"], "url: expected ws://HOST:PORT/PATH or wss://..., got 'http://127.0.0.1:1/"),
        (["127.0.0.1:8000"], "url: expected ws://HOST:PORT/PATH or wss://..., got '127.0.0.1:8000'"),
        (["ws:///v1/robot"], "url: expected ws://HOST:PORT/PATH or wss://..., got 'ws:///v1/robot'"),
        *(
            ([url], f"url: expected ws://HOST:PORT/PATH or wss://..., got {url!r}")
            for url in ("ws://a:b/", "ws://a:99999/", "ws://a:0/", "ws://[::1/", "ws://me:secret@a:8000/")
        ),
        (["--token", "é"], "--token: expected printable ASCII characters"),
        (["--token", "a\nb"], "--token: expected printable ASCII characters"),
        (["--out", "nowhere/a.svg"], "--out: expected a file in a folder that exists, got 'nowhere/a.svg'"),
        (["--out", "."], "--out: expected a file in a folder that exists, got '.'"),
    ],
)
def test_a_wrong_call_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


class Answers(BaseHTTPRequestHandler):
    """Answers every GET alike, but a WebSocket handshake, where that is given, in its own way."""

    protocol_version = "HTTP/1.1"
    get: tuple[int, str] = (200, "")
    handshake: tuple[int, str] | None = None

    def do_GET(self) -> None:
        is_handshake = self.headers["Upgrade"] is not None and self.handshake is not None
        status, text = self.handshake if is_handshake and self.handshake is not None else self.get
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def answering(get: tuple[int, str], handshake: tuple[int, str] | None) -> Iterator[str]:
    handler = type("Given", (Answers,), {"get": get, "handshake": handshake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.server_port}/v1/robot"
        finally:
            server.shutdown()
            thread.join()


TOLD = json.dumps({"config": {"image_resolution": [18, 32]}, "cameras": ["a"], "states": []})


@pytest.mark.parametrize(
    ("get", "handshake", "said"),
    [
        (
            (401, '{"error": {"code": "unauthorized", "message": "a token is needed"}}'),
            None,
            "the server wants a token, or another one: --token (HTTP 401: a token is needed)",
        ),
        (
            (404, '{"detail":"Not Found"}'),
            None,
            'no robot model is served there, or not at this path (HTTP 404: {"detail":"Not Found"})',
        ),
        ((500, "<html>"), None, "the server refused (HTTP 500)"),
        ((200, "<html>"), None, " is no worldserve"),
        ((200, '{"another": "server"}'), None, " is no worldserve"),
        (
            (200, TOLD),
            (403, "not from here"),
            "the server does not allow it (HTTP 403: not from here)",
        ),
        ((200, TOLD), (200, "hello"), "(HTTP 200: hello)"),
    ],
)
def test_a_server_that_refuses_is_one_line(
    get: tuple[int, str],
    handshake: tuple[int, str] | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    with answering(get, handshake) as url:
        assert main([url, "--out", str(tmp_path / "a.svg")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("robot_replay: ")
    assert line.endswith(said)


def test_a_server_of_another_kind_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
            connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=greet)
        thread.start()
        port = listener.getsockname()[1]
        assert main([f"ws://127.0.0.1:{port}/v1/robot", "--out", str(tmp_path / "a.svg")]) == 1
        thread.join()
    assert capsys.readouterr().err == f"robot_replay: what answers at 127.0.0.1:{port} is no worldserve\n"


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as nobody:
        # Bound, so that nobody else is there either, but not listening.
        nobody.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{nobody.getsockname()[1]}/v1/robot"
        assert main([url, "--out", str(tmp_path / "a.svg")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"robot_replay: nothing answers at 127\.0\.0\.1:\d+: Connection refused", line)
