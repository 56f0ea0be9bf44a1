"""Measure how long the server's event loop is held up while several sessions encode: its lag, and what a ping costs.

    python benchmarks/event_loop_lag.py --sessions 4 --seconds 30 --cores 2

The server runs in this process with the test model in a real worker process; the clients run in a process of their own,
watch at media rate and decode nothing. Goals on two cores, 832x480, preset ultrafast, four sessions: lag p99 below
20 ms, ping p99 below 50 ms. Prints a table; `--out` writes it as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect

from server.app import create_app
from server.config import KVCacheSection, MediaSection, ModelSection, ServerConfig, StartImageConfig, WorkerSection
from server.serving import WorldServer, world_server
from server.wire.binary import unpack_chunk
from training.demo_world.options import count

LAG_EVERY_S = 0.005
PING_EVERY_S = 0.05
WARM_UP_S = 3.0
GOAL_LAG_MS = 20.0
GOAL_PING_MS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long something took, in milliseconds."""

    num: int
    median_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, values_ms: list[float]) -> Times:
        ordered = sorted(values_ms)

        def at(share: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

        return cls(num=len(ordered), median_ms=at(0.5), p95_ms=at(0.95), p99_ms=at(0.99), max_ms=at(1.0))


# ---------------------------------------------------------------- the clients, in a process of their own


async def watch(url: str, seconds: float, pings_ms: list[float]) -> int:
    """Watch one session and ping on its socket; returns the number of chunks received after the warm-up."""
    async with connect(url, max_size=None, compression=None, proxy=None) as connection:
        start = {
            "type": "session.start",
            "protocol": 1,
            "prompt": "",
            "image": {"name": "day"},
            "pacing": "clock",
        }
        await connection.send(json.dumps(start))
        began_s = time.perf_counter()
        pinging = asyncio.create_task(ping(connection))
        num_chunks = 0
        try:
            while (elapsed_s := time.perf_counter() - began_s) < WARM_UP_S + seconds:
                frame = await connection.recv()
                if elapsed_s < WARM_UP_S:
                    continue
                if isinstance(frame, bytes):
                    num_chunks += unpack_chunk(frame)[0].kind == "media"
                    continue
                message = json.loads(frame)
                if message["type"] == "error":
                    raise RuntimeError(f"the server said {message}")
                if message["type"] == "pong":
                    pings_ms.append(time.perf_counter() * 1000 - message["t"])
        finally:
            pinging.cancel()
        await connection.send(json.dumps({"type": "session.close"}))
        return num_chunks


async def ping(connection: ClientConnection) -> None:
    while True:
        await connection.send(json.dumps({"type": "ping", "t": time.perf_counter() * 1000}))
        await asyncio.sleep(PING_EVERY_S)


async def run_clients(url: str, sessions: int, seconds: float) -> None:
    """Watch with all clients and print what they measured as one line of JSON."""
    pings_ms: list[float] = []
    chunks = await asyncio.gather(*(watch(url, seconds, pings_ms) for _ in range(sessions)))
    print(json.dumps({"pings_ms": pings_ms, "num_chunks": sum(chunks)}), flush=True)


# ---------------------------------------------------------------- the server, in this process


def config(arguments: argparse.Namespace) -> ServerConfig:
    width, _, height = arguments.size.partition("x")
    return ServerConfig(
        model=ModelSection(
            name="fake",
            checkpoint="package:worldmodel/data/demo_world",
            width=int(width),
            height=int(height),
            fps=arguments.fps,
            precision="fp32",
            start_images=(StartImageConfig(name="day", file="examples/day.png", prompt=""),),
        ),
        media=MediaSection(preset=arguments.preset),
        worker=WorkerSection(cpu_threads=1),
        kvcache=KVCacheSection(requested_sessions=arguments.sessions),
    )


async def measure_lag(lags_ms: list[float]) -> None:
    """Sleep briefly over and over; whatever it takes longer is what kept the loop."""
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(LAG_EVERY_S)
        lags_ms.append(max(0.0, time.perf_counter() - before_s - LAG_EVERY_S) * 1000)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve, have clients watch, and return the report."""
    its_config = config(arguments)
    app = create_app(its_config)
    listener = socket.create_server(("127.0.0.1", 0))
    server = world_server(app, its_config)
    serving = asyncio.create_task(server.serve([listener]))
    await ready(server, app)
    url = f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/world"
    clients = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--clients",
        url,
        "--sessions",
        str(arguments.sessions),
        "--seconds",
        str(arguments.seconds),
        stdout=asyncio.subprocess.PIPE,
    )
    await asyncio.sleep(WARM_UP_S + 1.0)
    lags_ms: list[float] = []
    lag = asyncio.create_task(measure_lag(lags_ms))
    await asyncio.sleep(arguments.seconds - 1.0)
    lag.cancel()
    output, _ = await clients.communicate()
    server.should_exit = True
    await serving
    told = json.loads(output)
    return {
        "sessions": arguments.sessions,
        "size": arguments.size,
        "fps": arguments.fps,
        "preset": arguments.preset,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "chunks_per_second": round(told["num_chunks"] / arguments.seconds, 2),
        "wanted_chunks_per_second": round(arguments.sessions * arguments.fps / 12, 2),
        "event_loop_lag": asdict(Times.of(lags_ms)),
        "ping": asdict(Times.of(told["pings_ms"])),
    }


async def ready(server: WorldServer, app: FastAPI) -> None:
    """Wait until uvicorn has started the application and the worker is ready."""
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await app.state.worker.wait_ready()


def show(report: dict[str, Any]) -> None:
    print(
        f"{report['sessions']} sessions, {report['size']} at {report['fps']} fps, {report['preset']}, "
        f"{report['cores']} cores, load {report['load']}: "
        f"{report['chunks_per_second']} of {report['wanted_chunks_per_second']} chunks a second"
    )
    print(f"{'':16}{'num':>8}{'median':>9}{'p95':>9}{'p99':>9}{'max':>9}   goal (p99)")
    for name, key, goal_ms in (("event-loop lag", "event_loop_lag", GOAL_LAG_MS), ("ping", "ping", GOAL_PING_MS)):
        it = report[key]
        met = "met" if it["p99_ms"] < goal_ms else "MISSED"
        columns = "".join(f"{it[column]:>9.2f}" for column in ("median_ms", "p95_ms", "p99_ms", "max_ms"))
        print(f"{name:16}{it['num']:>8}{columns}   < {goal_ms:g} ms {met}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=count(least=1), default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--fps", type=count(least=1), default=16)
    parser.add_argument("--preset", default="ultrafast")
    parser.add_argument(
        "--cores", type=count(least=1), help="use only this many cores, for server, worker and clients together"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clients:
        asyncio.run(run_clients(arguments.clients, arguments.sessions, arguments.seconds))
        return
    if arguments.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    report = asyncio.run(run(arguments))
    show(report)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
