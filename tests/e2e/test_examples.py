"""Each example and each game client against a real server with the fake model."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import av
import pygame
import pytest

from clients.conformance.picture import png
from clients.examples import drive_by_gamepad, scripted_flight, watch, window, write_mp4
from clients.python import Chunk, Receipt, World, WorldClient, connect, errors
from server.wire.binary import pack_chunk
from server.wire.messages import StreamFormat
from tests.support import game_fixtures, game_tools
from tests.support.game_tools import GAMES
from tests.support.server_process import ROOT, ServerProcess, running_configuration
from tests.support.silent_relay import silent_relay

GAME_CHUNKS = 3
PING_MS = "500"
"""A link on which nothing comes for twice as long is silent."""

CONFIG = """\
[model]
name = "fake"
checkpoint = "{folder}"
width = 64
height = 48
fps = 120
precision = "fp32"
begin_image = "start"
start_images = [{{ name = "start", file = "start.png", prompt = "a small town" }}]

[model.options]
chunk_ms = 2
prompt_commands = true

[kvcache]
requested_sessions = 2

[worker]
cpu_threads = 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("examples")
    (folder / "start.png").write_bytes(png())
    with running_configuration(folder, CONFIG.format(folder=folder)) as process:
        yield process


def num_frames(path: Path) -> int:
    with av.open(path) as container:
        return sum(1 for _ in container.decode(video=0))


async def tap_late(world: WorldClient, *keys: str, tap: Callable[..., Awaitable[Receipt]] = WorldClient.tap) -> Receipt:
    """Tap once the model has made as many chunks as a client keeps, and waits for them to be taken."""
    await world._session.buffer.full()
    return await tap(world, *keys)


@pytest.mark.parametrize("tap", [WorldClient.tap, tap_late], ids=["at once", "late"])
async def test_write_mp4(
    server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tap: Callable[..., Awaitable[Receipt]],
) -> None:
    monkeypatch.setattr(WorldClient, "tap", tap)
    await write_mp4.main(server.url, str(tmp_path / "walk.mp4"))
    told = re.fullmatch(r"(\d+) chunks in (.*); the turn is in chunk (\d+)\n", capsys.readouterr().out)
    assert told is not None
    num_chunks, turn = int(told[1]), int(told[3])
    assert num_chunks == max(8, turn + 1)
    assert told[2] == str(tmp_path / "walk.mp4")
    assert num_frames(tmp_path / "walk.mp4") == 9 + (num_chunks - 1) * 12


def test_write_mp4_says_how_it_is_called() -> None:
    command = [sys.executable, "-m", "clients.examples.write_mp4", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[URL] [FILE]" in done.stdout


@pytest.mark.parametrize("name", ["write_mp4", "scripted_flight", "watch", "show_window"])
def test_without_a_server_an_example_ends_with_one_line(name: str, tmp_path: Path) -> None:
    arguments = ["ws://127.0.0.1:1", *(["token"] if name == "watch" else [])]
    environment = {**os.environ, "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"clients.examples.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("name", ["write_mp4", "scripted_flight", "watch", "show_window"])
async def test_an_example_shows_its_token(name: str, tmp_path: Path) -> None:
    heads = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as refusing:
        port = refusing.sockets[0].getsockname()[1]
        arguments = [f"ws://127.0.0.1:{port}", *(["watched"] if name == "watch" else []), "--token", "secret"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"clients.examples.{name}", *arguments),
            cwd=tmp_path,
            env={**os.environ, "SDL_VIDEODRIVER": "dummy", "PYTHONPATH": str(ROOT)},
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
    assert (process.returncode, len(said.splitlines())) == (1, 1)
    assert "authorization: bearer secret\r\n" in heads[0]


@pytest.mark.parametrize("name", ["scripted_flight", "watch"])
def test_an_example_says_how_it_is_called(name: str) -> None:
    command = [sys.executable, "-m", f"clients.examples.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[FILE]" in done.stdout


def test_scripted_flight(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripted_flight.main(server.url, str(tmp_path / "flight.mp4"))
    said = re.fullmatch(r"(\d+) chunks in .*; the flight begins in chunk (\d+)\n", capsys.readouterr().out)
    assert said
    num_chunks, begins = map(int, said.groups())
    assert num_chunks == begins + len(scripted_flight.FLIGHT) // 3
    assert num_frames(tmp_path / "flight.mp4") == 9 + (num_chunks - 1) * 12


def test_a_flight_whose_world_ends_before_it_is_told_so(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_paused(url: str, *, token: str | None) -> World:
        world = connect(url, token=token)
        world.pause()
        return world

    def end(world: World) -> Iterator[Chunk]:
        server.end_all_sessions()
        return iter(())

    monkeypatch.setattr(scripted_flight, "connect", connect_paused)
    monkeypatch.setattr(World, "chunks", end)
    with pytest.raises(errors.EventDropped):
        scripted_flight.main(server.url, str(tmp_path / "flight.mp4"))


def test_watch(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with connect(server.url) as world:
        arguments = (server.url, world.session.watch_token, str(tmp_path / "seen.mp4"))
        watching = threading.Thread(target=watch.main, args=arguments)
        watching.start()
        server.until(
            lambda: server.get(f"v1/sessions/{world.session.session_id}").json()["watchers"], what="it watches"
        )
        receipt = world.hold("w")
        while not receipt.is_settled:
            world.next_chunk()
        applied = receipt.wait()
        session_id = world.session.session_id
    watching.join(30)
    said = capsys.readouterr().out
    assert f"watching {session_id}: fake, 64x48" in said
    assert f"run 0 chunk {applied.chunk_index}, events [0]" in said
    assert said.endswith("the session is over\n")
    assert num_frames(tmp_path / "seen.mp4") >= 12


# ---------------------------------------------------------------- windows


class Sticks:
    """A gamepad whose sticks somebody moves after each look."""

    def __init__(self, *positions: tuple[float, ...]) -> None:
        self._positions = list(positions)

    def get_numaxes(self) -> int:
        return 4

    def get_axis(self, axis_number: int, /) -> float:
        value = self._positions[0][axis_number]
        if axis_number == 3 and len(self._positions) > 1:
            self._positions.pop(0)
        return value


@pytest.fixture
def no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the example had the client hold, in order."""
    seen: list[tuple[str, ...]] = []
    hold = WorldClient.hold

    async def note(world: WorldClient, *keys: str) -> object:
        seen.append(keys)
        return await hold(world, *keys)

    monkeypatch.setattr(WorldClient, "hold", note)
    return seen


async def test_a_window_shows_frames_until_it_is_closed(server: ServerProcess, no_screen: None) -> None:
    colours = []

    def read_keys() -> tuple[str, ...]:
        screen = pygame.display.get_surface()
        assert screen is not None
        colours.append(screen.get_at((10, 10))[:3])
        assert screen.get_size() == (960, 720)
        if len(colours) == 20:
            pygame.event.post(pygame.event.Event(pygame.QUIT))
        return window.pressed_keys("wasdijkl")

    assert await window.walk(server.url, read_keys) == 21
    assert colours[0] != (0, 0, 0), "the picture is on the screen"
    assert not pygame.display.get_init()


async def test_a_gamepad_holds_the_keys_of_its_sticks(
    server: ServerProcess, no_screen: None, held: list[tuple[str, ...]]
) -> None:
    rest = (0.1, -0.2, 0.0, 0.3)
    sticks = Sticks(rest, (0.0, -0.9, 0.6, 0.0), (0.0, -0.9, 0.6, 0.0), rest)
    assert await window.walk(server.url, lambda: drive_by_gamepad.keys_of(sticks), max_frames=12) == 12
    assert held == [("w", "l"), ()]


async def test_no_gamepad_is_said(no_screen: None) -> None:
    with pytest.raises(SystemExit, match="no gamepad is connected"):
        await drive_by_gamepad.main("ws://127.0.0.1:1")


def test_no_pygame_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    monkeypatch.delitem(sys.modules, "clients.examples.window")
    with pytest.raises(SystemExit, match=r"this example needs pygame: pip install 'worldserve\[window\]'"):
        importlib.import_module("clients.examples.window")


# ---------------------------------------------------------------- games


def taken_apart(frame: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Take a frame apart by what docs/protocol.md says, with nothing of ours: its header, and its pictures."""
    (header_bytes,) = struct.unpack(">I", frame[:4])
    header = json.loads(frame[4 : 4 + header_bytes])
    payload = frame[4 + header_bytes :]
    if "shape" in header:
        num_frames, height, width, depth = header["shape"]
        sizes = [height * width * depth] * num_frames
    else:
        sizes = header["sizes"]
    ends = list(accumulate(sizes))
    assert ends[-1] == len(payload)
    return header, [payload[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def digests(chunk_index: int, pictures: Iterable[bytes]) -> str:
    """Write a chunk as the headless clients do."""
    shown = [hashlib.sha256(picture).hexdigest()[:16] for picture in pictures]
    return " ".join(["chunk", str(chunk_index), *shown])


def fixture(format: str) -> bytes:
    return (GAMES / "fixtures" / f"{format}.frame").read_bytes()


def test_the_fixture_of_raw_pictures_is_what_the_server_sends() -> None:
    assert fixture("rgb24") == game_fixtures.fixture_frame(StreamFormat.RGB24)
    _, pictures = taken_apart(fixture("rgb24"))
    assert b"".join(pictures) == game_fixtures.rgb_pictures().tobytes()


def test_the_fixture_of_h264_is_what_the_server_sends() -> None:
    """Coded pictures may differ between versions of the encoder; all that a client relies on may not."""
    header, units = taken_apart(fixture("h264"))
    ours, our_units = taken_apart(game_fixtures.fixture_frame(StreamFormat.H264))
    assert {**header, "sizes": 0} == {**ours, "sizes": 0}
    for unit, our_unit in zip(units, our_units, strict=True):
        kinds = [[nal[0] & 0x1F for nal in each.split(b"\0\0\0\1")[1:]] for each in (unit, our_unit)]
        assert kinds[0] == kinds[1]
    with av.open(io.BytesIO(b"".join(units)), format="h264") as stream:
        pictures = [frame.to_ndarray(format="rgb24").shape for frame in stream.decode(video=0)]
    assert pictures == [(game_fixtures.HEIGHT, game_fixtures.WIDTH, 3)] * game_fixtures.FRAMES


async def seen_by_python(url: str, format: str) -> list[str]:
    """Return the first chunks of the world that the game clients ask for."""
    async with WorldClient(url, image="start", prompt="a town", seed=7, format=format) as world:
        chunks = [await world.next_chunk() for _ in range(GAME_CHUNKS)]
    frames = [pack_chunk(chunk.header, chunk.payload) for chunk in chunks if chunk is not None]
    return [digests(index, taken_apart(frame)[1]) for index, frame in enumerate(frames)]


async def test_game_clients_see_steer_and_resume(server: ServerProcess, tmp_path: Path) -> None:
    """Drives each client whose tool chain is installed; without any, only the fixtures above are checked."""
    address = server.url.replace("http://", "ws://") + "v1/world"
    wanted = {format: await seen_by_python(server.url, format) for format in ("rgb24", "h264")}
    assert wanted["rgb24"] != wanted["h264"]
    for tool in await game_tools.installed_tools(tmp_path):
        for format, chunks in wanted.items():
            _, pictures = taken_apart(fixture(format))
            path = GAMES / "fixtures" / f"{format}.frame"
            assert await tool.run(str(path)) == [digests(game_fixtures.CHUNK_INDEX, pictures)], tool.name
            said = await tool.run(address, "a town", "start", format, "7", str(GAME_CHUNKS))
            assert said == [*chunks, "applied 0", "resumed 2", "closed client"], tool.name
        async with silent_relay(address, silenced_by="session.event") as relayed:
            said = await tool.run(relayed, "a town", "start", "rgb24", "7", str(GAME_CHUNKS), PING_MS)
            assert said[:GAME_CHUNKS] == wanted["rgb24"], tool.name
            assert {"applied 0", "closed client"} <= set(said), tool.name
            # Epoch 1 fell silent and epoch 2 was dropped, or a later one where a busy machine was silent for so long.
            assert max(int(line.split()[1]) for line in said if line.startswith("resumed ")) >= 3, tool.name


# ---------------------------------------------------------------- the page about clients

PAGE = (Path(__file__).resolve().parents[2] / "docs/clients.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_snippet_of_the_page_is_found() -> None:
    assert len(SNIPPETS) == PAGE.count("```python\n") == 5


@pytest.mark.parametrize(("heading", "source"), SNIPPETS, ids=[heading for heading, _ in SNIPPETS])
def test_snippets_of_the_page_run(
    server: ServerProcess, heading: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "ws://127.0.0.1:8000" in source
    exec(compile(source.replace("ws://127.0.0.1:8000", server.url), heading, "exec"), {})


def test_every_example_and_every_error_is_on_the_page() -> None:
    examples = {path.stem for path in (GAMES.parent).glob("*.py")} - {"__init__", "command", "window"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Examples")[2], re.MULTILINE)) == examples
    told = set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Errors")[2].partition("## ")[0], re.MULTILINE))
    ours = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    assert told == ours - {"WorldClientError"}
