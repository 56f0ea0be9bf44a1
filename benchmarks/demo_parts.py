"""Time the stages of a chunk of the demo world without a server: what the model costs on this CPU.

    python benchmarks/demo_parts.py --threads 1 2 --chunks 20

Each number of threads gets a process of its own, with the environment that the server gives its worker. The chunks
counted are those with a full window. Medians in milliseconds; `cpu` is CPU time of the process per chunk, which the
other programs of a busy machine disturb less than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from server.app import start_message
from server.config import ServerConfig, WorkerSection
from server.config_reading import load_config
from server.media.formats import StreamEncoder, create_stream_encoder
from server.package_files import bundled_config
from server.worker_process import worker_environment
from training.demo_world.options import count
from worldmodel.messages import ImageSize, LoadStage, MediaFormat, OpenSession, RequestId, SessionId, Tick

NUM_FILLING_CHUNKS = 7
"""Chunks until the window of the demo checkpoint has slid once."""

STAGES = ("denoise", "commit", "decode", "pixels", "encode", "wall", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--threads", type=count(least=1), nargs="+", default=[1, 2], help="compute threads (default 1 2)"
    )
    parser.add_argument("--chunks", type=count(least=1), default=20, help="chunks to time with each (default 20)")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(measure(arguments.child, arguments.chunks)))
        return
    print("threads " + "".join(f"{stage:>9}" for stage in STAGES))
    for num_threads in arguments.threads:
        found = _measure_in_a_process(num_threads, arguments.chunks)
        print(f"{num_threads:7} " + "".join(f"{found[stage]:9.1f}" for stage in STAGES), flush=True)


def _measure_in_a_process(num_threads: int, num_chunks: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", str(num_threads), "--chunks", str(num_chunks)]
    done = subprocess.run(command, env=worker_environment(num_threads), stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(num_threads: int, num_chunks: int) -> dict[str, float]:
    """Return the median of each stage in milliseconds, in this process."""
    import torch

    from worldmodel.runtime import Runtime

    config = load_config(bundled_config("demo"), environment={})
    config = replace(config, worker=WorkerSection(cpu_threads=num_threads))
    torch.set_num_threads(num_threads)
    runtime = Runtime.load(start_message(config), _ignore_progress)
    encoder = _encoder(config)
    _open(runtime, config)
    rows = [_chunk(runtime, encoder, index) for index in range(NUM_FILLING_CHUNKS + num_chunks)]
    return {stage: statistics.median(row[stage] for row in rows[NUM_FILLING_CHUNKS:]) for stage in STAGES}


def _ignore_progress(stage: LoadStage, fraction: float, detail: str) -> None:
    """Loading is not what is timed here."""


def _encoder(config: ServerConfig) -> StreamEncoder:
    from server.wire.messages import StreamFormat

    model = config.model
    return create_stream_encoder(
        StreamFormat.FMP4, width=model.width, height=model.height, fps=model.fps, media=config.media
    )


def _open(runtime: Any, config: ServerConfig) -> None:
    import numpy as np

    width, height = config.model.width, config.model.height
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    opening = OpenSession(
        request_id=RequestId("open"),
        session_id=SessionId("timed"),
        prompt=config.model.start_images[0].prompt,
        seed=0,
        image=ImageSize(width=width, height=height),
        outputs=(MediaFormat.YUV420,),
    )
    runtime.open(opening, image)


def _chunk(runtime: Any, encoder: StreamEncoder, index: int) -> dict[str, float]:
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    chunk = runtime.tick(Tick(request_id=RequestId(f"{index}"), session_id=SessionId("timed"), chunk_index=index))
    media, (pixels,) = chunk.to_host()
    computed_s, cpu_s = time.perf_counter(), time.process_time() - cpu_started_s
    encoder.encode(media.parts, pixels.cast("B"), media.num_media_frames)
    timings = chunk.committed.timings
    return {
        "denoise": timings.denoise_ms,
        "commit": timings.commit_ms,
        "decode": timings.decode_ms,
        "pixels": media.transfer_ms,
        "encode": 1000 * (time.perf_counter() - computed_s),
        "wall": 1000 * (computed_s - started_s),
        "cpu": 1000 * cpu_s,
    }


if __name__ == "__main__":
    main()
