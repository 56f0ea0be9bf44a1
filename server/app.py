"""Put an application together: its parts, its routes, and what starts and stops with it. Never imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI, WebSocket

from server import page, rest, robot_routes
from server.auth import Authenticator
from server.clock import Clock, monotonic
from server.config import ServerConfig
from server.context import ServerContext
from server.dialects.omni import omni_endpoint
from server.dialects.world import world_endpoint
from server.errors import ErrorCode, UnknownId
from server.health import distribution_version
from server.host_check import HostCheck
from server.metrics import Metrics
from server.plain_requests import answer_plain_requests
from server.recorder import Recorders
from server.recording import Recordings
from server.rest_requests import error_response
from server.robot_table import RobotTable
from server.session_table import SessionTable
from server.shared_bounds import SharedBounds
from server.start_images import ImageReader, StartImages
from server.uploads import UploadStore
from server.watch_metrics import WatchMetrics
from server.worker import Worker
from server.worker_client import WorkerClient, WorkerPolicy
from worldmodel import catalog
from worldmodel.catalog import ModelKind
from worldmodel.messages import StartWorker


def create_app(config: ServerConfig, *, worker: Worker | None = None, clock: Clock = monotonic) -> FastAPI:
    """Build the application of one server. `app.state.worker` and `app.state.context` are its parts.

    The worker is spawned when the application starts and loads while requests are answered already. `worker` replaces
    the real one in tests. Raises `RequestRefused` for an unknown model or bad options of it, `ConfigError` for a
    recording folder that can't be written.
    """
    worker = WorkerClient(start_message(config), WorkerPolicy.from_config(config)) if worker is None else worker
    encode_pool = ThreadPoolExecutor(config.media.encoder_threads, thread_name_prefix="encode")
    metrics = Metrics()
    uploads = UploadStore(config.limits.max_uploads)
    recordings = Recordings(config.recording, metrics.registry)
    recorders = Recorders(
        recordings=recordings,
        model_options=start_message(config).model_options,
        version=distribution_version(),
    )
    start_images = StartImages(config.model, config.checkpoint_path)
    table = SessionTable(config, worker, metrics, encode_pool=encode_pool, clock=clock, recorders=recorders)
    context = ServerContext(
        config=config,
        worker=worker,
        table=table,
        robots=RobotTable(config, worker, table, metrics, clock=clock),
        metrics=metrics,
        watching=WatchMetrics(metrics.registry),
        recordings=recordings,
        auth=Authenticator(config.server),
        uploads=uploads,
        start_images=start_images,
        images=ImageReader(start_images, uploads, config.limits),
        clock=clock,
        parse_control=catalog.control_parser(config.model.name),
        control_schemas=catalog.control_schemas(config.model.name),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context.table.start()
        context.robots.start()
        await worker.start()
        try:
            yield
        finally:
            await context.robots.shut_down()
            # At the same time, for both have `server.last_s`; the table forgets the worker before anything is awaited.
            await asyncio.gather(context.table.shut_down(), worker.stop())
            encode_pool.shutdown(cancel_futures=True)
            recordings.close()

    app = FastAPI(
        title="worldserve",
        version=distribution_version(),
        lifespan=lifespan,
        # The interactive documentation loads scripts from elsewhere; the page of ours asks nobody else for anything.
        docs_url=None,
        redoc_url=None,
        # An address with a slash too many is no other one's.
        redirect_slashes=False,
    )
    app.state.worker = worker
    app.state.context = context
    app.include_router(rest.router)
    app.include_router(page.router)
    rest.install_error_handlers(app)
    app.add_middleware(HostCheck, context=context)
    app.add_middleware(SharedBounds, context=context)

    if catalog.lookup(config.model.name).kind is ModelKind.ROBOT:
        robot_routes.mount(app, context)
        # The root is the page's.
        answer_plain_requests(app, (path for path in robot_routes.ADDRESSES if path != "/"))
        _refuse_other_sockets(app, context)
        return app

    @app.websocket("/v1/world")
    async def world(websocket: WebSocket) -> None:
        await world_endpoint(websocket, context)

    @app.websocket("/v1/realtime/video")
    async def video(websocket: WebSocket) -> None:
        await omni_endpoint(websocket, context)

    answer_plain_requests(app, ("/v1/world", "/v1/realtime/video"))
    robot_routes.mount_refusals(app, context)
    _refuse_other_sockets(app, context)
    return app


def _refuse_other_sockets(app: FastAPI, context: ServerContext) -> None:
    """Answer a WebSocket at an address that has none as any other request for nothing; starlette would say 403."""

    @app.websocket("/{path:path}")
    async def refuse(websocket: WebSocket) -> None:
        error = UnknownId(ErrorCode.NOT_FOUND, f"there is no WebSocket at {websocket.url.path[:200]}")
        context.metrics.errors.labels(error.code).inc()
        await websocket.send_denial_response(error_response(error))


def start_message(config: ServerConfig) -> StartWorker:
    """Build the first message to the worker. Raises `RequestRefused` for an unknown model or bad options of it."""
    model = config.model
    return StartWorker(
        model=model.name,
        checkpoint=str(config.checkpoint_path),
        width=model.width,
        height=model.height,
        fps=model.fps,
        device=config.worker.device,
        cpu_threads=config.cpu_threads,
        precision=model.precision,
        requested_sessions=config.kvcache.requested_sessions,
        gpu_memory_fraction=config.kvcache.gpu_memory_fraction,
        memory_bytes=config.kvcache.cpu_memory_bytes if config.worker.device == "cpu" else None,
        model_options=catalog.options_parser(model.name)(model.options),
        offload=config.offload,
    )
