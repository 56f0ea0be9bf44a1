"""Run the application under uvicorn: bind the port first, show the load stages, stop within the configured time."""

from __future__ import annotations

import asyncio
import errno
import math
import resource
import socket
import sys
import webbrowser
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from server.app import create_app
from server.config import ServerConfig, ServerSection
from server.connection_config import ConnectionConfig
from server.console import LoadBar, LoadLog, follow_loading
from server.context import ServerContext
from server.heap import bound_malloc, set_apart_what_stays
from server.http_connection import TimedHttpConnection
from server.logs import configured_logging, library_level
from server.start_image_check import check_start_images
from server.websocket_connection import BoundedWebSocket
from server.worker import Worker, WorkerStatus
from worldmodel import catalog
from worldmodel.catalog import ModelKind
from worldmodel.errors import LoadFailed

BACKLOG = 2048
"""Connections that may wait to be taken; what uvicorn asks for too."""

MAX_OPEN_FILES = 65536
"""How far the process raises its own limit of open files, if it may.

The usual 1024 are few beside `limits.max_connections`. At the limit asyncio logs 2048 tracebacks for each attempt to
accept a connection, and everybody waits for that.
"""

WS_PING_S = 5.0
"""Ping interval and time-out: a peer that vanished without a word is noticed within twice this time."""

ROBOT_PING_S = 20.0
"""The same for robots: a client that moves a robot in its event loop answers no ping until the arm has arrived."""


GOODBYE_SHARE = 0.25
"""Share of `server.shutdown_s` that clients get to answer a close; then their connections are cut."""

REQUESTS_SHARE = 0.25
"""Share of it that requests under way get after that, and sockets that take nothing. The worker has what is left."""

GOODBYE_POLL_S = 0.02


class ServeError(Exception):
    """Report why the server cannot be started, in one sentence."""


def bind(section: ServerSection, *, stall_timeout_s: float) -> socket.socket:
    """Listen, so that a taken port is one sentence before anything else has started, and nobody is refused from now on.

    Who comes before the application takes connections waits a moment in the socket's queue. Connections inherit
    `stall_timeout_s`: a peer whose machine acknowledges nothing for that long is given up by the operating system, also
    while there is nothing to send from here but what is in its buffer.
    """
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        timeout_ms = min(math.ceil(stall_timeout_s * 1000), 2**31 - 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    try:
        listener.bind((section.host, section.port))
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "the port is in use; choose another with --port" if taken else str(error)
        raise ServeError(f"cannot listen on {section.host}:{section.port}: {reason}") from error
    return listener


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it to, up to `MAX_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def url_of(listener: socket.socket, section: ServerSection) -> str:
    """Return the URL a browser on this machine uses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(section.host, section.host)
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{listener.getsockname()[1]}/"


def uvicorn_config(app: FastAPI, config: ServerConfig) -> ConnectionConfig:
    """Return the uvicorn settings every worldserve server runs with (design: sans-I/O WebSockets, no compression)."""
    serves_robots = catalog.lookup(config.model.name).kind is ModelKind.ROBOT
    ping_s = ROBOT_PING_S if serves_robots else WS_PING_S
    sized = config.robot if serves_robots else config.limits
    return ConnectionConfig(
        app,
        limits=config.limits,
        http=TimedHttpConnection,
        ws=BoundedWebSocket,
        ws_per_message_deflate=False,
        ws_max_size=sized.max_message_bytes,
        message_bytes_key="robot.max_message_bytes" if serves_robots else "limits.max_message_bytes",
        ws_ping_interval=ping_s,
        ws_ping_timeout=ping_s,
        timeout_graceful_shutdown=config.server.shutdown_s * REQUESTS_SHARE,
        lifespan="on",
        access_log=False,
        server_header=False,
        # Its loggers go to our handler; see `server/logs.py`.
        log_config=None,
        log_level=library_level(config.server).lower(),
    )


class WorldServer(uvicorn.Server):
    """uvicorn, which tells every client that the server ends before it takes the connections away.

    uvicorn alone closes them first: a client that is just sending would see a reset connection and no reason.
    """

    def __init__(self, config: uvicorn.Config, context: ServerContext, *, goodbye_s: float) -> None:
        super().__init__(config)
        self._context = context
        self._goodbye_s = goodbye_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, say goodbye, wait until the clients have answered or their time is over, then go on."""
        for server in self.servers:
            server.close()
        self._context.say_goodbye()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._goodbye_s):
                # uvicorn has no event for the end of a connection. The first pause lets the writers send the close.
                await asyncio.sleep(GOODBYE_POLL_S)
                while self._is_awaiting_answers() and not self.force_exit:  # noqa: ASYNC110
                    await asyncio.sleep(GOODBYE_POLL_S)
        await super().shutdown(sockets)

    def _is_awaiting_answers(self) -> bool:
        """Look for sockets that were told to close and did not answer yet, or whose clients read what comes before."""
        return any(
            isinstance(connection, WebSocketsSansIOProtocol)
            and (connection.close_sent or not connection.writable.is_set())
            for connection in self.server_state.connections
        )


def world_server(app: FastAPI, config: ServerConfig) -> WorldServer:
    """Make the server of an application; run it with `serve` or, without signal handlers, `_serve`."""
    return WorldServer(
        uvicorn_config(app, config),
        app.state.context,
        goodbye_s=config.server.shutdown_s * GOODBYE_SHARE,
    )


def serve(config: ServerConfig, *, open_browser: bool = False) -> None:
    """Serve until a signal comes. Raises `ServeError`, `ConfigError` for a bad start image, or `LoadFailed`."""
    bound_malloc()
    raise_file_limit()
    with (
        configured_logging(config.server),
        bind(config.server, stall_timeout_s=config.session.stall_timeout_s) as listener,
    ):
        asyncio.run(_serve(config, listener, open_browser=open_browser))


async def _serve(config: ServerConfig, listener: socket.socket, *, open_browser: bool) -> None:
    await asyncio.to_thread(check_start_images, config)
    app = create_app(config)
    server = world_server(app, config)
    set_apart_what_stays()
    url = url_of(listener, config.server)
    watcher = asyncio.create_task(_watch(app, server, url, open_browser=open_browser))
    try:
        await server.serve(sockets=[listener])
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
    worker: Worker = app.state.worker
    if worker.status is WorkerStatus.FAILED:
        raise LoadFailed(worker.failure or "the model could not be loaded")


async def _watch(app: FastAPI, server: uvicorn.Server, url: str, *, open_browser: bool) -> None:
    """Show the load stages; open the browser when ready; end the server if the model can never be served."""
    worker: Worker = app.state.worker
    print(f"worldserve listens on {url}", flush=True)
    if app.state.context.config.server.log_format == "json":
        await follow_loading(worker, LoadLog())
    else:
        with LoadBar(sys.stderr) as bar:
            await follow_loading(worker, bar)
    if worker.status is WorkerStatus.FAILED:
        server.should_exit = True
    elif worker.status is WorkerStatus.READY:
        print(f"ready: {url}  (Ctrl+C stops)", flush=True)
        if open_browser:
            await asyncio.to_thread(webbrowser.open, url)
