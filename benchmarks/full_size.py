"""Time chunks of the published LingBot-World v2 size with random weights, in one process, through the real runtime.

    python benchmarks/full_size.py --precision bf16 --chunks 18 --profile --json full_size.json

No checkpoint and no network are needed: the weights are made on the device. Their values keep activations finite and
decide nothing about speed. `--tiny` runs the same code at a size that a CPU does in seconds, to check the script.

Steady chunks are those after the twelfth: the window is full and the condition is no longer encoded. `wall` is from the
tick to the pixels in host memory, without H.264 and without a server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import device_name, lingbot_options, new_file, precision_name
from benchmarks.provenance import provenance
from training.demo_world.options import count
from worldmodel.catalog import options_parser
from worldmodel.lingbot.adapter import create_adapter
from worldmodel.lingbot.controls import parse_control
from worldmodel.messages import (
    Control,
    ControlEvent,
    ImageSize,
    LoadStage,
    MediaFormat,
    OpenSession,
    RequestId,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.offload_settings import OffloadSettings
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime

MODEL = "lingbot_world_v2"
FULL, TINY = "random:lingbot-world-v2", "random:lingbot-world-v2-tiny"
FIRST_STEADY_CHUNK = 12
PROMPT = " ".join(["a small town by the sea in the morning, seen from a narrow street"] * 6)
KEYS = ("w", "wl", "", "d", "j", "w", "i", "s")


def start_worker(
    *,
    device: str,
    precision: str,
    is_tiny: bool,
    num_sessions: int = 1,
    options: Mapping[str, Any] | None = None,
    offload: OffloadSettings | None = None,
) -> StartWorker:
    """Return the start message of a worker with random weights at full size, or of a tiny one that a CPU can run.

    `options` are those of `[model.options]`.
    """
    return StartWorker(
        model=MODEL,
        checkpoint=TINY if is_tiny else FULL,
        width=64 if is_tiny else 832,
        height=32 if is_tiny else 480,
        fps=16,
        device=device,
        precision=precision,
        requested_sessions=num_sessions,
        model_options=options_parser(MODEL)(dict(options or {})),
        offload=offload or OffloadSettings(),
    )


def build_adapter(start: StartWorker) -> Any:
    """Return the adapter of a worker, its stages printed; with all its attributes, since benchmarks look inside."""
    return create_adapter(start, _print_stage)


def build_runtime(start: StartWorker) -> Runtime:
    """Return a runtime with random weights, not warmed up."""
    adapter = build_adapter(start)
    cache = allocate_cache(adapter.kv_spec(), start, adapter.attention())
    return Runtime(adapter, cache, device=start.device)


def run_chunks(
    runtime: Runtime, start: StartWorker, session_ids: list[str], first: int, last: int
) -> list[dict[str, float]]:
    """Run chunks `first` .. `last` - 1 of every session in turn and return one row of times a tick."""
    rows = []
    for index in range(first, last):
        for session_id in session_ids:
            if index == 0:
                open_session(runtime, start, session_id)
            rows.append({"chunk": float(index), **_tick(runtime, session_id, index)})
            print("  ".join(f"{name} {value:9.1f}" for name, value in rows[-1].items()), flush=True)
    return rows


def open_session(runtime: Runtime, start: StartWorker, session_id: str) -> None:
    image = np.random.default_rng(0).integers(0, 256, (start.height, start.width, 3), dtype=np.uint8)
    message = OpenSession(
        request_id=RequestId("open"),
        session_id=SessionId(session_id),
        prompt=PROMPT,
        seed=7,
        image=ImageSize(width=start.width, height=start.height),
        outputs=(MediaFormat.YUV420,),
    )
    runtime.open(message, image)


def _tick(runtime: Runtime, session_id: str, index: int) -> dict[str, float]:
    held = list(KEYS[index % len(KEYS)])
    data = parse_control("camera", "lingbot.camera_actions.v1", {"mode": "state", "held": held})
    control = Control(track="camera", schema="lingbot.camera_actions.v1", data=data)
    tick = Tick(
        request_id=RequestId(f"{session_id}-{index}"),
        session_id=SessionId(session_id),
        chunk_index=index,
        events=(ControlEvent(event_id=index, controls=(control,)),),
    )
    started_s = time.perf_counter()
    chunk = runtime.tick(tick)
    chunk.to_host()
    timings = chunk.committed.timings
    return {
        "denoise_ms": timings.denoise_ms,
        "commit_ms": timings.commit_ms,
        "decode_ms": timings.decode_ms,
        "wall_ms": 1000 * (time.perf_counter() - started_s),
    }


def profile_chunk(
    runtime: Runtime, start: StartWorker, session_id: str, index: int, num_rows: int = 30
) -> dict[str, Any]:
    """Run one chunk under the profiler: time by kernel, and how long the device had nothing to do."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run_chunks(runtime, start, [session_id], index, index + 1)
    spans: list[tuple[float, float, str]] = []
    totals: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spans.append((event.time_range.start, event.time_range.end, event.name))
        totals.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))[:num_rows]
    kernels = [{"ms": sum(us) / 1000, "calls": len(us), "kernel": name[:110]} for name, us in ranked]
    found = sorted(gaps(spans), key=lambda gap: -gap["ms"])
    idle_ms = sum(gap["ms"] for gap in found)
    return {"device_idle_ms": idle_ms, "num_kernels": len(spans), "kernels": kernels, "largest_gaps": found[:8]}


def gaps(spans: list[tuple[float, float, str]]) -> Iterator[dict[str, Any]]:
    """Yield the times, between the first and the last of these intervals (in microseconds), that none covers."""
    spans = sorted(spans)
    first_us, end_us, _ = spans[0]
    for start_us, stop_us, name in spans:
        if start_us > end_us:
            yield {"ms": (start_us - end_us) / 1000, "at_ms": (end_us - first_us) / 1000, "before": name[:60]}
        end_us = max(end_us, stop_us)


def summarize(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return median and 95th percentile of every time over the steady chunks (the last chunks of a short run)."""
    steady = [row for row in rows if row["chunk"] >= FIRST_STEADY_CHUNK] or rows[-3:]
    names = [name for name in steady[0] if name.endswith("_ms")]
    return {
        name: {
            "median": statistics.median(row[name] for row in steady),
            "p95": float(np.percentile([row[name] for row in steady], 95)),
        }
        for name in names
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", type=precision_name, default="bf16", help="precision plan (default bf16)")
    parser.add_argument("--options", type=lingbot_options, default="{}", help="model options as JSON")
    parser.add_argument("--chunks", type=count(least=1), default=18, help="chunks of each session (default 18)")
    parser.add_argument("--sessions", type=count(least=1), default=1, help="sessions that take turns (default 1)")
    parser.add_argument("--device", type=device_name, default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="a tiny network, to check this script")
    parser.add_argument("--no-warm-up", action="store_true", help="start with the first chunk")
    parser.add_argument("--profile", action="store_true", help="profile one chunk more")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.profile and device.type != "cuda":
        parser.error("argument --profile: expected --device cuda; got cpu")
    start = start_worker(
        device=arguments.device,
        precision=arguments.precision,
        is_tiny=arguments.tiny,
        num_sessions=arguments.sessions,
        options=arguments.options,
    )
    started_s = time.perf_counter()
    runtime = build_runtime(start)
    _synchronize(device)
    built = {"build_s": time.perf_counter() - started_s}
    print(f"built in {built['build_s']:.1f} s", flush=True)
    print(runtime.info(MODEL).attention_backend, flush=True)
    if not arguments.no_warm_up:
        warm_up_started_s = time.perf_counter()
        runtime.warm_up(_print_stage)
        built["warm_up_s"] = time.perf_counter() - warm_up_started_s
    session_ids = [f"session-{number}" for number in range(arguments.sessions)]
    rows = run_chunks(runtime, start, session_ids, 0, arguments.chunks)
    report: dict[str, Any] = {
        **provenance(device),
        **built,
        "precision": arguments.precision,
        "options": arguments.options,
        "info": asdict(runtime.info(MODEL)),
        "steady": summarize(rows),
        "rows": rows,
    }
    if device.type == "cuda":
        report["max_allocated_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    if arguments.profile:
        report["profile"] = profile_chunk(runtime, start, session_ids[0], arguments.chunks)
    _show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, default=str))


def _print_stage(stage: LoadStage, fraction: float, detail: str) -> None:
    if fraction >= 1.0:
        print(f"{stage} {detail}", flush=True)


def _show(report: dict[str, Any]) -> None:
    for kernel in report.get("profile", {}).get("kernels", []):
        print(f"{kernel['ms']:9.2f} ms {kernel['calls']:6d} x {kernel['kernel']}")
    if "profile" in report:
        for gap in report["profile"]["largest_gaps"]:
            print(f"idle for {gap['ms']:.2f} ms at {gap['at_ms']:.1f} ms, before {gap['before']}")
        print(f"device idle in the profiled chunk: {report['profile']['device_idle_ms']:.1f} ms")
    for name, value in report["steady"].items():
        print(f"steady {name}: median {value['median']:.1f}, p95 {value['p95']:.1f}")
    facts = ("date", "commit", "device", "torch", "precision", "build_s", "warm_up_s", "max_allocated_gib")
    print({key: report[key] for key in facts if key in report})


if __name__ == "__main__":
    main()
