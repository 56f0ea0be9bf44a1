"""The listening socket, before anything is served on it, and what uvicorn is told."""

from __future__ import annotations

import resource
import socket

import pytest
from fastapi import FastAPI

from server.app import create_app
from server.config import LimitsSection, ServerSection, WorkerSection
from server.serving import MAX_OPEN_FILES, ServeError, bind, raise_file_limit, uvicorn_config, world_server
from server.websocket_connection import BoundedWebSocket
from server.worker_client import WorkerPolicy
from tests.support.server_client import fake_config
from tests.support.server_worker import ScriptedWorker


@pytest.mark.parametrize(("stall_timeout_s", "timeout_ms"), [(60.0, 60_000), (0.2504, 251), (1e9, 2**31 - 1)])
def test_connections_inherit_the_stall_timeout(stall_timeout_s: float, timeout_ms: int) -> None:
    with (
        bind(ServerSection(port=0), stall_timeout_s=stall_timeout_s) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == timeout_ms


def test_nobody_is_refused_once_the_port_is_bound() -> None:
    with (
        bind(ServerSection(port=0), stall_timeout_s=1.0) as listener,
        socket.create_connection(listener.getsockname(), timeout=5) as early,
    ):
        early.sendall(b"GET /healthz HTTP/1.1")
        with listener.accept()[0] as accepted:
            assert accepted.recv(100) == b"GET /healthz HTTP/1.1"


def test_a_taken_port_is_one_sentence() -> None:
    with bind(ServerSection(port=0), stall_timeout_s=1.0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServeError, match=rf"127\.0\.0\.1:{port}: the port is in use"):
            bind(ServerSection(port=port), stall_timeout_s=1.0)


def test_clients_that_do_not_leave_keep_half_of_the_shutdown_for_the_worker() -> None:
    config = fake_config(server=ServerSection(shutdown_s=3.0))
    server = world_server(create_app(config, worker=ScriptedWorker()), config)
    assert server.config.timeout_graceful_shutdown is not None
    assert server._goodbye_s + server.config.timeout_graceful_shutdown == 1.5
    assert WorkerPolicy.from_config(config).stop_timeout_s == config.server.last_s == pytest.approx(1.2)
    assert WorkerPolicy.from_config(fake_config(worker=WorkerSection(stop_timeout_s=1.0))).stop_timeout_s == 1.0


def test_the_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_frame_above_the_limit_is_not_even_received() -> None:
    """The dialect refuses long messages too, but only once they are in memory."""
    config = uvicorn_config(FastAPI(), fake_config(limits=LimitsSection(max_message_bytes=4096)))
    assert config.ws_max_size == 4096
    assert config.ws is BoundedWebSocket
    assert not config.ws_per_message_deflate
