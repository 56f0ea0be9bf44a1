"""Measure what CUDA graphs gain LingBot-World v2 as it serves: chunks of one session, with and without, in turns.

    python -m benchmarks.graphs_served --json graphs_served.json

One worker with random weights of the published size, its forwards captured in its first chunk. From the first steady
chunk on, rounds of chunks through the graphs alternate with rounds of plain forwards, in the same session and on the
same device; one chunk of each kind runs under the profiler. The latents of a first chunk say how far the two are from
each other. `--tiny --device cpu` checks the script: there are no graphs on a CPU, and both kinds are plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch

from benchmarks import full_size
from benchmarks.arguments import device_name, lingbot_options, new_file, precision_name
from benchmarks.provenance import provenance
from training.demo_world.options import count
from worldmodel.messages import CloseSession, RequestId, SessionId
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime

SESSION = "session"
KINDS = ("graphs", "plain")


class Measured:
    """A worker whose chunks are served through graphs or by plain forwards, as is asked for each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        is_cuda = arguments.device.startswith("cuda")
        options = {"text_encoder": "resident", "graphs": "on" if is_cuda else "auto"} | arguments.options
        self.start = full_size.start_worker(
            device=arguments.device, precision=arguments.precision, is_tiny=arguments.tiny, options=options
        )
        self.adapter = full_size.build_adapter(self.start)
        self.graphs = self.adapter._graphs
        kv = self.adapter.kv_spec()
        self.worker_bytes = kv.worker_owned_bytes
        cache = allocate_cache(kv, self.start, self.adapter.attention())
        self.runtime = Runtime(self.adapter, cache, device=self.start.device)
        self.next_chunk = 0

    def run(self, kind: str, num_chunks: int) -> list[dict[str, float]]:
        """Run the next chunks and return one row of times for each."""
        self.adapter.serve_with(self.graphs if kind == "graphs" else "off")
        first, self.next_chunk = self.next_chunk, self.next_chunk + num_chunks
        return full_size.run_chunks(self.runtime, self.start, [SESSION], first, self.next_chunk)

    def profile(self, kind: str) -> float:
        """Return how long the device had nothing to do in the next chunk, in milliseconds."""
        self.adapter.serve_with(self.graphs if kind == "graphs" else "off")
        index, self.next_chunk = self.next_chunk, self.next_chunk + 1
        profile = full_size.profile_chunk(self.runtime, self.start, SESSION, index)
        return float(profile["device_idle_ms"])

    def first_latents(self, kind: str) -> torch.Tensor:
        """Return the latents of the first chunk of a session of its own."""
        self.adapter.serve_with(self.graphs if kind == "graphs" else "off")
        found: list[torch.Tensor] = []
        decode = self.adapter._vae.decode

        def listen(latents: torch.Tensor, cache: Any) -> Any:
            found.append(latents.float().clone())
            return decode(latents, cache)

        self.adapter._vae.decode = listen
        try:
            full_size.run_chunks(self.runtime, self.start, [f"{SESSION}-{kind}"], 0, 1)
        finally:
            del self.adapter._vae.decode
        name = f"{SESSION}-{kind}"
        self.runtime.close(CloseSession(request_id=RequestId(f"close-{name}"), session_id=SessionId(name)))
        return found[0]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the report."""
    measured = Measured(arguments)
    is_captured = not isinstance(measured.graphs, str)
    measured.first_latents("graphs")
    measured.adapter.end_warm_up()
    latents = {kind: measured.first_latents(kind) for kind in KINDS}
    distance = (latents["graphs"] - latents["plain"]).square().mean().sqrt() / latents["plain"].square().mean().sqrt()
    measured.run("graphs", full_size.FIRST_STEADY_CHUNK)
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(arguments.rounds):
        for kind in KINDS:
            rows[kind] += measured.run(kind, arguments.chunks)
    device = torch.device(arguments.device)
    report = {
        **provenance(device),
        "precision": arguments.precision,
        "attention": measured.adapter.spec.attention_backend,
        "graphs": measured.graphs.description if is_captured else measured.graphs,
        "graphs_bytes": measured.graphs.num_bytes if is_captured else 0,
        "worker_owned_bytes": measured.worker_bytes,
        "graphs_planned_bytes": measured.worker_bytes - measured.adapter.kv_spec().worker_owned_bytes,
        "distance_of_first_chunk": float(distance),
        "median_ms": {kind: _medians(rows[kind]) for kind in KINDS},
        "rows": rows,
    }
    if device.type == "cuda":
        report["idle_ms"] = {kind: measured.profile(kind) for kind in KINDS}
        report["max_allocated_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return report


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in rows[0] if name.endswith("_ms")]
    return {name: statistics.median(row[name] for row in rows) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", type=precision_name, default="bf16", help="precision plan (default bf16)")
    parser.add_argument("--options", type=lingbot_options, default="{}", help="further model options as JSON")
    parser.add_argument("--rounds", type=count(least=1), default=2, help="rounds of each kind (default 2)")
    parser.add_argument("--chunks", type=count(least=1), default=3, help="chunks of a round (default 3)")
    parser.add_argument("--device", type=device_name, default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="a tiny network, to check this script")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    report = measure(arguments)
    print({key: value for key, value in report.items() if key != "rows"}, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
