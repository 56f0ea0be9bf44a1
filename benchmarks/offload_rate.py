"""Chunks of LingBot-World v2 at full size with streamed random weights against resident ones, in one process.

    python benchmarks/offload_rate.py --staged --json offload.json
    python benchmarks/offload_rate.py --device-gib 48 --json offload_48.json
    python benchmarks/offload_rate.py --precision fp8_kv --device-gib 24 --camera per_layer --decode per_latent_frame \\
        --vae parked --host runtime_cache --cache FOLDER --second-worker --json offload_24.json

The model is loaded once, all of it streamed; the other rows keep a share of it on the device and use the same host
memory. Every row runs the same two chunks of a new session first, whose bits must be those of the resident row, and
then goes on with the session whose window is full. The link is measured in the same run. `floor` is the larger of the
resident row's time and the bytes copied at the rate of the link.

With `--device-gib` the plan decides what stays, torch refuses to take more, and the resident row comes last, without
the bound. Where the bound does not suffice the script says what was in memory, and what the same chunks take at most
without a bound, and fails. `--second-worker` starts one more worker on the same runtime cache,
adds up what the two hold of its files, and fails with it. `--tiny --device cpu` checks the script.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import new_file
from benchmarks.device_memory import bound_device, live_sizes, memory_gib
from benchmarks.full_size import FIRST_STEADY_CHUNK, run_chunks
from benchmarks.provenance import provenance
from benchmarks.streamed_worker import Loaded, check_bits, close_session, load, plan_share, planned_gib, show_memory
from offload.link import measure_link
from offload.streamed_model import Transfer, TransferWish
from training.demo_world.options import count
from worldmodel.errors import TickRolledBack

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
RESIDENT_CHUNKS = 4
RESIDENT_ROW = "resident"
LONG = "long"
HOLDING = "holding"


# ------------------------------------------------------------ rows


def measure(loaded: Loaded, name: str, first_chunk: int, num_chunks: int) -> dict[str, Any]:
    """Time chunks of the long session under the plan in force."""
    if loaded.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(loaded.device)
    digest = check_bits(loaded, name)
    rows = run_chunks(loaded.runtime, loaded.start, [LONG], first_chunk, first_chunk + num_chunks)
    # The first one fills buffers under the new plan.
    steady = rows[1:]
    residency = loaded.streamed.model.residency
    row: dict[str, Any] = {
        "name": name,
        "ms": median_ms(steady),
        "denoise_ms": statistics.median(row["denoise_ms"] for row in steady),
        "digest": digest,
        "copied_gb": residency.copied_bytes_per_chunk / 1e9,
        "weights_device_gb": residency.device_bytes / 1e9,
        "weights_host_gb": residency.host_bytes / 1e9,
        "locked_gb": loaded.streamed.model.locked_bytes / 1e9,
        "plan": residency.describe(),
    }
    if loaded.device.type == "cuda":
        row["device_peak_gib"] = torch.cuda.max_memory_allocated(loaded.device) / 2**30
    print(json.dumps(row), flush=True)
    return row


def run_rows(loaded: Loaded, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    fill = num_fill_chunks(arguments)
    loaded.streamed.rearrange(loaded.transformer, plan_share(loaded, 1.0))
    run_chunks(loaded.runtime, loaded.start, [LONG], 0, fill)
    chunk = fill
    for share in arguments.shares:
        loaded.streamed.rearrange(loaded.transformer, plan_share(loaded, share))
        name = RESIDENT_ROW if share >= 1.0 else f"{loaded.streamed.model.transfer.value}, {100 * share:.0f} % resident"
        yield measure(loaded, name, chunk, arguments.chunks)
        chunk += arguments.chunks
    if arguments.staged:
        loaded.streamed.model.use_transfer(TransferWish(transfer=Transfer.STAGED), loaded.device)
        loaded.streamed.rearrange(loaded.transformer, plan_share(loaded, 0.0))
        yield measure(loaded, "staged, 0 % resident", chunk, 2)


def run_bounded(loaded: Loaded, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time chunks under the plan that a bound of device memory leads to, then with everything resident, unbounded."""
    last = num_fill_chunks(arguments) + arguments.chunks
    yield run_within(loaded, arguments, last)
    lift_bound(loaded)
    loaded.transformer.keeps_camera = True
    loaded.streamed.rearrange(loaded.transformer, plan_share(loaded, 1.0))
    # The first chunk meets memory that is not there yet.
    rows = run_chunks(loaded.runtime, loaded.start, [LONG], last, last + RESIDENT_CHUNKS)[1:]
    close_session(loaded, LONG)
    yield {
        "name": RESIDENT_ROW,
        "ms": median_ms(rows),
        "digest": check_bits(loaded, "resident"),
        "copied_gb": 0.0,
        "plan": loaded.streamed.model.residency.describe(),
    }


def run_within(loaded: Loaded, arguments: argparse.Namespace, last: int) -> dict[str, Any]:
    """Run the chunks of the check, then `last` of the long session, and return the row of those with a full window."""
    planned = planned_gib(loaded)
    print(f"planned: {json.dumps(planned)}", flush=True)
    failure = ""
    try:
        # There is one place: the session of the check ends before the long one begins.
        digest = check_bits(loaded, "bounded")
        rows = run_chunks(loaded.runtime, loaded.start, [LONG], 0, last)
    except TickRolledBack as error:
        failure = f"{error}: {error.__cause__}"
        show_memory(loaded, "where it failed")
        if loaded.device.type == "cuda":
            # The error still holds what its chunk had made.
            print(live_sizes(loaded.device), flush=True)
    if failure:
        show_need(loaded)
        raise SystemExit(f"the bound of {arguments.device_gib:g} GiB does not suffice: {failure}")
    residency = loaded.streamed.model.residency
    show_memory(loaded, "after the long session")
    return {
        "name": f"within {arguments.device_gib:g} GiB",
        "ms": median_ms(rows[num_fill_chunks(arguments) :]),
        "digest": digest,
        "copied_gb": residency.copied_bytes_per_chunk / 1e9,
        "plan": residency.describe(),
        "planned_gib": planned,
        **({"memory_gib": memory_gib(loaded.device)} if loaded.device.type == "cuda" else {}),
    }


def show_need(loaded: Loaded) -> None:
    """Run the chunks of the check without a bound, for what they take of the device at most."""
    lift_bound(loaded)
    for session in ("check-bounded", LONG):
        close_session(loaded, session)
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(loaded.device)
    print(f"without a bound, bits {check_bits(loaded, 'unbounded')}", flush=True)


def lift_bound(loaded: Loaded) -> None:
    if loaded.device.type == "cuda":
        bound_device(loaded.device, None)


def num_fill_chunks(arguments: argparse.Namespace) -> int:
    """Return how many chunks it takes until the window is full and the condition no longer encoded."""
    return 2 if arguments.tiny else FIRST_STEADY_CHUNK


def median_ms(rows: list[dict[str, float]]) -> float:
    return statistics.median(row["wall_ms"] for row in rows)


# ------------------------------------------------------------ a second worker


def mapped_pss_bytes(pid: int, folder: str) -> int:
    """Return the proportional share of a process in the pages of the files below a folder."""
    total_kib, is_inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_inside = folder in line
        elif is_inside and line.startswith("Pss:"):
            total_kib += int(line.split()[1])
    return 1024 * total_kib


def second_worker(arguments: argparse.Namespace, digest: str) -> dict[str, Any]:
    """Start another worker on the same cache; return what both have of the weights.

    Fails if the other one does, or if its first chunks have other bits than `digest` says.
    """
    command = [sys.executable, *sys.argv, "--only-hold"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        held = ""
        for line in other.stdout:
            print(f"second worker: {line}", end="", flush=True)
            if line.startswith(HOLDING):
                held = line.strip()
                break
        if not held:
            raise SystemExit(f"the second worker ended with exit code {other.wait()} before it held its weights")
        own = mapped_pss_bytes(os.getpid(), arguments.cache)
        theirs = mapped_pss_bytes(other.pid, arguments.cache)
        other.communicate("\n")
    if other.returncode:
        raise SystemExit(f"the second worker ended with exit code {other.returncode}")
    if digest not in held:
        raise SystemExit(f"the second worker has other bits than the first, {digest}: {held}")
    files = sum(file.stat().st_size for file in Path(arguments.cache).rglob("*.safetensors"))
    return {
        "second_worker": held,
        "pss_gb": [own / 1e9, theirs / 1e9],
        "pss_sum_gb": (own + theirs) / 1e9,
        "cache_files_gb": files / 1e9,
        "pss_over_files": (own + theirs) / files,
    }


# ------------------------------------------------------------ the command


def main() -> None:
    arguments = _arguments()
    started_s = time.perf_counter()
    loaded = load(arguments)
    report: dict[str, Any] = {
        **provenance(loaded.device),
        "load_s": time.perf_counter() - started_s,
        "precision": arguments.precision,
        "description": loaded.streamed.description,
    }
    if arguments.only_hold:
        digest = check_bits(loaded, "second")
        print(f"{HOLDING} after {time.perf_counter() - started_s:.1f} s, bits {digest}", flush=True)
        sys.stdin.readline()
        return
    report["link_gb_per_s"] = measure_link(loaded.device, probe_bytes=2**20 if arguments.tiny else 2**28) / 1e9
    print(f"loaded in {report['load_s']:.1f} s, link {report['link_gb_per_s']:.1f} GB/s", flush=True)
    if arguments.device_gib:
        report["rows"] = list(run_bounded(loaded, arguments))
    elif not arguments.second_worker:
        report["rows"] = list(run_rows(loaded, arguments))
    add_floors(report)
    write_report(report, arguments.json)
    if arguments.second_worker:
        digest = report["rows"][0]["digest"] if "rows" in report else check_bits(loaded, "first")
        report.update(second_worker(arguments, digest))
    report["took_s"] = time.perf_counter() - started_s
    write_report(report, arguments.json)
    _show(report)
    if not all(row["has_bits_of_resident"] for row in report.get("rows", [])):
        raise SystemExit("a row has other bits than resident weights")


def write_report(report: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=1))


def add_floors(report: dict[str, Any]) -> None:
    """Compare every row with the larger of computing and copying."""
    if "rows" not in report:
        return
    resident = next(row for row in report["rows"] if row["name"] == RESIDENT_ROW)
    for row in report["rows"]:
        floor_ms = max(resident["ms"], row["copied_gb"] / report["link_gb_per_s"] * 1000)
        row["floor_ms"] = floor_ms
        row["over_floor"] = row["ms"] / floor_ms - 1
        row["has_bits_of_resident"] = row["digest"] == resident["digest"]


def _show(report: dict[str, Any]) -> None:
    for row in report.get("rows", []):
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    print({key: value for key, value in report.items() if key != "rows"})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16", help="precision plan (default bf16)")
    parser.add_argument("--options", type=json.loads, default={}, help="model options as JSON")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="a tiny network, to check this script")
    parser.add_argument(
        "--chunks", type=count(least=2), default=4, help="chunks of each row, the first not counted (default 4)"
    )
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES, help="resident shares, beginning with 1")
    parser.add_argument("--staged", action="store_true", help="a row with staged copies too")
    parser.add_argument("--host", default="ordinary", help="ordinary or runtime_cache (default ordinary)")
    parser.add_argument("--cache", default="", help="folder of the runtime cache")
    parser.add_argument("--second-worker", action="store_true", help="start another worker and add up their shares")
    parser.add_argument("--only-hold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device-gib", type=float, help="bound of all device memory; the plan decides what stays")
    parser.add_argument("--vae", default="resident", help="resident or parked")
    parser.add_argument("--camera", default="per_chunk", help="per_chunk or per_layer")
    parser.add_argument("--decode", default="whole_chunk", help="whole_chunk or per_latent_frame")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    if not arguments.shares or arguments.shares[0] < 1.0:
        parser.error("--shares: expected 1 first, since the others are compared with it")
    if arguments.second_worker and arguments.host != "runtime_cache":
        parser.error("--second-worker: expected --host runtime_cache, whose files two workers share")
    if arguments.host == "runtime_cache" and not arguments.cache.startswith("/"):
        parser.error("--cache: expected an absolute path with --host runtime_cache")
    if arguments.device == "cuda":
        # What is bound to a device needs its number.
        arguments.device = "cuda:0"
    return arguments


if __name__ == "__main__":
    main()
