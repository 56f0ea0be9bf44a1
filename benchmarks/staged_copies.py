"""Time staged copies of a layer's bytes to the device, by size of the staging buffers and by number of host threads.

    python benchmarks/staged_copies.py --json staged_copies.json

Says what limits `transfer = "staged"`: the link (copies from page-locked memory), or the host's filling of the staging
buffers, which is measured alone too. Takes seconds; `--tiny --device cpu` checks the script.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from offload.copy_queue import CudaQueue, HostQueue
from offload.host_weights import HostPart, own_part
from offload.layout import TensorSpec, flat_layout
from offload.link import measure_link
from offload.residency import NUM_SLOTS
from offload.streamer import LayerStreamer
from offload.transports import StagedCopies

LAYER_BYTES = 598_000_000
"""The part of a full-size layer in bfloat16 that every forward uses."""
NUM_LAYERS, NUM_ROUNDS = 4, 3
STAGING_MIB = (4, 8, 16, 32, 64, 128)


def rate(num_bytes: int, call: Callable[[], object], device: torch.device) -> float:
    """Return bytes a second of the fastest of a few calls, which are waited for; the first one warms up."""
    times_s = []
    for _ in range(1 + NUM_ROUNDS):
        started_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - started_s)
    return num_bytes / min(times_s[1:])


def fill_rate(layers: dict[int, HostPart], staging_bytes: int, device: torch.device) -> float:
    """Return the rate of filling two staging buffers in turn and copying nothing to the device."""
    is_cuda = device.type == "cuda"
    staging = [torch.empty(staging_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]

    def fill() -> None:
        for part in layers.values():
            for number, run in enumerate(part.pieces[0].source.split(staging_bytes)):
                staging[number % 2][: run.numel()].copy_(run)

    return rate(sum(part.num_bytes for part in layers.values()), fill, device)


def staged_rate(layers: dict[int, HostPart], layer_bytes: int, staging_bytes: int, device: torch.device) -> float:
    """Return the rate of the streamer, whose layers compute nothing."""
    layout = flat_layout([TensorSpec(name="weights", dtype=torch.uint8, shape=(layer_bytes,))])
    transport = StagedCopies(device, staging_bytes=staging_bytes)
    queue = CudaQueue(torch.cuda.Stream(device), NUM_SLOTS) if device.type == "cuda" else HostQueue()
    streamer = LayerStreamer(layout, layers, transport, queue, device)

    def step() -> None:
        for index in layers:
            with streamer.layer(index):
                pass

    # A step of a full rotation copies as many layers as there are.
    found = rate(sum(part.num_bytes for part in layers.values()), step, device)
    streamer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="cuda:0 (default) or cpu")
    parser.add_argument("--tiny", action="store_true", help="small layers, to check this script")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    layer_bytes = 5_000_000 if arguments.tiny else LAYER_BYTES
    layout = flat_layout([TensorSpec(name="weights", dtype=torch.uint8, shape=(layer_bytes,))])
    # Other bytes in every layer, so that no cache of the processor holds them all.
    layers = {
        index: own_part(layout, {"weights": torch.full((layer_bytes,), index, dtype=torch.uint8)})
        for index in range(NUM_LAYERS)
    }
    most = torch.get_num_threads()
    report: dict[str, Any] = {
        **provenance(device),
        "link_gb_per_s": measure_link(device, probe_bytes=2**20 if arguments.tiny else 2**28) / 1e9,
        "rows": [],
    }
    print(f"link {report['link_gb_per_s']:.1f} GB/s, {most} threads", flush=True)
    for num_threads in sorted({1, max(1, most // 4), max(1, most // 2), most}):
        torch.set_num_threads(num_threads)
        for staging_mib in STAGING_MIB:
            row = {
                "num_threads": num_threads,
                "staging_mib": staging_mib,
                "fill_gb_per_s": fill_rate(layers, staging_mib * 2**20, device) / 1e9,
                "staged_gb_per_s": staged_rate(layers, layer_bytes, staging_mib * 2**20, device) / 1e9,
            }
            report["rows"].append(row)
            print("  ".join(f"{name} {value:.1f}" for name, value in row.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
