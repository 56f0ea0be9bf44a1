"""Recordings over real sockets, with a scripted worker: what is written, who may read it, what a bad disk does."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import av
import httpx
import pytest

from server.cli import main
from server.config import RecordingSection, ServerSection
from tests.support.server_client import WorldSocket, image_field, png
from tests.support.server_scripted import KEYS, Server, serving
from worldmodel.lingbot.controls import parse_control
from worldmodel.messages import SessionId


@asynccontextmanager
async def recording_server(folder: Path, **sections: Any) -> AsyncIterator[Server]:
    async with serving(recording=RecordingSection(folder=str(folder)), **sections) as server:
        yield server


async def get(server: Server, path: str, *, token: str | None = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # A loaded machine may need longer than the default of five seconds.
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
        return await http.get(f"{server.url}v1/sessions/{path}")


async def lines(server: Server, session_id: str, *, token: str | None = None) -> list[dict[str, Any]]:
    answer = await get(server, f"{session_id}/events.jsonl", token=token)
    assert answer.status_code == 200
    return [json.loads(line) for line in answer.text.splitlines()]


async def is_gone(server: Server, session_id: str) -> bool:
    return (await get(server, session_id)).status_code == 404


def num_frames(mp4: bytes) -> int:
    with av.open(io.BytesIO(mp4), format="mp4") as video:
        return sum(1 for _ in video.decode(video=0))


def num_failures(server: Server) -> float | None:
    return server.context.metrics.registry.get_sample_value("worldserve_recording_failures_total")


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it is so; the time-out only ends a test that hangs."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_logged(server: Server, session_id: str) -> None:
    """Wait until the log has every chunk that a session at rest has made: threads write it behind the session's back.

    Then nothing else is about to be written into it.
    """
    num_ticks = len(server.worker.sessions[SessionId(session_id)].ticks)

    async def all_are_logged() -> bool:
        answer = await get(server, f"{session_id}/events.jsonl")
        return answer.status_code == 200 and answer.text.count('"chunk_index"') == num_ticks

    await until(all_are_logged)


async def until_media(socket: WorldSocket, *, run: int, chunk_index: int) -> None:
    while True:
        header = (await socket.media()).header
        if (header.run, header.chunk_index) == (run, chunk_index):
            return


@pytest.mark.parametrize("format", ["fmp4", "h264"])
async def test_a_session_is_recorded_from_start_to_end(tmp_path: Path, format: str) -> None:
    """Two runs and two epochs make one video and one log, which stay when the session is gone."""
    async with recording_server(tmp_path) as server:
        first = await server.connect()
        started = await first.start(format=format, seed=5)
        session_id = started["session_id"]
        await first.send("session.event", event_id=4, prompt="night", controls=[KEYS])
        await until_media(first, run=0, chunk_index=2)
        await first.drop()
        await server.until_parked(session_id)
        second = await server.connect()
        await second.resume(started["resume_token"], 2)
        new_image = png(16, 16)
        await second.send("session.reset", prompt="day", seed=6, image=image_field(new_image))
        await until_media(second, run=1, chunk_index=1)
        assert (await get(server, session_id)).json()["recording"] is True

        async def has_what_was_seen() -> bool:
            so_far = await get(server, f"{session_id}/recording.mp4")
            is_video = so_far.headers["content-type"] == "video/mp4"
            return is_video and num_frames(so_far.content) >= 9 + 12 + 12 + 9 + 12

        await until(has_what_was_seen)
        await second.send("session.close")
        assert await second.closed() == 1000
        await until(lambda: is_gone(server, session_id))
        log = await lines(server, session_id)
        mp4 = (await get(server, f"{session_id}/recording.mp4")).content
    start, *rest = log
    image = png()
    assert (start["prompt"], start["seed"], start["width"], start["height"]) == ("a town", 5, 32, 32)
    assert start["image"] == {"file": "image-0.png", "sha256": hashlib.sha256(image).hexdigest()}
    assert (tmp_path / session_id / "image-0.png").read_bytes() == image
    (reset,) = [line for line in rest if "reset" in line]
    file = {"file": "image-1.png", "sha256": hashlib.sha256(new_image).hexdigest()}
    assert reset == {"run": 1, "reset": {"prompt": "day", "seed": 6, "image": file}}
    assert (tmp_path / session_id / "image-1.png").read_bytes() == new_image
    ticks = [line for line in rest if "chunk_index" in line]
    runs = [tick["run"] for tick in ticks]
    assert runs == sorted(runs)
    assert rest.index(reset) == runs.index(1)
    for run in (0, 1):
        indices = [tick["chunk_index"] for tick in ticks if tick["run"] == run]
        assert indices == list(range(len(indices)))
    (steered,) = [tick for tick in ticks if tick["events"]]
    assert steered["prompt"] == "night"
    (event,) = steered["events"]
    (control,) = event["controls"]
    assert (event["event_id"], control["track"], control["schema"]) == (4, KEYS["track"], KEYS["schema"])
    assert json.dumps(control["data"], separators=(",", ":")).encode() == parse_control(*KEYS.values())
    assert num_frames(mp4) == sum(tick["num_media_frames"] for tick in ticks)


async def test_formats_without_h264_have_a_log_and_no_video(tmp_path: Path) -> None:
    async with recording_server(tmp_path) as server:
        socket = await server.connect()
        session_id = (await socket.start(format="jpeg"))["session_id"]
        await socket.media()
        await socket.send("session.close")
        await socket.closed()
        assert len(await lines(server, session_id)) > 1
        assert (await get(server, f"{session_id}/recording.mp4")).status_code == 404


async def test_a_full_disk_ends_the_recording_and_not_the_session(tmp_path: Path) -> None:
    async with recording_server(tmp_path) as server:
        socket = await server.connect()
        session_id = (await socket.start())["session_id"]
        await until_media(socket, run=0, chunk_index=1)
        await server.pause(socket)
        await until_logged(server, session_id)
        actor = server.context.table.find(session_id, None)
        before = await lines(server, session_id)
        log = tmp_path / session_id / "events.jsonl"
        log.unlink()
        log.symlink_to("/dev/full")
        await socket.send("session.unpause")
        await until_media(socket, run=0, chunk_index=5)
        await server.until(lambda: not actor.recording)
        view = (await get(server, session_id)).json()
        assert (view["state"], view["recording"]) == ("active", False)
        assert num_failures(server) == 1
        log.unlink()
        log.write_bytes(b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in before))
        assert await lines(server, session_id) == before
        await socket.send("session.close")
        assert await socket.closed() == 1000


async def test_a_disk_that_hangs_keeps_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is a pipe that nobody reads; the next session gets the place although the last flush hangs."""
    monkeypatch.setattr("server.session_life.FLUSH_TIMEOUT_S", 0.2)
    async with recording_server(tmp_path) as server:
        socket = await server.connect()
        session_id = (await socket.start())["session_id"]
        await until_media(socket, run=0, chunk_index=1)
        await server.pause(socket)
        await until_logged(server, session_id)
        log = tmp_path / session_id / "events.jsonl"
        log.unlink()
        os.mkfifo(log)
        try:
            await socket.send("session.unpause")
            await until_media(socket, run=0, chunk_index=4)
            await socket.send("session.close")
            assert await socket.closed() == 1000
            assert server.context.table.num_resident == 0
        finally:
            # A reader lets the thread go that waits for one, or that comes to it later.
            reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
            try:
                await server.until(lambda: num_failures(server) == 1)
            finally:
                os.close(reader)


async def test_recordings_are_their_owners(tmp_path: Path) -> None:
    async with recording_server(tmp_path, server=ServerSection(tokens=("mine", "theirs"))) as server:
        socket = await server.connect(additional_headers={"Authorization": "Bearer mine"})
        session_id = (await socket.start())["session_id"]
        await socket.media()
        await socket.send("session.close")
        await socket.closed()
        for path in (f"{session_id}/events.jsonl", f"{session_id}/recording.mp4"):
            assert (await get(server, path, token="mine")).status_code == 200
            assert (await get(server, path, token="theirs")).status_code == 404
            assert (await get(server, path)).status_code == 401


async def test_without_a_folder_nothing_is_recorded() -> None:
    async with serving() as server:
        socket = await server.connect()
        session_id = (await socket.start())["session_id"]
        assert (await get(server, session_id)).json()["recording"] is False
        answer = await get(server, f"{session_id}/recording.mp4")
        assert answer.status_code == 404
        assert "recording.folder" in answer.json()["error"]["message"]


def test_a_bad_folder_stops_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert main(["demo", "--no-browser", "--port", "0", "--recording.folder", str(file)]) == 2
    assert "recording.folder" in capsys.readouterr().err
