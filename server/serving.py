"""Run the application under uvicorn: bind the port first, show the load stages, stop within the configured time."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import sys
import webbrowser
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from server.app import create_app
from server.config import ServerConfig, ServerSection
from server.console import LoadBar, follow_loading
from server.worker_client import Worker, WorkerStatus
from worldmodel.errors import LoadFailed

WS_PING_S = 5.0
"""Ping interval and time-out: a peer that vanished without a word is noticed within twice this time."""


class ServeError(Exception):
    """Report why the server cannot be started, in one sentence."""


def bind(section: ServerSection) -> socket.socket:
    """Bind the listening socket, so that a taken port is one sentence before anything else has started."""
    family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((section.host, section.port))
    except (OSError, UnicodeError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "the port is in use; choose another with --port" if taken else str(error)
        raise ServeError(f"cannot listen on {section.host}:{section.port}: {reason}") from error
    return listener


def url_of(listener: socket.socket, section: ServerSection) -> str:
    """Return the URL a browser on this machine uses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(section.host, section.host)
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{listener.getsockname()[1]}/"


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Return the uvicorn settings every worldserve server runs with (design: sans-I/O WebSockets, no compression)."""
    return uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=config.limits.max_message_bytes,
        ws_ping_interval=WS_PING_S,
        ws_ping_timeout=WS_PING_S,
        timeout_graceful_shutdown=math.ceil(config.server.shutdown_s),
        lifespan="on",
        access_log=False,
        server_header=False,
        log_level="warning" if config.server.log_level == "info" else config.server.log_level,
    )


def serve(config: ServerConfig, *, open_browser: bool = False) -> None:
    """Serve until a signal comes. Raises `ServeError` or `LoadFailed`."""
    listener = bind(config.server)
    try:
        asyncio.run(_serve(config, listener, open_browser=open_browser))
    finally:
        listener.close()


async def _serve(config: ServerConfig, listener: socket.socket, *, open_browser: bool) -> None:
    app = create_app(config)
    server = uvicorn.Server(uvicorn_config(app, config))
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
    with LoadBar(sys.stderr) as bar:
        await follow_loading(worker, bar)
    if worker.status is WorkerStatus.FAILED:
        server.should_exit = True
    elif worker.status is WorkerStatus.READY:
        print(f"ready: {url}  (Ctrl+C stops)", flush=True)
        if open_browser:
            await asyncio.to_thread(webbrowser.open, url)
