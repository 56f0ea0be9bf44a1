"""Measure the demo world as its viewer has it: a real server, and a Python client or a real Chromium at playback pace.

    python benchmarks/demo_rate.py --minutes 10 --browser --out rate.json

The viewer changes keys every few seconds. The figures leave out the first chunks, in which the window fills and the
start image is still encoded. Prints a table; `--out` writes everything as JSON, and beside it a plot where matplotlib
(no dependency of ours) is installed. Other flags go to the server: `--worker.cpu-threads 2`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.demo_process import DemoProcess, demo_process
from clients.python import WorldClient
from server.wire.binary import unpack_chunk
from server.wire.messages import ChunkHeader

SKIPPED_CHUNKS = 13
"""Counting starts when chunk 12 has arrived: the window is full since chunk 6, the condition is constant since 11."""

MAX_CHUNKS_LATER = 2
"""Of the chunks that arrive after an event was sent, the second at the latest has it."""

KEYS = (("w",), ("w", "l"), ("w",), ("w", "j"), ("d",), ())
KEYS_EVERY_S = 3.0
SAMPLE_EVERY_S = 5.0
STAGES = ("queue", "denoise", "commit", "decode", "transfer", "encode")
CHROMIUM = "/usr/bin/chromium"
CHROMIUM_ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--autoplay-policy=no-user-gesture-required",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A media chunk, and when it came (seconds since the watch began)."""

    at_s: float
    header: ChunkHeader

    @property
    def chunk_index(self) -> int:
        assert self.header.chunk_index is not None
        return self.header.chunk_index


@dataclass(kw_only=True)
class Watch:
    """What one viewer saw. Times are seconds since it began; `sent` has the time and the last chunk received then."""

    process: DemoProcess
    fps: int = 12
    began_s: float = field(default_factory=time.perf_counter)
    arrivals: list[Arrival] = field(default_factory=list)
    sent: dict[int, tuple[float, int]] = field(default_factory=dict)
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    player: dict[str, float] = field(default_factory=dict)

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.began_s

    def arrived(self, header: ChunkHeader) -> None:
        if header.kind == "media":
            self.arrivals.append(Arrival(at_s=self.now_s, header=header))

    def event_sent(self, event_id: int) -> None:
        last = self.arrivals[-1].chunk_index if self.arrivals else -1
        self.sent[event_id] = (self.now_s, last)

    def sample_memory(self) -> None:
        if not self.memory or self.now_s - self.memory[-1][0] >= SAMPLE_EVERY_S:
            use = self.process.server_use(), self.process.worker_use()
            self.memory.append((self.now_s, use[0].rss_bytes, use[1].rss_bytes))


# ---------------------------------------------------------------- viewers


async def watch_with_client(process: DemoProcess, duration_s: float) -> Watch:
    """Take chunks as a viewer at media rate would."""
    async with WorldClient(process.world_url, prompt="a small town, day", image="day", seed=0) as world:
        watch = Watch(process=process, fps=world.session.fps)
        steering = asyncio.create_task(_steer(world, watch))
        try:
            async for chunk in world.chunks():
                watch.arrived(chunk.header)
                watch.sample_memory()
                if watch.now_s >= duration_s:
                    break
        finally:
            steering.cancel()
            await asyncio.gather(steering, return_exceptions=True)
    return watch


async def _steer(world: WorldClient, watch: Watch) -> None:
    number = 0
    while True:
        # The id is counted here, because the time that matters is before the call.
        watch.event_sent(number)
        await world.hold(*KEYS[number % len(KEYS)])
        number += 1
        await asyncio.sleep(KEYS_EVERY_S)


def watch_with_browser(process: DemoProcess, duration_s: float) -> Watch:
    """Open the page in Chromium and hold keys; chunks are counted on its WebSocket."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS, headless=True)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        watch = Watch(process=process)
        page.on("websocket", lambda socket: _listen(socket, watch))
        page.goto(process.url)
        page.wait_for_selector("body.has-picture[data-view=world]", timeout=60_000)
        began = _player(page)
        number = 0
        held: tuple[str, ...] = ()
        while watch.now_s < duration_s:
            for key in held:
                page.keyboard.up(key)
            held = KEYS[number % len(KEYS)]
            for key in held:
                page.keyboard.down(key)
            number += 1
            page.wait_for_timeout(KEYS_EVERY_S * 1000)
            watch.sample_memory()
        ended = _player(page)
        browser.close()
    shown_s, wall_s = ended["video_s"] - began["video_s"], ended["at_s"] - began["at_s"]
    watch.player = {
        "presented_fps": (ended["frames"] - began["frames"]) / wall_s,
        "stall_share": max(0.0, 1 - shown_s / wall_s),
        "key_to_picture_p50_ms": ended["p50_ms"],
        "key_to_picture_p95_ms": ended["p95_ms"],
    }
    return watch


def _listen(socket: Any, watch: Watch) -> None:
    def received(frame: bytes | str) -> None:
        if isinstance(frame, bytes):
            watch.arrived(unpack_chunk(frame)[0])

    def sent(frame: bytes | str) -> None:
        message = json.loads(frame)
        if message["type"] == "session.event":
            watch.event_sent(message["event_id"])

    socket.on("framereceived", received)
    socket.on("framesent", sent)


def _player(page: Any) -> dict[str, float]:
    script = """() => {
      const { player, hud } = window.worldserve;
      return {
        at_s: performance.now() / 1000, frames: player.presentedFrames,
        video_s: document.querySelector('video').currentTime,
        p50_ms: hud.figures.p50Ms, p95_ms: hud.figures.p95Ms,
      };
    }"""
    found: dict[str, float] = page.evaluate(script)
    return found


# ---------------------------------------------------------------- figures


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def figures(watch: Watch) -> dict[str, float]:
    """Reduce a watch to numbers. Raises ValueError if it was too short."""
    counted = watch.arrivals[SKIPPED_CHUNKS - 1 :]
    if len(counted) < 3:
        raise ValueError(f"expected more than {SKIPPED_CHUNKS + 2} chunks, got {len(watch.arrivals)}: watch longer")
    intervals_ms = [1000 * (after.at_s - before.at_s) for before, after in pairwise(counted)]
    wall_s = counted[-1].at_s - counted[0].at_s
    num_frames = sum(arrival.header.num_frames for arrival in counted[1:])
    found = {
        "chunks": len(counted) - 1,
        "first_chunk_ms": 1000 * watch.arrivals[0].at_s,
        "interval_p50_ms": statistics.median(intervals_ms),
        "interval_p95_ms": percentile(intervals_ms, 0.95),
        "interval_p99_ms": percentile(intervals_ms, 0.99),
        "media_fps": num_frames / wall_s,
        "media_per_wall": num_frames / watch.fps / wall_s,
        "stall_share": _stall_share(watch),
    }
    for stage in STAGES:
        found[f"{stage}_p50_ms"] = statistics.median(
            getattr(arrival.header.timings_ms, stage) for arrival in counted if arrival.header.timings_ms
        )
    made_ms = [_made_ms(arrival) for arrival in counted]
    found |= {"made_p50_ms": statistics.median(made_ms), "made_p95_ms": percentile(made_ms, 0.95)}
    return found | _events(watch) | _memory(watch) | {f"player_{name}": each for name, each in watch.player.items()}


def _made_ms(arrival: Arrival) -> float:
    timings = arrival.header.timings_ms
    return 0.0 if timings is None else sum(getattr(timings, stage) for stage in STAGES if stage != "queue")


def _stall_share(watch: Watch) -> float:
    """Waiting time of a viewer who starts with the first chunk, of the time since then."""
    waited_s, free_s = 0.0, watch.arrivals[0].at_s
    for arrival in watch.arrivals:
        waited_s += max(0.0, arrival.at_s - free_s)
        free_s = max(arrival.at_s, free_s) + arrival.header.num_frames / watch.fps
    return waited_s / (watch.arrivals[-1].at_s - watch.arrivals[0].at_s)


def _events(watch: Watch) -> dict[str, float]:
    waits_ms, until_ms, distances = [], [], []
    for arrival in watch.arrivals:
        for event in arrival.header.applied:
            if event.event_id in watch.sent:
                sent_s, last_chunk = watch.sent[event.event_id]
                waits_ms.append(event.wait_ms)
                until_ms.append(1000 * (arrival.at_s - sent_s))
                distances.append(float(arrival.chunk_index - last_chunk))
    if not waits_ms:
        return {"events": 0}
    return {
        "events": len(waits_ms),
        "event_wait_p50_ms": statistics.median(waits_ms),
        "event_to_chunk_p50_ms": statistics.median(until_ms),
        "event_to_chunk_p95_ms": percentile(until_ms, 0.95),
        "event_chunks_later_max": max(distances),
    }


def _memory(watch: Watch) -> dict[str, float]:
    """Compare memory at the end with that after two minutes, or after a third of a shorter watch."""
    since_s = min(120.0, watch.memory[-1][0] / 3)
    start = next(sample for sample in watch.memory if sample[0] >= since_s)
    end = watch.memory[-1]
    return {
        "server_rss_mb": end[1] / 1e6,
        "worker_rss_mb": end[2] / 1e6,
        "server_rss_growth": end[1] / start[1] - 1,
        "worker_rss_growth": end[2] / start[2] - 1,
    }


# ---------------------------------------------------------------- report


def facts(watch: Watch) -> dict[str, Any]:
    """Say what was measured where."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    info = watch.process.info()
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": commit.stdout.strip() or "no git",
        "cpus": psutil.cpu_count(),
        "other_load": psutil.getloadavg()[0],
        "versions": info["versions"],
        "model": info["model"],
    }


def show(found: dict[str, float]) -> None:
    for name, value in found.items():
        print(f"{name:26} {value:12.3f}" if abs(value) < 10 else f"{name:26} {value:12.1f}")


def write(path: Path, watch: Watch, about: dict[str, Any], found: dict[str, float]) -> None:
    chunks = [
        {"chunk_index": each.chunk_index, "at_s": round(each.at_s, 4), "num_frames": each.header.num_frames}
        | (each.header.timings_ms.model_dump() if each.header.timings_ms else {})
        for each in watch.arrivals
    ]
    memory = [{"at_s": round(at_s, 1), "server": server, "worker": worker} for at_s, server, worker in watch.memory]
    document = {"about": about, "figures": found, "chunks": chunks, "rss_bytes": memory}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    plot(path.with_suffix(".png"), watch)


def plot(path: Path, watch: Watch) -> None:
    """Draw the time each chunk took to make, and memory, over the time of the watch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    time_axes, memory_axes = figure.subplots(2, 1, sharex=True)
    time_axes.plot([each.at_s for each in watch.arrivals], [_made_ms(each) for each in watch.arrivals], ".", ms=2)
    time_axes.axhline(12_000 / watch.fps, color="grey", lw=0.8)
    time_axes.set_ylabel("ms to make a chunk")
    for index, name in ((1, "server"), (2, "worker")):
        memory_axes.plot([row[0] for row in watch.memory], [row[index] / 1e6 for row in watch.memory], label=name)
    memory_axes.set(xlabel="s", ylabel="RSS in MB", ylim=(0, None))
    memory_axes.legend()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to watch (default 10)")
    parser.add_argument("--browser", action="store_true", help="watch with Chromium instead of the Python client")
    parser.add_argument("--out", type=Path, help="the JSON to write")
    arguments, server_flags = parser.parse_known_args()
    duration_s = 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder, demo_process(Path(folder) / "server.log", *server_flags) as process:
        by_client: Callable[[], Watch] = lambda: asyncio.run(watch_with_client(process, duration_s))  # noqa: E731
        watch = watch_with_browser(process, duration_s) if arguments.browser else by_client()
        about, found = facts(watch), figures(watch)
    print(json.dumps(about))
    show(found)
    if arguments.out is not None:
        write(arguments.out, watch, about, found)
    if found.get("event_chunks_later_max", 0) > MAX_CHUNKS_LATER:
        sys.exit(f"an event acted later than {MAX_CHUNKS_LATER} chunks after the last one received")


if __name__ == "__main__":
    main()
