"""Measure what the server adds to a robot's call, and that many robots are served in turn.

    python benchmarks/robot_calls.py --robots 10 --seconds 10 --chunk-ms 100

A real server with the test robot in a worker process; the clients share this process. Every request is a DROID one:
four frames of three cameras, 2.07 MB. First one robot with a model that takes no time: the round trip is then the
server's. Then all robots at once with a model that takes `--chunk-ms`, while an idle connection pings. Prints both;
`--out` writes them as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from server.wire.robot_arrays import pack_message, unpack_message
from training.demo_world.options import count

ROOT = Path(__file__).resolve().parent.parent
HEIGHT, WIDTH, FRAMES = 180, 320, 4
CAMERAS = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
WARM_UP_CALLS = 5
PING_EVERY_S = 0.02

CONFIG = """\
[model]
name = "fake_robot"
checkpoint = "package:worldmodel/data/demo_world"
width = {width}
height = {height}
fps = 5
precision = "fp32"

[model.options]
chunk_ms = {chunk_ms}

[kvcache]
requested_sessions = {robots}

[worker]
cpu_threads = 1
"""


@contextmanager
def running(*, robots: int, chunk_ms: float) -> Iterator[str]:
    """Run a server and give its robot address."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "robots.toml"
        text = CONFIG.format(width=WIDTH, height=HEIGHT, chunk_ms=chunk_ms, robots=robots)
        config.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "server", "serve", str(config), "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        try:
            assert process.stdout is not None
            found = re.search(r"http://(\S+)/", process.stdout.readline())
            assert found, "the server did not say where it listens"
            yield f"ws://{found[1]}/v1/robot"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def request() -> bytes:
    pictures = np.random.default_rng(0).integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), np.uint8)
    observation: dict[str, Any] = {f"observation/{name}": pictures for name in CAMERAS}
    observation["observation/joint_position"] = np.zeros(7, np.float32)
    return pack_message({**observation, "prompt": "put the cup on the plate"})


async def robot(address: str) -> ClientConnection:
    """Connect and wait for the config map, which comes once the model is loaded."""
    connection = await connect(address, max_size=None, compression=None, proxy=None)
    unpack_message(await connection.recv())
    return connection


async def call(connection: ClientConnection, message: bytes) -> float:
    """Make one call and return how long it took, in milliseconds."""
    started_s = time.perf_counter()
    await connection.send(message)
    answer = await connection.recv()
    took_ms = 1000 * (time.perf_counter() - started_s)
    assert isinstance(answer, bytes), answer
    return took_ms


async def alone(address: str, seconds: float) -> dict[str, Any]:
    message, connection = request(), await robot(address)
    for _ in range(WARM_UP_CALLS):
        await call(connection, message)
    times, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        times.append(await call(connection, message))
    await connection.close()
    return summary(times)


async def together(address: str, robots: int, seconds: float) -> dict[str, Any]:
    message = request()
    connections = [await robot(address) for _ in range(robots)]
    idle = await robot(address)
    for connection in connections:
        await call(connection, message)
    times: list[list[float]] = [[] for _ in connections]
    pings: list[float] = []
    end_s = time.perf_counter() + seconds

    async def work(index: int) -> None:
        while time.perf_counter() < end_s:
            times[index].append(await call(connections[index], message))

    async def ping() -> None:
        while time.perf_counter() < end_s:
            started_s = time.perf_counter()
            await (await idle.ping())
            pings.append(1000 * (time.perf_counter() - started_s))
            await asyncio.sleep(PING_EVERY_S)

    await asyncio.gather(ping(), *(work(index) for index in range(robots)))
    for connection in (idle, *connections):
        await connection.close()
    counts = [len(each) for each in times]
    return {
        "call": summary([took for each in times for took in each]),
        "ping": summary(pings),
        "calls_per_robot": {"fewest": min(counts), "most": max(counts)},
    }


def summary(times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    at = {"median_ms": 0.5, "p95_ms": 0.95, "max_ms": 1.0}
    values = {name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) for name, share in at.items()}
    return {"num": len(ordered), **values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", type=count(least=1), default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--chunk-ms", type=float, default=100.0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    with running(robots=1, chunk_ms=0.0) as address:
        one = asyncio.run(alone(address, chosen.seconds))
    with running(robots=chosen.robots + 1, chunk_ms=chosen.chunk_ms) as address:
        many = asyncio.run(together(address, chosen.robots, chosen.seconds))
    print(f"one robot, model of 0 ms: call {one}")
    print(f"{chosen.robots} robots, model of {chosen.chunk_ms:g} ms: call {many['call']}")
    print(f"  calls of each robot {many['calls_per_robot']}, ping beside them {many['ping']}")
    if chosen.out is not None:
        report = {"alone": one, "together": many, "robots": chosen.robots, "chunk_ms": chosen.chunk_ms}
        chosen.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
