"""Recordings on disk: an mp4 and an event log for each session, written in threads and evicted oldest first.

    folder/SESSION_ID/  about.json       whose it is and since when
                        events.jsonl     `server/event_log.py`
                        image-RUN.png    start images, as they were uploaded
                        recording.mp4    the session's chunks, one fragment each

    session ─ append ─> queue ─> make room ─> thread: open, write, close ─ disk full ─> make room there, once again
                          └── anything goes wrong: this recording stops, is kept as far as it came; its session lives on

A recording is readable while it is written: `num_bytes` counts whole appends only. What a server that died had half
written of a log's last line is cut off by the next one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from server.config import RecordingSection
from server.config_values import ConfigError
from server.errors import ErrorCode, UnknownId
from server.logs import about
from server.tasks import TaskSet

MP4_FILE = "recording.mp4"
LOG_FILE = "events.jsonl"
ABOUT_FILE = "about.json"

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""What may wait for the disk of one session, minutes of video; then the recording stops."""

DISK_ROOM_BYTES = MAX_WAITING_BYTES
"""How much is made free at once on a disk that is full, so that the next append has room too."""

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)

FLUSH_TIMEOUT_S = 5.0
"""How long the end of a session waits for the disk."""

NUM_THREADS = 2

SEARCH_BYTES = 64 * 1024
"""How much of a log is read at once to find its last whole line."""

log = logging.getLogger(__name__)


class RecordingStopped(Exception):
    """A recording can't go on; the text says why."""


class RecordingMetrics:
    """What `/metrics` shows of recordings."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes = Gauge("worldserve_recording_bytes", "Bytes of all recordings on disk.", registry=registry)
        self.failures = Counter(
            "worldserve_recording_failures", "Recordings that stopped before their session did.", registry=registry
        )
        self.evicted = Counter(
            "worldserve_recordings_evicted", "Recordings deleted to make room for newer ones.", registry=registry
        )


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What `about.json` says. `owner` is a digest of the token that started the session."""

    session_id: str
    owner: str | None
    created_at: str


@dataclass(slots=True, kw_only=True)
class Recording:
    """One session's folder. `num_bytes` has the whole appends of each file; `writing` while a thread may be in it."""

    about: About
    folder: Path
    num_bytes: dict[str, int] = field(default_factory=dict)
    writing: bool = True

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values())


class Recordings:
    """All recordings of a server. With no folder configured there are none, and `begin` returns None."""

    def __init__(
        self, section: RecordingSection, registry: CollectorRegistry, *, now: Callable[[], datetime] | None = None
    ) -> None:
        """Take over what the folder holds. Raises `ConfigError` if it can't be written."""
        self._max_bytes = section.max_bytes
        self._now = now or _utc_now
        self._metrics = RecordingMetrics(registry)
        self._tasks = TaskSet("recordings")
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="record")
        self._folder = _usable_folder(section.folder) if section.folder else None
        self._recordings: dict[str, Recording] = {}
        if self._folder is not None:
            found = sorted(_find_recordings(self._folder), key=lambda it: it.about.created_at)
            self._recordings = {it.about.session_id: it for it in found}
        self._total_bytes = sum(it.total_bytes for it in self._recordings.values())
        self._metrics.bytes.set(self._total_bytes)

    @property
    def enabled(self) -> bool:
        return self._folder is not None

    def begin(self, session_id: str, owner: str | None) -> SessionRecording | None:
        """Begin a recording. Its folder is made behind the caller's back."""
        if self._folder is None:
            return None
        whose = About(session_id=session_id, owner=owner, created_at=self._now().isoformat())
        recording = Recording(about=whose, folder=self._folder / session_id)
        self._recordings[session_id] = recording
        return SessionRecording(self, recording, self._tasks)

    def find(self, session_id: str, owner: str | None, file: str) -> tuple[Path, int]:
        """Return a file of a recording and how many bytes of it are whole. Raises `UnknownId`."""
        if not self.enabled:
            raise UnknownId(ErrorCode.NOT_FOUND, "recording is off on this server (recording.folder)")
        recording = self._recordings.get(session_id)
        if recording is None or recording.about.owner != owner:
            raise UnknownId(ErrorCode.NOT_FOUND, f"there is no recording of {session_id[:64]!r}, or no longer")
        num_bytes = recording.num_bytes.get(file, 0)
        if not num_bytes:
            raise UnknownId(ErrorCode.NOT_FOUND, f"the recording of {session_id!r} has no {file} (yet)")
        return recording.folder / file, num_bytes

    async def append(self, recording: Recording, file: str, data: bytes) -> None:
        """Append to a file of a recording, after making room for it. Raises `RecordingStopped` or `OSError`."""
        await self._make_room(len(data))
        self._count(len(data))
        written = recording.num_bytes.get(file, 0)
        try:
            await self._write(partial(_append, recording.folder / file, written, data))
        except BaseException:
            self._count(-len(data))
            raise
        recording.num_bytes[file] = written + len(data)

    async def create_folder(self, recording: Recording) -> None:
        await self._write(recording.folder.mkdir)
        await self.append(recording, ABOUT_FILE, msgspec.json.encode(recording.about))

    def stopped(self, recording: Recording, reason: object) -> None:
        """Note that a recording ended before its session."""
        self._metrics.failures.inc()
        session_id = recording.about.session_id
        log.error("session %s is no longer recorded: %s", session_id, reason, extra=about(session_id=session_id))

    def close(self) -> None:
        """Give the threads back; appends that wait are dropped."""
        self._tasks.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _make_room(self, num_bytes: int) -> None:
        """Delete the oldest finished recordings until this fits. Raises `RecordingStopped` if all are being written."""
        if self._max_bytes is None:
            return
        while self._total_bytes + num_bytes > self._max_bytes:
            oldest = self._oldest_finished()
            if oldest is None:
                raise RecordingStopped(f"{self._max_bytes} bytes are in use (recording.max_bytes)")
            await self._evict(oldest)

    async def _write(self, work: Callable[[], None]) -> None:
        """Write to the disk, once again with room made if it is full. Raises `OSError`."""
        try:
            await self._run(work)
        except OSError as error:
            if error.errno not in DISK_IS_FULL or not await self._free_disk():
                raise
            await self._run(work)

    async def _free_disk(self) -> bool:
        """Delete the oldest finished recordings, as many as make some room. Returns whether there was one."""
        freed_bytes = num_deleted = 0
        while freed_bytes < DISK_ROOM_BYTES and (oldest := self._oldest_finished()) is not None:
            freed_bytes += oldest.total_bytes
            num_deleted += 1
            await self._evict(oldest)
        if num_deleted:
            log.warning("the disk of the recordings is full; recordings deleted, the oldest first: %d", num_deleted)
        return num_deleted > 0

    def _oldest_finished(self) -> Recording | None:
        return next((it for it in self._recordings.values() if not it.writing), None)

    async def _evict(self, recording: Recording) -> None:
        del self._recordings[recording.about.session_id]
        self._count(-recording.total_bytes)
        self._metrics.evicted.inc()
        try:
            await self._run(partial(shutil.rmtree, recording.folder))
        except OSError as error:
            log.error("recording %s could not be deleted: %s", recording.about.session_id, error)

    async def _run(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _count(self, num_bytes: int) -> None:
        self._total_bytes += num_bytes
        self._metrics.bytes.set(self._total_bytes)


class SessionRecording:
    """The recording of a session that runs. `append` returns at once and never fails."""

    def __init__(self, recordings: Recordings, recording: Recording, tasks: TaskSet) -> None:
        self.created_at = recording.about.created_at
        self._recordings = recordings
        self._recording = recording
        self._waiting: asyncio.Queue[tuple[str, bytes] | None] = asyncio.Queue()
        self._waiting_bytes = 0
        self._active = True
        self._stopped = False
        self._task = tasks.spawn(self._write())

    @property
    def active(self) -> bool:
        """Whether what is appended now will be kept."""
        return self._active

    def append(self, file: str, data: bytes) -> None:
        """Have `data` written behind what was appended before."""
        if not self._active:
            return
        self._waiting_bytes += len(data)
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self.stop(f"the disk does not keep up, {self._waiting_bytes} bytes wait for it")
            return
        self._waiting.put_nowait((file, data))

    async def close(self, *, within_s: float | None = FLUSH_TIMEOUT_S) -> None:
        """Finish the files, waiting for the disk so long, None: as long as it takes. Closing again does nothing."""
        if self._active:
            self._active = False
            self._waiting.put_nowait(None)
        await asyncio.wait((self._task,), timeout=within_s)

    async def _write(self) -> None:
        recordings, recording = self._recordings, self._recording
        try:
            await recordings.create_folder(recording)
            while (item := await self._waiting.get()) is not None:
                await recordings.append(recording, *item)
                self._waiting_bytes -= len(item[1])
        except (OSError, RecordingStopped) as error:
            self.stop(error)
        finally:
            recording.writing = False

    def stop(self, reason: object) -> None:
        """Give the recording up and keep what is written."""
        if self._stopped:
            return
        self._stopped, self._active = True, False
        self._recordings.stopped(self._recording, reason)
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)


# ---------------------------------------------------------------- disk


def _append(path: Path, written: int, data: bytes) -> None:
    """Write behind the first `written` bytes, whole or not at all."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o640)
    with open(descriptor, "wb", buffering=0) as file:
        try:
            view = memoryview(data)
            while view:
                view = view[os.pwrite(descriptor, view, written + len(data) - len(view)) :]
        except OSError:
            # What can't be cut off either is never read: readers stop at the last whole append.
            with suppress(OSError):
                file.truncate(written)
            raise


def _usable_folder(text: str) -> Path:
    folder = Path(text).expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"worldserve")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"recording.folder: {text!r} can't be written: {reason}") from error
    return folder


def _find_recordings(folder: Path) -> list[Recording]:
    """Read what earlier servers left; folders that are no recordings of ours are left alone."""
    found = []
    for path in folder.iterdir():
        try:
            whose = msgspec.json.decode((path / ABOUT_FILE).read_bytes(), type=About)
            sizes = {file.name: file.stat().st_size for file in path.iterdir()}
            if LOG_FILE in sizes:
                sizes[LOG_FILE] = _cut_torn_line(path / LOG_FILE, sizes[LOG_FILE])
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s is no recording: %s", path, error)
            continue
        if whose.session_id == path.name:
            found.append(Recording(about=whose, folder=path, num_bytes=sizes, writing=False))
    return found


def _cut_torn_line(path: Path, num_bytes: int) -> int:
    """Cut off the line that a server was writing when it died, and return how many bytes of the log are whole."""
    with path.open("rb") as file:
        whole = num_bytes
        while whole:
            begin = max(0, whole - SEARCH_BYTES)
            file.seek(begin)
            newline = file.read(whole - begin).rfind(b"\n")
            whole = begin + newline + 1
            if newline >= 0:
                break
    if whole < num_bytes:
        log.warning("%s: a line of %d bytes was not written to its end and is cut off", path, num_bytes - whole)
        # What can't be cut off is never read: readers stop at the last whole line.
        with suppress(OSError):
            os.truncate(path, whole)
    return whole


def _utc_now() -> datetime:
    return datetime.now(UTC)
