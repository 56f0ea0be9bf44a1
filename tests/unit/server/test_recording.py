"""Recordings on a real disk: order, room, ownership, and what happens when the disk won't."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from server.config import RecordingSection
from server.config_values import ConfigError
from server.errors import UnknownId
from server.recording import LOG_FILE, MP4_FILE, SEARCH_BYTES, Recordings, SessionRecording
from tests.support.full_disk import SmallDisk, full_disk

ALICE = "digest-of-a-token"


class Calendar:
    """A wall clock that moves a second a look."""

    def __init__(self) -> None:
        self._now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        self._now += timedelta(seconds=1)
        return self._now


@contextmanager
def recordings_in(folder: Path, *, max_bytes: int | None = None) -> Iterator[tuple[Recordings, CollectorRegistry]]:
    registry = CollectorRegistry()
    recordings = Recordings(RecordingSection(folder=str(folder), max_bytes=max_bytes), registry, now=Calendar())
    try:
        yield recordings, registry
    finally:
        recordings.close()


def begin(recordings: Recordings, session_id: str, owner: str | None = ALICE) -> SessionRecording:
    recording = recordings.begin(session_id, owner)
    assert recording is not None
    return recording


def content(recordings: Recordings, session_id: str, file: str, owner: str | None = ALICE) -> bytes:
    path, num_bytes = recordings.find(session_id, owner, file)
    return path.read_bytes()[:num_bytes]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def test_appends_come_out_in_order_and_stay_after_the_end(tmp_path: Path) -> None:
    with recordings_in(tmp_path / "new" / "folder") as (recordings, registry):
        recording = begin(recordings, "s-1")
        assert recording.active
        for index in range(50):
            recording.append(MP4_FILE, bytes([index]))
            recording.append(LOG_FILE, b"%d\n" % index)
        await recording.close()
        await recording.close()
        assert not recording.active
        recording.append(MP4_FILE, b"too late")
        assert content(recordings, "s-1", MP4_FILE) == bytes(range(50))
        assert content(recordings, "s-1", LOG_FILE) == b"".join(b"%d\n" % index for index in range(50))
        assert registry.get_sample_value("worldserve_recording_bytes") == bytes_on_disk(tmp_path)
        assert registry.get_sample_value("worldserve_recording_failures_total") == 0


async def test_a_recording_is_its_owners(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as (recordings, _):
        recording = begin(recordings, "s-1")
        recording.append(LOG_FILE, b"line\n")
        await recording.close()
        assert content(recordings, "s-1", LOG_FILE) == b"line\n"
        for owner, session_id, file in (
            (None, "s-1", LOG_FILE),
            ("another", "s-1", LOG_FILE),
            (ALICE, "s-2", LOG_FILE),
            (ALICE, "../s-1", LOG_FILE),
            (ALICE, "s-1", MP4_FILE),
        ):
            with pytest.raises(UnknownId):
                recordings.find(session_id, owner, file)


async def test_recordings_outlive_the_server(tmp_path: Path) -> None:
    (tmp_path / "something else").mkdir()
    (tmp_path / "a file").write_bytes(b"not ours")
    with recordings_in(tmp_path) as (recordings, _):
        recording = begin(recordings, "s-1")
        recording.append(LOG_FILE, b"line\n")
        await recording.close()
    with recordings_in(tmp_path) as (recordings, registry):
        assert content(recordings, "s-1", LOG_FILE) == b"line\n"
        ours = bytes_on_disk(tmp_path / "s-1")
        assert registry.get_sample_value("worldserve_recording_bytes") == ours


@pytest.mark.parametrize(
    "whole", [b"", b"line\n", b"line\n\n", b"x" * (SEARCH_BYTES - 1) + b"\n", b"x" * 200_000 + b"\n"]
)
@pytest.mark.parametrize("torn", [b"", b'{"run": 0, "chu', b"\0" * (SEARCH_BYTES + 1)])
async def test_a_line_that_a_dead_server_left_unfinished_is_cut_off(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    with recordings_in(tmp_path) as (recordings, _):
        recording = begin(recordings, "s-1")
        recording.append(LOG_FILE, b"line\n")
        recording.append(MP4_FILE, b"no line")
        await recording.close()
    (tmp_path / "s-1" / LOG_FILE).write_bytes(whole + torn)
    with recordings_in(tmp_path) as (recordings, registry):
        if whole:
            assert content(recordings, "s-1", LOG_FILE) == whole
        else:
            with pytest.raises(UnknownId):
                recordings.find("s-1", ALICE, LOG_FILE)
        assert (tmp_path / "s-1" / LOG_FILE).read_bytes() == whole
        assert content(recordings, "s-1", MP4_FILE) == b"no line"
        assert registry.get_sample_value("worldserve_recording_bytes") == bytes_on_disk(tmp_path)


async def test_the_oldest_that_ended_makes_room(tmp_path: Path) -> None:
    with recordings_in(tmp_path, max_bytes=3500) as (recordings, registry):
        for session_id in ("s-1", "s-2"):
            recording = begin(recordings, session_id)
            recording.append(MP4_FILE, bytes(1000))
            await recording.close()
        live = begin(recordings, "s-3")
        live.append(MP4_FILE, bytes(1000))
        live.append(MP4_FILE, bytes(1000))
        await live.close()
        assert names(tmp_path) == ["s-2", "s-3"]
        with pytest.raises(UnknownId):
            recordings.find("s-1", ALICE, MP4_FILE)
        assert len(content(recordings, "s-3", MP4_FILE)) == 2000
        assert registry.get_sample_value("worldserve_recording_bytes") == bytes_on_disk(tmp_path) < 3500
        assert registry.get_sample_value("worldserve_recordings_evicted_total") == 1


async def test_a_server_that_finds_too_much_deletes_the_oldest_first(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as (recordings, _):
        for session_id in ("s-b", "s-a"):
            recording = begin(recordings, session_id)
            recording.append(MP4_FILE, bytes(1000))
            await recording.close()
    with recordings_in(tmp_path, max_bytes=1800) as (recordings, _):
        await begin(recordings, "s-c").close()
        assert names(tmp_path) == ["s-a", "s-c"]


async def test_what_is_being_written_is_never_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with recordings_in(tmp_path, max_bytes=1500) as (recordings, registry):
        first, second = begin(recordings, "s-1"), begin(recordings, "s-2")
        first.append(MP4_FILE, bytes(1000))
        await until_written(recordings, "s-1", MP4_FILE)
        second.append(MP4_FILE, bytes(1000))
        await second.close()
        await first.close()
        assert names(tmp_path) == ["s-1", "s-2"]
        assert "recording.max_bytes" in caplog.text
        assert registry.get_sample_value("worldserve_recording_failures_total") == 1
        assert bytes_on_disk(tmp_path) < 1500


async def test_a_full_disk_stops_the_recording_and_keeps_what_came_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recordings_in(tmp_path) as (recordings, registry):
        recording = begin(recordings, "s-1")
        recording.append(LOG_FILE, b"line\n")
        await until_written(recordings, "s-1", LOG_FILE)
        (tmp_path / "s-1" / MP4_FILE).symlink_to("/dev/full")
        recording.append(MP4_FILE, bytes(1000))
        recording.append(LOG_FILE, b"never written\n")
        await recording.close()
        assert not recording.active
        assert content(recordings, "s-1", LOG_FILE) == b"line\n"
        assert "s-1 is no longer recorded: [Errno 28]" in caplog.text
        assert registry.get_sample_value("worldserve_recording_failures_total") == 1
        (tmp_path / "s-1" / MP4_FILE).unlink()
        assert registry.get_sample_value("worldserve_recording_bytes") == bytes_on_disk(tmp_path)


async def test_half_of_an_append_is_cut_off_a_full_disk(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as (recordings, registry), full_disk() as disk:
        recording = begin(recordings, "s-1")
        recording.append(MP4_FILE, b"whole")
        await until_written(recordings, "s-1", MP4_FILE)
        disk.is_full = True
        recording.append(MP4_FILE, bytes(1000))
        await recording.close()
        assert disk.num_refusals == 1
        assert (tmp_path / "s-1" / MP4_FILE).read_bytes() == b"whole"
        assert registry.get_sample_value("worldserve_recording_bytes") == bytes_on_disk(tmp_path)


async def test_on_a_full_disk_the_oldest_finished_recordings_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.recording.DISK_ROOM_BYTES", 500)
    with recordings_in(tmp_path) as (recordings, registry), full_disk(SmallDisk(tmp_path, 2500)) as disk:
        for session_id in ("s-1", "s-2"):
            old = begin(recordings, session_id)
            old.append(LOG_FILE, bytes(800))
            await old.close()
        running = begin(recordings, "s-3")
        running.append(LOG_FILE, b"a" * 300)
        running.append(LOG_FILE, b"b" * 600)
        await running.close()
        assert disk.num_refusals == 1
        assert names(tmp_path) == ["s-2", "s-3"]
        assert content(recordings, "s-3", LOG_FILE) == b"a" * 300 + b"b" * 600
        assert registry.get_sample_value("worldserve_recording_bytes") == bytes_on_disk(tmp_path)
        assert registry.get_sample_value("worldserve_recordings_evicted_total") == 1
        assert registry.get_sample_value("worldserve_recording_failures_total") == 0
    assert "the disk of the recordings is full; recordings deleted, the oldest first: 1" in caplog.text


async def test_a_disk_that_stays_full_stops_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else fills the disk: what one recording can cost the others is bounded."""
    monkeypatch.setattr("server.recording.DISK_ROOM_BYTES", 500)
    with recordings_in(tmp_path) as (recordings, registry), full_disk() as disk:
        for session_id in ("s-1", "s-2", "s-3"):
            old = begin(recordings, session_id)
            old.append(LOG_FILE, bytes(800))
            await old.close()
        running = begin(recordings, "s-4")
        running.append(LOG_FILE, b"a" * 300)
        await until_written(recordings, "s-4", LOG_FILE)
        disk.is_full = True
        for _ in range(5):
            running.append(LOG_FILE, b"b" * 300)
        await running.close()
        assert disk.num_refusals == 2
        assert names(tmp_path) == ["s-2", "s-3", "s-4"]
        assert content(recordings, "s-4", LOG_FILE) == b"a" * 300
        assert registry.get_sample_value("worldserve_recording_failures_total") == 1
    assert "session s-4 is no longer recorded: [Errno 28]" in caplog.text


async def test_a_folder_that_vanishes_stops_the_recording(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as (recordings, registry):
        recording = begin(recordings, "s-1")
        recording.append(LOG_FILE, b"line\n")
        await until_written(recordings, "s-1", LOG_FILE)
        shutil.rmtree(tmp_path / "s-1")
        recording.append(LOG_FILE, b"line\n")
        await recording.close()
        assert registry.get_sample_value("worldserve_recording_failures_total") == 1


async def test_a_recording_with_a_write_under_way_is_not_deleted(tmp_path: Path) -> None:
    """The write hangs in a pipe that nobody reads."""
    with recordings_in(tmp_path, max_bytes=1000) as (recordings, registry):
        stuck = begin(recordings, "s-1")
        stuck.append(LOG_FILE, bytes(500))
        await until_written(recordings, "s-1", LOG_FILE)
        pipe = tmp_path / "s-1" / MP4_FILE
        os.mkfifo(pipe)
        before = bytes_on_disk(tmp_path)
        stuck.append(MP4_FILE, bytes(10))
        while registry.get_sample_value("worldserve_recording_bytes") == before:  # noqa: ASYNC110
            await asyncio.sleep(0)
        stuck.stop("enough")
        other = begin(recordings, "s-2")
        other.append(LOG_FILE, bytes(900))
        await other.close()
        assert "s-1" in names(tmp_path)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        await stuck.close()
        os.close(reader)
        third = begin(recordings, "s-3")
        third.append(LOG_FILE, bytes(700))
        await third.close()
        assert names(tmp_path) == ["s-2", "s-3"]
        assert registry.get_sample_value("worldserve_recording_bytes") == bytes_on_disk(tmp_path)


async def test_a_disk_that_does_not_keep_up_stops_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.recording.MAX_WAITING_BYTES", 100)
    with recordings_in(tmp_path) as (recordings, _):
        recording = begin(recordings, "s-1")
        recording.append(LOG_FILE, bytes(90))
        recording.append(LOG_FILE, bytes(90))
        assert not recording.active
        assert "does not keep up, 180 bytes" in caplog.text
        await recording.close()


def test_a_bad_folder_is_an_error_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for folder in (file, file / "below", Path("/proc/recordings")):
        with pytest.raises(ConfigError, match=r"recording\.folder: .* can't be written: "), recordings_in(folder):
            pass


async def test_nothing_is_recorded_without_a_folder() -> None:
    recordings = Recordings(RecordingSection(), CollectorRegistry())
    assert recordings.begin("s-1", None) is None
    with pytest.raises(UnknownId, match=r"recording\.folder"):
        recordings.find("s-1", None, LOG_FILE)
    recordings.close()


def test_the_section() -> None:
    with pytest.raises(ConfigError, match=r"recording\.max_bytes: expected a number above 0, got 0"):
        RecordingSection(max_bytes=0)


async def until_written(recordings: Recordings, session_id: str, file: str) -> None:
    """Wait for a thread; the test's time-out ends it otherwise."""
    while True:
        try:
            recordings.find(session_id, ALICE, file)
        except UnknownId:
            await asyncio.sleep(0.001)
        else:
            return
