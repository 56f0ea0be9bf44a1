"""A scripted server for the browser page: serves the page and speaks the `world` dialect without a model.

It shows states that a healthy server hardly ever has (loading, a queue, a refused start, a lost link). A chunk
is a moving test picture whose motion follows the held keys. Unless a test asks for another rate it plays at four times
that of the demo world, so that tests wait less.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import numpy as np
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from server.config import MediaSection
from server.media.formats import EncodedChunk, EpochMuxer, MuxedChunk, StreamEncoder, create_stream_encoder
from server.page import HEADERS
from server.wire.messages import StreamFormat
from worldmodel.messages import MediaFormat, MediaPart

WIDTH, HEIGHT, FPS = 160, 96, 48
RESUME_TOKEN, WATCH_TOKEN = "secret-resume", "secret-watch"
MIME_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
WORLDS = {"day": "a small town, day", "night": "the town in night", "snow": "a snowy town", "sunset": "sunset scene"}
NOT_FATAL = {"retryable": False, "fatal": False}
START_IMAGES = [{"name": n, "prompt": p, "url": f"/v1/start-images/{n}"} for n, p in WORLDS.items()]


@dataclass
class Script:
    """What the stand-in does next; tests change it while it runs."""

    info: dict[str, Any] = field(default_factory=dict)
    refuse: dict[str, Any] | None = None
    queue_position: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    playback: list[dict[str, Any]] = field(default_factory=list)
    uploads: list[bytes] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    drop_after_chunk: int | None = None
    die_after_chunk: int | None = None
    close_after_chunk: int | None = None
    refuse_events: int = 0
    close_reason: str = "deleted"
    spoil_chunk: int | None = None
    make_s: float = 0.05


@dataclass
class Walk:
    """Where the camera is, seen from above."""

    x: float = 0.0
    z: float = 0.0
    heading_rad: float = 0.0

    def step(self, held: list[str]) -> None:
        """Go on by one media frame."""
        self.heading_rad += 0.02 * (("l" in held) - ("j" in held))
        forward, right = 0.01 * (("w" in held) - ("s" in held)), 0.01 * (("d" in held) - ("a" in held))
        sin, cos = math.sin(self.heading_rad), math.cos(self.heading_rad)
        self.x += forward * sin + right * cos
        self.z += forward * cos - right * sin

    @property
    def pose(self) -> list[float]:
        """Camera to world, 4x4 row by row: x right, y down, z forward."""
        sin, cos = math.sin(self.heading_rad), math.cos(self.heading_rad)
        return [cos, 0.0, sin, self.x, 0.0, 1.0, 0.0, 0.0, -sin, 0.0, cos, self.z, 0.0, 0.0, 0.0, 1.0]


@dataclass
class Watcher:
    """A spectator's socket, with a clock of its own."""

    websocket: WebSocket
    muxer: EpochMuxer


@dataclass
class World:
    """One session; outlives its socket. Its script is that of the test that began it."""

    script: Script
    fps: int = FPS
    epoch: int = -1
    run: int = 0
    chunk_index: int = 0
    shown: int = -1
    name: str = "day"
    prompt: str = ""
    offset: np.ndarray = field(default_factory=lambda: np.zeros(2))
    format: StreamFormat = StreamFormat.FMP4
    walk: Walk = field(default_factory=lambda: Walk())
    watchers: list[Watcher] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    queued: list[dict[str, Any]] = field(default_factory=list)
    paused: bool = False
    is_lost: bool = False
    retained: list[tuple[int, EncodedChunk]] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None


def ready_info() -> dict[str, Any]:
    return {
        "version": "0.0",
        "width": WIDTH,
        "height": HEIGHT,
        "ready": True,
        "status": "ready",
        "reason": None,
        "load": {"stage": "ready", "fraction": 1.0, "detail": ""},
        "error": None,
        "notice": "A tiny model that knows one small place.",
        "start_images": START_IMAGES,
        "prompts": list(WORLDS.values()),
    }


class StandIn:
    """Runs the scripted server in a thread; use as a context manager."""

    def __init__(self, *, fps: int = FPS) -> None:
        self._fps = fps
        self.script = Script(info=ready_info())
        self.world = World(self.script, fps=fps)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        routes = [
            Route("/", self._page),
            Route("/static/{name}", self._page),
            Route("/v1/info", self._info),
            Route("/v1/start-images/{name}", self._image),
            Route("/v1/layout", self._layout),
            Route("/v1/uploads", self._upload, methods=["POST"]),
            WebSocketRoute("/v1/world", self._socket),
        ]
        config = uvicorn.Config(Starlette(routes=routes), ws="websockets-sansio", log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def renew(self) -> None:
        """Forget what a test did; its pages are closed."""
        self.script = Script(info=ready_info())
        self.world = World(self.script, fps=self._fps)

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=60)
        self._listener.close()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    async def _page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        path = files("clients") / "browser" / name
        suffix = name[name.rindex(".") :]
        headers = {**HEADERS, "Cache-Control": "max-age=3600"}
        return Response(path.read_bytes(), media_type=MIME_TYPES[suffix], headers=headers)

    async def _info(self, request: Request) -> Response:
        return JSONResponse(self.script.info)

    async def _layout(self, request: Request) -> Response:
        return FileResponse(str(files("worldmodel") / "data" / "demo_world" / "layout.json"))

    async def _image(self, request: Request) -> Response:
        return FileResponse(str(_picture(request.path_params["name"])))

    async def _upload(self, request: Request) -> Response:
        async with request.form() as form:
            image = form["image"]
            assert isinstance(image, UploadFile)
            self.script.uploads.append(await image.read())
        return JSONResponse({"upload_id": "u-1"})

    async def _socket(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            await self._converse(websocket)
        except WebSocketDisconnect:
            return

    async def _converse(self, websocket: WebSocket) -> None:
        start = json.loads(await websocket.receive_text())
        script = self.script
        script.starts.append(start)
        if script.refuse is not None:
            await websocket.send_json({"type": "error", "retryable": False, "fatal": True, **script.refuse})
            return
        if script.queue_position is not None:
            await websocket.send_json({"type": "session.queued", "position": script.queue_position, "queued": 5})
            await websocket.receive_text()
            return
        if "resume_token" in start and self.world.is_lost:
            text = "this session's world is gone: the worker was killed; start a new session"
            await websocket.send_json({"type": "error", "code": "session_lost", "message": text, **NOT_FATAL})
            await websocket.receive_text()
            return
        if start["type"] == "session.watch":
            await self._watch(websocket, self.world)
            return
        if "resume_token" not in start:
            name, format = start["image"].get("name", "day"), StreamFormat(start["format"])
            self.world = World(script, fps=self._fps, name=name, prompt=start["prompt"], format=format)
        world = self.world
        world.epoch += 1
        last_chunk_index = start.get("last_chunk_index", -1)
        world.shown = max(world.shown, last_chunk_index)
        await websocket.send_json(self._started(world))
        if world.paused:
            await websocket.send_json(self._state(world, "paused"))
        # The socket before may not be known to be gone yet; a world goes on in one place.
        if world.sending is not None:
            world.sending.cancel()
        sending = world.sending = asyncio.create_task(self._send_chunks(websocket, world, last_chunk_index))
        try:
            while websocket.application_state is WebSocketState.CONNECTED:
                await self._answer(websocket, world, json.loads(await websocket.receive_text()))
        finally:
            sending.cancel()

    def _started(self, world: World) -> dict[str, Any]:
        limits = {
            "max_message_bytes": 1 << 24, "max_pending_events": 64, "max_prompt_chars": 2000,
            "max_image_bytes": 1 << 23, "max_image_pixels": 1 << 25, "max_events_per_second": 240.0,
            "max_messages_per_second": 1000.0,
            "resume_s": 15.0, "lead_chunks": 1, "max_session_s": None, "idle_s": None,
        }  # fmt: skip
        return {
            "type": "session.started", "epoch": world.epoch, "resume_token": RESUME_TOKEN, "watch_token": WATCH_TOKEN,
            "pacing": "playback", "seed": 1, "prompt": world.prompt, "controls": {}, "limits": limits,
            "start_images": START_IMAGES, "prompts": list(WORLDS.values()), **_described(world),
        }  # fmt: skip

    async def _watch(self, websocket: WebSocket, world: World) -> None:
        muxer = _encoder(world).new_epoch()
        await websocket.send_json({"type": "session.watching", "state": "active", **_described(world)})
        init = muxer.init_segment()
        if init is not None:
            common = {"type": "chunk", "session_id": "s-standin", "epoch": 0, "timescale": muxer.timescale}
            await websocket.send_bytes(_frame({**common, "kind": "init", "run": world.run}, init.payload))
        watcher = Watcher(websocket, muxer)
        world.watchers.append(watcher)
        try:
            while websocket.application_state is WebSocketState.CONNECTED:
                await self._answer(websocket, world, json.loads(await websocket.receive_text()))
        finally:
            world.watchers.remove(watcher)

    async def _answer(self, websocket: WebSocket, world: World, message: dict[str, Any]) -> None:
        match message["type"]:
            case "session.event" if world.script.refuse_events > 0:
                world.script.refuse_events -= 1
                error = {"code": "queue_full", "message": "64 events are waiting", "retryable": True, "fatal": False}
                await websocket.send_json({"type": "error", **error, "event_id": message["event_id"]})
            case "session.event":
                world.script.events.append(message)
                world.queued.append(message)
                await websocket.send_json({"type": "event.queued", "event_id": message["event_id"]})
            case "playback":
                world.script.playback.append({**message, "last_sent": world.chunk_index - 1})
                if message["run"] == world.run:
                    world.shown = max(world.shown, message["chunk_index"])
            case "session.reset":
                world.run += 1
                world.chunk_index, world.shown, world.held, world.queued = 0, -1, [], []
                world.retained = []
                world.offset[:] = 0
                world.walk = Walk()
                world.name = (message.get("image") or {}).get("name", world.name)
                for each in (websocket, *(watcher.websocket for watcher in world.watchers)):
                    with suppress(WebSocketDisconnect, RuntimeError):
                        await each.send_json(self._state(world, "active"))
            case "session.pause" | "session.unpause":
                world.paused = message["type"] == "session.pause"
                await websocket.send_json(self._state(world, "paused" if world.paused else "active"))
            case "session.close":
                closed = {"type": "session.closed", "session_id": "s-standin", "reason": "client"}
                await websocket.send_json(closed)
                await websocket.close(1000)
            case "ping":
                await websocket.send_json({"type": "pong", "t": message["t"]})

    def _state(self, world: World, state: str, reason: str | None = None) -> dict[str, Any]:
        ids = {"session_id": "s-standin", "epoch": world.epoch, "run": world.run, "start_image": world.name}
        return {"type": "session.state", "state": state, "reason": reason, **ids}

    async def _send_chunks(self, websocket: WebSocket, world: World, last_chunk_index: int) -> None:
        encoder = _encoder(world)
        muxer = encoder.new_epoch()
        common = {"type": "chunk", "session_id": "s-standin", "epoch": world.epoch, "timescale": muxer.timescale}
        init = muxer.init_segment()
        if init is not None:
            await websocket.send_bytes(_frame({**common, "kind": "init", "run": world.run}, init.payload))
        for chunk_index, encoded in world.retained:
            if chunk_index > last_chunk_index:
                await websocket.send_bytes(_media(common, world, chunk_index, muxer.mux(encoded), []))
        while True:
            if world.paused or world.chunk_index > world.shown + 2:
                await asyncio.sleep(0.01)
                continue
            run, chunk_index = world.run, world.chunk_index
            events = list(world.queued)
            await asyncio.sleep(world.script.make_s)
            if world.run != run:
                continue
            world.queued = world.queued[len(events) :]
            frames = _draw(world, events, 9 if chunk_index == 0 else 12)
            part = MediaPart(format=MediaFormat.YUV420, shape=frames.shape, num_bytes=frames.nbytes)
            encoded = encoder.encode((part,), memoryview(frames.tobytes()), len(frames))
            world.retained = [*world.retained, (chunk_index, encoded)][-3:]
            world.chunk_index += 1
            muxed = muxer.mux(encoded)
            if world.script.spoil_chunk == chunk_index:
                muxed = replace(muxed, payload=bytes(len(muxed.payload)))
            await websocket.send_bytes(_media(common, world, chunk_index, muxed, events))
            for watcher in list(world.watchers):
                frame = _media({**common, "epoch": 0}, world, chunk_index, watcher.muxer.mux(encoded), events)
                # Who has gone is taken off the list by his own socket, a little later.
                with suppress(WebSocketDisconnect, RuntimeError):
                    await watcher.websocket.send_bytes(frame)
            if _is_due(world.script.drop_after_chunk, chunk_index):
                world.script.drop_after_chunk = None
                await websocket.close(1011)
                return
            if _is_due(world.script.close_after_chunk, chunk_index):
                world.script.close_after_chunk = None
                closed = {"type": "session.closed", "session_id": "s-standin", "reason": world.script.close_reason}
                await websocket.send_json(closed)
                await websocket.close(1000)
                return
            if _is_due(world.script.die_after_chunk, chunk_index):
                world.script.die_after_chunk = None
                await self._die(websocket, world)
                return

    async def _die(self, websocket: WebSocket, world: World) -> None:
        """Do what the server does when its worker is killed: the error that ends the socket comes last."""
        world.is_lost = True
        error = {"code": "worker_unavailable", "message": "the worker was killed", "retryable": True, "fatal": True}
        await websocket.send_json(self._state(world, "failed", "worker_unavailable"))
        await websocket.send_json({"type": "error", **error})
        await websocket.close(1012)


def _is_due(after_chunk: int | None, chunk_index: int) -> bool:
    """Whether it is time for what a test asked for, by its clock perhaps a chunk ago."""
    return after_chunk is not None and chunk_index >= after_chunk


def _picture(name: str) -> Any:
    return files("worldmodel") / "data" / "demo_world" / "examples" / f"{name}.png"


def _frame(header: dict[str, Any], payload: bytes) -> bytes:
    head = json.dumps(header).encode()
    return struct.pack(">I", len(head)) + head + payload


def _encoder(world: World) -> StreamEncoder:
    return create_stream_encoder(world.format, width=WIDTH, height=HEIGHT, fps=world.fps, media=MediaSection())


def _described(world: World) -> dict[str, Any]:
    """What `session.started` and `session.watching` share."""
    return {
        "protocol": 1, "session_id": "s-standin", "run": world.run, "model": "standin",
        "width": WIDTH, "height": HEIGHT, "fps": world.fps, "latent_frames_per_chunk": 3,
        "mime": _encoder(world).mime, "format": world.format, "start_image": world.name,
    }  # fmt: skip


def _media(
    common: dict[str, Any], world: World, chunk_index: int, muxed: MuxedChunk, events: list[dict[str, Any]]
) -> bytes:
    header = {
        **common, "kind": "media", "run": world.run, "chunk_index": chunk_index, "num_frames": muxed.num_frames,
        "pts": muxed.pts, "keyframe": True, "request_id": f"r-{chunk_index}", "pose": world.walk.pose,
        "sizes": muxed.sizes,
        "applied": [{"event_id": e["event_id"], "latent_frame": 0, "wait_ms": 1.0} for e in events],
        "timings_ms": {"queue": 3, "denoise": 410, "commit": 96, "decode": 181, "transfer": 2, "encode": 9},
    }  # fmt: skip
    return _frame(header, muxed.payload)


def _draw(world: World, events: list[dict[str, Any]], num_frames: int) -> np.ndarray:
    """Slide a start image under the held keys; returns uint8 [frames, height * 3 / 2, width]."""
    for event in events:
        world.prompt = event.get("prompt") or world.prompt
        for control in event.get("controls") or []:
            world.held = control["data"]["transitions"][-1]["actions"]
    name = next((name for name, prompt in WORLDS.items() if prompt == world.prompt), world.name)
    image = np.asarray(Image.open(io.BytesIO(_picture(name).read_bytes())).convert("RGB"))
    frames = []
    for _ in range(num_frames):
        held = world.held
        world.walk.step(held)
        world.offset += [("l" in held) - ("j" in held) + 0.0, ("k" in held) - ("i" in held) + 0.5 * ("w" in held)]
        shift = tuple(int(v) for v in -2 * world.offset[::-1])
        frames.append(_yuv(np.roll(image, shift, axis=(0, 1))))
    return np.stack(frames)


def _yuv(rgb: np.ndarray) -> np.ndarray:
    ycc = np.asarray(Image.fromarray(rgb).convert("YCbCr")).astype(np.float32)
    y = 16 + ycc[..., 0] * 219 / 255
    chroma = (128 + (ycc[::2, ::2, 1:] - 128) * 224 / 255).reshape(-1, WIDTH // 2, 2)
    planes = [chroma[..., i].reshape(HEIGHT // 4, WIDTH) for i in range(2)]
    return np.concatenate([y, *planes]).round().clip(0, 255).astype(np.uint8)
