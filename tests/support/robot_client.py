"""A robot's side of the wire for tests, and a scripted worker that serves robots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from server.config import ModelSection
from server.wire.robot_arrays import pack_message, unpack_message
from server.worker import CommittedTick
from tests.support.media_chunks import part_of
from tests.support.server_client import ANSWER_TIMEOUT_S, PATIENT
from tests.support.server_scripted import Server, serving
from tests.support.server_worker import ScriptedWorker, WorkerSession, model_info
from worldmodel.errors import RequestRefused
from worldmodel.messages import (
    ChunkMedia,
    MediaFormat,
    OpenSession,
    RequestId,
    RobotInfo,
    SessionOpened,
    StateInput,
    Tick,
)
from worldmodel.observations import unpack_arrays

HEIGHT, WIDTH = 4, 6
CAMERAS = (
    "observation/exterior_image_0_left",
    "observation/exterior_image_1_left",
    "observation/wrist_image_left",
)
JOINTS = "observation/joint_position"
OFFICIAL, BARE, OPENPI = "v1/robot", "", "v1/realtime/robot/openpi"

ROBOT = RobotInfo(
    embodiment="test_arm",
    cameras=CAMERAS,
    states=(StateInput(name=JOINTS, num_dims=7),),
    image_height=HEIGHT,
    image_width=WIDTH,
    max_request_frames=4,
    action_space="joint_position",
    action_horizon=24,
    action_dims=8,
    needs_wrist_camera=True,
    num_external_cameras=2,
    needs_stereo_camera=False,
)


def observation(number: float, *, frames: int | None = None, **fields: Any) -> dict[str, Any]:
    """A request whose joints, and pictures, name it."""
    shape = (HEIGHT, WIDTH, 3) if frames is None else (frames, HEIGHT, WIDTH, 3)
    pictures = {name: np.full(shape, int(number) % 256, np.uint8) for name in CAMERAS}
    return pictures | {JOINTS: np.full(7, number, np.float32), "prompt": "go"} | fields


class RobotWorker(ScriptedWorker):
    """Answers every tick with actions whose rows 0, 1 and 2 are the joints' number, chunk index and times opened."""

    def __init__(self, *, capacity_sessions: int = 2, ready: bool = True) -> None:
        info = model_info(width=WIDTH, height=HEIGHT, capacity_sessions=capacity_sessions)
        super().__init__(replace(info, model="fake_robot", robot=ROBOT), ready=ready)
        self.num_opened = 0
        self.seen: list[float] = []
        self._payloads: dict[RequestId, bytes] = {}
        self._ready = asyncio.Event()

    async def wait_ready(self) -> None:
        await self._ready.wait()

    def becomes_ready(self) -> None:
        super().becomes_ready()
        self._ready.set()

    async def open_session(self, message: OpenSession, image: bytes) -> SessionOpened:
        # `hold` is for ticks: a session that opens meanwhile does not wait.
        self._require_alive()
        if self.open_failures and (failure := self.open_failures.popleft()) is not None:
            raise failure
        assert message.image is None
        assert message.outputs == (MediaFormat.ACTIONS,)
        assert len(self.sessions) < self.loaded_info.capacity_sessions, "above capacity"
        assert message.session_id not in self.sessions, "opened twice"
        self.num_opened += 1
        self.sessions[message.session_id] = WorkerSession(
            prompt=message.prompt, seed=message.seed, image_bytes=0, output=MediaFormat.ACTIONS
        )
        return SessionOpened(request_id=message.request_id, session_id=message.session_id, memory=self._memory())

    async def tick(self, message: Tick, payload: Sequence[memoryview] = ()) -> CommittedTick:
        self._payloads[message.request_id] = b"".join(payload)
        return await super().tick(message, payload)

    def _media(self, message: Tick, num_frames: int) -> tuple[ChunkMedia, memoryview]:
        arrays = unpack_arrays(message.arrays, self._payloads.pop(message.request_id))
        if JOINTS not in arrays:
            raise RequestRefused(f"{JOINTS}: missing", code="bad_observation", field=JOINTS)
        number = float(arrays[JOINTS].reshape(-1)[0])
        self.seen.append(number)
        actions = np.zeros((24, 8), np.float32)
        actions[0], actions[1], actions[2] = number, message.chunk_index, self.num_opened
        parts, payload = part_of(actions, MediaFormat.ACTIONS)
        chunk = ChunkMedia(
            request_id=message.request_id,
            session_id=message.session_id,
            chunk_index=message.chunk_index,
            num_media_frames=0,
            parts=parts,
            transfer_ms=0.5,
        )
        return chunk, payload


class RobotSocket:
    """Sends maps, receives decoded binary frames or texts. `config` is the first message."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.config: Any = None

    @classmethod
    async def open(cls, url: str, path: str = OPENPI, *, wait: bool = True, **options: Any) -> Self:
        """Connect; `url` is the server's http URL. With `wait` the config has been received."""
        address = url.replace("http://", "ws://") + path
        robot = cls(await connect(address, **{**PATIENT, **options}))
        if wait:
            robot.config = await robot.receive()
        return robot

    async def send(self, message: object) -> None:
        await self.connection.send(pack_message(message))

    async def receive(self) -> Any:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            frame = await self.connection.recv()
        return frame if isinstance(frame, str) else unpack_message(frame)

    async def ask(self, message: object) -> Any:
        await self.send(message)
        return await self.receive()

    async def infer(self, number: float, **fields: Any) -> Any:
        """Ask for actions and return them, or the map or text that came instead."""
        return await self.ask(observation(number, **fields))

    async def reset(self, **fields: Any) -> Any:
        return await self.ask({"endpoint": "reset", **fields})

    async def closed(self) -> tuple[int, str]:
        """Receive until the server closes; returns code and reason."""
        try:
            while True:
                await self.receive()
        except ConnectionClosed as error:
            return (1006, "") if error.rcvd is None else (error.rcvd.code, error.rcvd.reason)

    async def drop(self) -> None:
        """Lose the connection without a closing handshake."""
        self.connection.transport.abort()
        await self.connection.wait_closed()


def number_of(actions: Any) -> tuple[float, int, int]:
    """Return what a scripted answer names: the observation, the chunk, how many sessions had been opened."""
    assert isinstance(actions, np.ndarray), actions
    assert (actions.shape, actions.dtype) == ((24, 8), np.float32)
    return float(actions[0, 0]), int(actions[1, 0]), int(actions[2, 0])


def error_text(reply: Any) -> str:
    """Return the text of an error in either form."""
    if isinstance(reply, str):
        return reply
    assert isinstance(reply, dict), reply
    assert reply.keys() == {"type", "message"}
    assert reply["type"] == "error"
    return str(reply["message"])


def robot_model(**options: object) -> ModelSection:
    return ModelSection(
        name="fake_robot",
        checkpoint="package:worldmodel/data/demo_world",
        width=WIDTH,
        height=HEIGHT,
        fps=5,
        precision="fp32",
        options=options,
    )


class RobotServer:
    """A running application for robots with its scripted worker."""

    def __init__(self, server: Server, worker: RobotWorker) -> None:
        self.server = server
        self.worker = worker
        self.url = server.url
        self.until = server.until

    async def connect(self, path: str = OPENPI, **options: Any) -> RobotSocket:
        robot = await RobotSocket.open(self.url, path, **options)
        self.server.stack.push_async_callback(robot.connection.close)
        return robot

    @property
    def robots(self) -> Any:
        return self.server.context.robots


@asynccontextmanager
async def serving_robots(worker: RobotWorker | None = None, **sections: Any) -> AsyncIterator[RobotServer]:
    worker = worker or RobotWorker()
    async with serving(worker, model=robot_model(), **sections) as server:
        yield RobotServer(server, worker)


async def holding(server: RobotServer) -> None:
    """Wait until a tick is in flight, which only `release` ends."""
    await server.until(lambda: server.worker.num_ticks_in_flight == 1)
