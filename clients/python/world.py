"""A world as a Python object: start it, steer it, iterate over its chunks.

Beside the caller lives the reporter, which plays a viewer at media rate and tells the server what was shown.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict, runtime_checkable

from clients.python.buffer import VirtualViewer
from clients.python.chunk import Chunk, Frame
from clients.python.link import LinkSettings
from clients.python.mp4 import Mp4Writer
from clients.python.offers import read_beginning
from clients.python.receipts import Receipt
from clients.python.session import ClientSession, SessionSettings
from server.wire.messages import (
    PROTOCOL_VERSION,
    Pacing,
    SessionReset,
    SessionStarted,
    SessionState,
    StreamFormat,
)

CAMERA_TRACK = "camera"
ACTIONS_SCHEMA = "lingbot.camera_actions.v1"
TRAJECTORY_SCHEMA = "lingbot.camera_trajectory.v1"
MOTION_SCHEMA = "lingbot.camera_motion.v1"

RESUME_DELAYS_S = (0.25, 1.0, 2.0, 4.0)

Image = str | bytes | Path
"""A start image: a name that the server offers, the bytes of a PNG, JPEG or WebP, or the path of such a file."""


class WorldOptions(TypedDict, total=False):
    """The keyword arguments of `WorldClient`."""

    prompt: str | None
    image: Image | None
    format: StreamFormat | str
    pacing: Pacing | str
    seed: int | None
    size: str | None
    model: str | None
    token: str | None
    event_base: int
    report_playback: bool
    resume_delays_s: Sequence[float]
    max_buffered_chunks: int
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[object]]


class WorldClient:
    """One session on a server. Use it as an async context manager; leaving closes the session.

    Without `image` the server's own first image is taken, without `prompt` the one that it offers with the image.
    `pacing` "playback" reports what a viewer at media rate would have seen of the chunks taken from `chunks`; with
    `report_playback=False` call `report_shown` instead. Chunks must be taken: who does not take them stops the world.
    Where `max_buffered_chunks` wait to be taken the session is paused, and goes on once half of them are taken.
    When the link breaks, the session is resumed after each of `resume_delays_s` in turn; none means never.
    `clock` and `sleep` are seconds of one clock.

    Raises (on entering): `ConnectFailed`, or `Refused` if the server does not start the session.
    """

    def __init__(
        self,
        url: str,
        *,
        prompt: str | None = None,
        image: Image | None = None,
        format: StreamFormat | str = StreamFormat.FMP4,
        pacing: Pacing | str = Pacing.PLAYBACK,
        seed: int | None = None,
        size: str | None = None,
        model: str | None = None,
        token: str | None = None,
        event_base: int = 0,
        report_playback: bool = True,
        resume_delays_s: Sequence[float] = RESUME_DELAYS_S,
        max_buffered_chunks: int = 16,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._start_fields = {
            "type": "session.start",
            "protocol": PROTOCOL_VERSION,
            "model": model,
            "seed": seed,
            "size": size,
            "format": str(format),
            "pacing": str(pacing),
            "event_base": event_base,
        }
        self._prompt, self._image = prompt, image
        self._url, self._token = url, token
        self._report_playback = report_playback
        self._clock = clock
        self._sleep = sleep
        settings = SessionSettings(
            link=LinkSettings(url=url, token=token),
            resume_delays_s=tuple(resume_delays_s),
            max_buffered_chunks=max_buffered_chunks,
            clock=clock,
            sleep=sleep,
        )
        self._session = ClientSession(settings, event_base=event_base)
        self._held: tuple[str, ...] = ()
        self._viewer = VirtualViewer()
        self._taken: asyncio.Queue[tuple[float, Chunk]] = asyncio.Queue()
        self._reporter: asyncio.Task[None] | None = None
        self._recordings: list[Mp4Writer] = []

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        prompt, image = await self._beginning()
        await self._session.start(self._start_fields | {"prompt": prompt, "image": await _image_reference(image)})
        if self._report_playback and self.session.pacing is Pacing.PLAYBACK:
            self._reporter = asyncio.create_task(self._report(), name="world-reporter")
        return self

    async def _beginning(self) -> tuple[str, Image]:
        """Return prompt and start image, from the server's offers where the caller named none."""
        if self._image is not None and self._prompt is not None:
            return self._prompt, self._image
        if isinstance(self._image, bytes | Path):
            raise ValueError("prompt: an image of one's own brings none, so it must be given")
        beginning = await read_beginning(self._url, token=self._token, image=self._image)
        return beginning.prompt if self._prompt is None else self._prompt, beginning.image

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        finally:
            if self._reporter is not None:
                self._reporter.cancel()
                await asyncio.gather(self._reporter, return_exceptions=True)
            await self._session.stop()

    async def close(self) -> None:
        """End the session and free its place. Closing twice is fine; without a link the session is left to expire."""
        await self._session.close()

    @property
    def session(self) -> SessionStarted:
        """What the server said when it last started or resumed the session."""
        return self._session.started

    @property
    def run(self) -> int:
        """Number of resets so far."""
        return self._session.run

    @property
    def queue_position(self) -> int | None:
        """Place in the server's line while entering waits for one, counted from 1."""
        return self._session.queue_position

    # ------------------------------------------------------------ steering

    async def hold(self, *keys: str) -> Receipt:
        """Hold exactly these keys from now on; no keys release all."""
        receipt = await self.control(ACTIONS_SCHEMA, {"mode": "state", "held": list(keys)})
        self._held = keys
        return receipt

    async def tap(self, *keys: str) -> Receipt:
        """Press keys for one latent frame, beside those that are held."""
        pressed = [*self._held, *(key for key in keys if key not in self._held)]
        transitions = [{"actions": pressed}, {"actions": list(self._held)}]
        return await self.control(ACTIONS_SCHEMA, {"mode": "state", "transitions": transitions})

    async def script(self, frames: Sequence[Sequence[str]]) -> Receipt:
        """Press these keys in the next latent frames, one set each, then none."""
        frames_of_keys = [list(keys) for keys in frames]
        return await self._in_place_of_held(ACTIONS_SCHEMA, {"mode": "script", "frames": frames_of_keys})

    async def trajectory(
        self,
        poses: Sequence[Any],
        *,
        intrinsics: Sequence[Any] | None = None,
        intrinsics_size: Sequence[int] | None = None,
    ) -> Receipt:
        """Follow camera-to-world poses, 4x4 as nested lists or arrays, one a latent frame."""
        data = {"poses": _lists(poses), "intrinsics": _lists(intrinsics), "intrinsics_size": _lists(intrinsics_size)}
        given = {name: value for name, value in data.items() if value is not None}
        return await self._in_place_of_held(TRAJECTORY_SCHEMA, given)

    async def motion(
        self, mode: str, *, translation: Sequence[float], rotation: Sequence[float], transition_chunks: int = 1
    ) -> Receipt:
        """Send an SE(3) "target" or "velocity"; the rotation is a unit quaternion x, y, z, w."""
        data = {"mode": mode, "translation": _lists(translation), "rotation": _lists(rotation)}
        return await self._in_place_of_held(MOTION_SCHEMA, data | {"transition_chunks": transition_chunks})

    async def _in_place_of_held(self, schema: str, data: dict[str, Any]) -> Receipt:
        """Send a control that takes the place of the held keys; one that is refused leaves them held."""
        receipt = await self.control(schema, data)
        self._held = ()
        return receipt

    async def prompt(self, text: str) -> Receipt:
        """Change the prompt from the next chunk on."""
        return await self.send_event(prompt=text)

    async def control(self, schema: str, data: dict[str, Any], *, track: str = CAMERA_TRACK) -> Receipt:
        """Send one control of any schema."""
        return await self.send_event(controls=[{"track": track, "schema": schema, "data": data}])

    async def send_event(
        self, *, prompt: str | None = None, controls: Sequence[dict[str, Any]] | None = None
    ) -> Receipt:
        """Send one event and wait until it is queued. While the link is down it waits for the resume.

        Raises `Refused`, `SessionLost`, and `ValueError` for what cannot be a message.
        """
        return await self._session.send_event(prompt=prompt, controls=controls)

    async def reset(self, *, prompt: str | None = None, image: Image | None = None, seed: int | None = None) -> None:
        """Start the rollout again. Without a prompt the new run has none; image and seed are kept unless given.

        Returns when the new run is active. Raises `Refused`, `SessionFailed`, `LinkLost` or `SessionLost`.
        """
        reference = None if image is None else await _image_reference(image)
        run = self.run
        await self._session.request(
            SessionReset,
            {"type": "session.reset", "prompt": prompt, "image": reference, "seed": seed},
            lambda message: message.run > run and message.state in (SessionState.ACTIVE, SessionState.PAUSED),
        )
        self._held = ()

    async def pause(self) -> None:
        """Stop making chunks; events still queue. Raises as `reset` does."""
        await self._session.pause()

    async def unpause(self) -> None:
        """Go on making chunks, where too many wait to be taken once they are. Raises as `reset` does."""
        await self._session.unpause()

    # ------------------------------------------------------------ watching

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Iterate over the chunks, in order, each once, also across resumes; ends when the session is closed.

        After a link that was lost for long, chunks that the server no longer keeps are missing ("clock" and "free").

        Raises `SessionFailed` (after which `reset` and another `chunks()` are possible) or `SessionLost`.
        """
        while (chunk := await self.next_chunk()) is not None:
            yield chunk

    async def next_chunk(self, *, timeout_s: float | None = None) -> Chunk | None:
        """Take the next chunk, None when the session is closed. Raises as `chunks` does, and `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            chunk = await self._session.buffer.take()
        if chunk is None:
            return None
        shown_s = self._viewer.show(self._clock(), chunk.duration_s)
        if self._reporter is not None:
            self._taken.put_nowait((shown_s, chunk))
        for writer in self._recordings:
            await asyncio.to_thread(writer.add, chunk)
        return chunk

    async def frames(self) -> AsyncIterator[Frame]:
        """Iterate over the decoded media frames, as they come. Raises as `chunks` and `Chunk.frames` do."""
        while (chunk := await self.next_chunk()) is not None:
            for index, image in enumerate(await asyncio.to_thread(chunk.frames)):
                yield Frame(image=image, index=index, chunk=chunk)

    @asynccontextmanager
    async def recording(self, path: Path | str) -> AsyncIterator[Mp4Writer]:
        """Write every chunk that is taken in the meantime to an MP4 file. Raises `ValueError` for other formats."""
        if self.session.format is not StreamFormat.FMP4:
            raise ValueError(f"expected a session of format {StreamFormat.FMP4}, this one has {self.session.format}")
        writer = await asyncio.to_thread(Mp4Writer, path)
        self._recordings.append(writer)
        try:
            yield writer
        finally:
            self._recordings.remove(writer)
            await asyncio.to_thread(writer.close)

    async def save_mp4(self, path: Path | str, *, num_chunks: int | None = None) -> int:
        """Write the next chunks to an MP4 file, all until the session ends if no number is given; returns how many."""
        async with self.recording(path) as writer:
            while num_chunks is None or writer.num_chunks < num_chunks:
                if await self.next_chunk() is None:
                    break
        return writer.num_chunks

    async def report_shown(self, chunk: Chunk, *, buffered_s: float = 0.0) -> None:
        """Tell the server that the first frame of a chunk is on screen, and how much video is left from there."""
        await self._session.report_shown(chunk, buffered_s=buffered_s)

    async def _report(self) -> None:
        while True:
            shown_s, chunk = await self._taken.get()
            if (wait_s := shown_s - self._clock()) > 0:
                await self._sleep(wait_s)
            left_s = self._viewer.left_s(self._clock()) + self._session.buffer.waiting_s()
            await self.report_shown(chunk, buffered_s=left_s)


def _lists(value: object) -> Any:
    """Return lists and tuples as lists, and arrays as what their `tolist` makes of them; the rest as it is."""
    if isinstance(value, list | tuple):
        return [_lists(part) for part in value]
    if isinstance(value, HasLists):
        return value.tolist()
    return value


@runtime_checkable
class HasLists(Protocol):
    """An array of numpy or torch, neither of which is needed here."""

    def tolist(self) -> Any: ...


async def _image_reference(image: Image) -> dict[str, str]:
    match image:
        case str():
            return {"name": image}
        case bytes():
            return {"base64": base64.b64encode(image).decode()}
        case Path():
            data = await asyncio.to_thread(image.read_bytes)
            return {"base64": base64.b64encode(data).decode()}
