"""The Python client without asyncio: the same worlds, in calls that wait. An event loop of its own runs in a thread.

with connect("ws://127.0.0.1:8000") as world:
    world.hold("w")
    for chunk in world.chunks():
        ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from clients.python.chunk import Chunk, Frame
from clients.python.loop_thread import LoopThread
from clients.python.mp4 import Mp4Writer
from clients.python.receipts import Applied, Receipt
from clients.python.spectator import Spectator
from clients.python.world import CAMERA_TRACK, Image, WorldClient, WorldOptions
from server.wire.messages import SessionStarted, SessionState, SessionWatching

Client = TypeVar("Client", WorldClient, Spectator)


def connect(url: str, **options: Unpack[WorldOptions]) -> World:
    """Start a session on a server and return it. Options and errors are those of `WorldClient`."""
    return World(lambda: WorldClient(url, **options))


def watch(
    url: str, *, watch_token: str | None = None, session_id: str | None = None, token: str | None = None
) -> WatchedWorld:
    """Begin to watch somebody else's session. Arguments and errors are those of `Spectator`."""
    return WatchedWorld(lambda: Spectator(url, watch_token=watch_token, session_id=session_id, token=token))


class BlockingReceipt:
    """One accepted event."""

    def __init__(self, receipt: Receipt, thread: LoopThread) -> None:
        self._receipt = receipt
        self._thread = thread

    @property
    def event_id(self) -> int:
        return self._receipt.event_id

    @property
    def is_settled(self) -> bool:
        """True once the event was applied or dropped."""
        return self._receipt.applied.done()

    def wait(self, *, timeout_s: float | None = None) -> Applied:
        """Wait until the chunk that shows the event has arrived. Raises `EventDropped` or `TimeoutError`."""
        if self._receipt.applied.done():
            return self._receipt.applied.result()
        return self._thread.run(self._wait(timeout_s))

    async def _wait(self, timeout_s: float | None) -> Applied:
        async with asyncio.timeout(timeout_s):
            return await self._receipt


class _InThread(Generic[Client]):
    """An asyncio client that lives in the loop of a thread, from its entering to its exit."""

    def __init__(self, name: str, create: Callable[[], Client]) -> None:
        self._thread = LoopThread(name)
        try:
            self._client: Client = self._thread.run(self._open(create))
        except BaseException:
            self._thread.stop()
            raise

    @staticmethod
    async def _open(create: Callable[[], Client]) -> Client:
        # Inside the loop, because the parts of a client belong to the loop that runs when they are made.
        client = create()
        await client.__aenter__()
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave what was entered, and stop the thread. Closing twice is fine."""
        if self._thread.is_running:
            try:
                self._thread.run(self._client.__aexit__(None, None, None))
            finally:
                self._thread.stop()


class World(_InThread[WorldClient]):
    """One session on a server, see `WorldClient`, whose errors are those of the methods of the same name here.

    Use it as a context manager, or `close` it, which ends the session and frees its place. Not for use by two threads
    at a time, but for the steering: one may take chunks while another steers.
    """

    def __init__(self, create: Callable[[], WorldClient]) -> None:
        super().__init__("world", create)

    @property
    def session(self) -> SessionStarted:
        """What the server said when it last started or resumed the session."""
        return self._client.session

    @property
    def run(self) -> int:
        """Number of resets so far."""
        return self._client.run

    # ------------------------------------------------------------ steering

    def hold(self, *keys: str) -> BlockingReceipt:
        """Hold exactly these keys from now on; no keys release all."""
        return self._receipt(self._thread.run(self._client.hold(*keys)))

    def tap(self, *keys: str) -> BlockingReceipt:
        """Press keys for one latent frame, beside those that are held."""
        return self._receipt(self._thread.run(self._client.tap(*keys)))

    def script(self, frames: Sequence[Sequence[str]]) -> BlockingReceipt:
        """Press these keys in the next latent frames, one set each, then none."""
        return self._receipt(self._thread.run(self._client.script(frames)))

    def trajectory(
        self,
        poses: Sequence[Any],
        *,
        intrinsics: Sequence[Any] | None = None,
        intrinsics_size: Sequence[int] | None = None,
    ) -> BlockingReceipt:
        """Follow camera-to-world poses, 4x4 as nested lists, one a latent frame."""
        path = self._client.trajectory(poses, intrinsics=intrinsics, intrinsics_size=intrinsics_size)
        return self._receipt(self._thread.run(path))

    def motion(
        self, mode: str, *, translation: Sequence[float], rotation: Sequence[float], transition_chunks: int = 1
    ) -> BlockingReceipt:
        """Send an SE(3) "target" or "velocity"; the rotation is a unit quaternion x, y, z, w."""
        sent = self._client.motion(
            mode, translation=translation, rotation=rotation, transition_chunks=transition_chunks
        )
        return self._receipt(self._thread.run(sent))

    def prompt(self, text: str) -> BlockingReceipt:
        """Change the prompt from the next chunk on."""
        return self._receipt(self._thread.run(self._client.prompt(text)))

    def control(self, schema: str, data: dict[str, Any], *, track: str = CAMERA_TRACK) -> BlockingReceipt:
        """Send one control of any schema."""
        return self._receipt(self._thread.run(self._client.control(schema, data, track=track)))

    def send_event(
        self, *, prompt: str | None = None, controls: Sequence[dict[str, Any]] | None = None
    ) -> BlockingReceipt:
        """Send one event and wait until it is queued."""
        return self._receipt(self._thread.run(self._client.send_event(prompt=prompt, controls=controls)))

    def reset(self, *, prompt: str | None = None, image: Image | None = None, seed: int | None = None) -> None:
        """Start the rollout again. Without a prompt the new run has none; image and seed are kept unless given."""
        self._thread.run(self._client.reset(prompt=prompt, image=image, seed=seed))

    def pause(self) -> None:
        """Stop making chunks; events still queue."""
        self._thread.run(self._client.pause())

    def unpause(self) -> None:
        """Go on making chunks."""
        self._thread.run(self._client.unpause())

    def _receipt(self, receipt: Receipt) -> BlockingReceipt:
        return BlockingReceipt(receipt, self._thread)

    # ------------------------------------------------------------ watching

    def chunks(self) -> Iterator[Chunk]:
        """Iterate over the chunks, in order, each once; ends when the session is closed."""
        while (chunk := self.next_chunk()) is not None:
            yield chunk

    def next_chunk(self, *, timeout_s: float | None = None) -> Chunk | None:
        """Take the next chunk, None when the session is closed, by `close` too. Raises `TimeoutError` as well."""
        if not self._thread.is_running:
            return None
        return self._thread.run(self._client.next_chunk(timeout_s=timeout_s))

    def frames(self) -> Iterator[Frame]:
        """Iterate over the decoded media frames of the chunks, as they come."""
        for chunk in self.chunks():
            for index, image in enumerate(chunk.frames()):
                yield Frame(image=image, index=index, chunk=chunk)

    @contextmanager
    def recording(self, path: Path | str) -> Iterator[Mp4Writer]:
        """Write every chunk that is taken in the meantime to an MP4 file."""
        manager = self._client.recording(path)
        writer = self._thread.run(manager.__aenter__())
        try:
            yield writer
        finally:
            self._thread.run(manager.__aexit__(None, None, None))

    def save_mp4(self, path: Path | str, *, num_chunks: int | None = None) -> int:
        """Write the next chunks to an MP4 file, all until the session ends if no number is given; returns how many."""
        return self._thread.run(self._client.save_mp4(path, num_chunks=num_chunks))

    def report_shown(self, chunk: Chunk, *, buffered_s: float = 0.0) -> None:
        """Tell the server that the first frame of a chunk is on screen, and how much video is left from there."""
        self._thread.run(self._client.report_shown(chunk, buffered_s=buffered_s))


class WatchedWorld(_InThread[Spectator]):
    """A session that is watched, see `Spectator`. Use it as a context manager, or `close` it."""

    def __init__(self, create: Callable[[], Spectator]) -> None:
        super().__init__("world-spectator", create)

    @property
    def session(self) -> SessionWatching:
        """What the server said when it was last joined."""
        return self._client.session

    @property
    def state(self) -> SessionState:
        """The session's state, as of the last chunk that was taken."""
        return self._client.state

    def chunks(self) -> Iterator[Chunk]:
        """Iterate over the chunks, some of which may be missing; ends when the session is closed."""
        while (chunk := self.next_chunk()) is not None:
            yield chunk

    def next_chunk(self) -> Chunk | None:
        """Take the next chunk, None when the session is closed or `close` was called."""
        if not self._thread.is_running:
            return None
        return self._thread.run(self._client.next_chunk())
