"""How long a checkpoint takes to load, and how much host and device memory: written with random weights, then read.

    python benchmarks/checkpoint_load.py --folder /scratch --scale full --dtype bf16 --device cuda:0 --json out.json

Where the disk holds the whole checkpoint it is written and loaded by the code that a worker runs. Where it does not
(F32 at full size is 74 GB), or with `--by-shard`, one file after the other is written, read into its place in the
model, and deleted; only the reading is timed. `--cold` drops each file from the system's cache before it is read.
Writing is reported apart. The result is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from worldmodel.checkpoint.loading import fill_module, names_by_tensor
from worldmodel.checkpoint.plan import CheckpointPlan, PlannedFile, PlannedTensor
from worldmodel.checkpoint.safetensors_header import TensorInfo, read_safetensors_header
from worldmodel.checkpoint.tensor_stream import stream_tensors
from worldmodel.checkpoint.writer import RandomSource, write_checkpoint, write_file
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import build_empty, random_checkpoint
from worldmodel.lingbot.layout import Layout, plan_checkpoint
from worldmodel.lingbot.published import FULL, TINY
from worldmodel.lingbot.weights import LoadedModel, load_model
from worldmodel.messages import LoadStage
from worldmodel.wan.precision import precision_plan

SPARE_DISK = 1.05
SEED = 0


def main() -> None:
    """Measure and print JSON."""
    arguments = _parser().parse_args()
    model = FULL if arguments.scale == "full" else TINY
    plan = plan_checkpoint(model, layout=Layout.DIFFUSERS, transformer_dtype=arguments.dtype.upper())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    fits = shutil.disk_usage(arguments.folder).free > SPARE_DISK * plan.num_bytes
    measure = _by_shard if arguments.by_shard or not fits else _whole
    device = torch.device(arguments.device)
    report = {
        "scale": arguments.scale,
        "dtype": arguments.dtype,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "way": "by_shard" if measure is _by_shard else "whole",
        "cold": arguments.cold,
        "checkpoint_bytes": plan.num_bytes,
        "parameters": plan.num_parameters,
        "largest_file_bytes": max(file.num_bytes for file in plan.tensor_files),
        **measure(plan, model.name, arguments.folder / "checkpoint", device, cold=arguments.cold),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to write; emptied of what was written")
    parser.add_argument("--scale", choices=("tiny", "full"), default="tiny")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="stored type of the transformer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--by-shard", action="store_true", help="one file at a time even if the disk holds all")
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from the system's cache")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    return parser


def _whole(plan: CheckpointPlan, name: str, folder: Path, device: torch.device, *, cold: bool) -> dict[str, object]:
    """Write everything, then load it as a worker does."""
    started_s = time.perf_counter()
    try:
        with _writer() as writer:
            writer.submit(_write_all, plan, folder).result()
        write_s = time.perf_counter() - started_s
        if cold:
            for file in plan.tensor_files:
                _drop_from_cache(folder / file.path)
        before_bytes = _host_bytes("VmRSS")
        marks: dict[LoadStage, tuple[float, float]] = {}
        started_s = time.perf_counter()

        def mark(stage: LoadStage, fraction: float, detail: str) -> None:
            now_s = time.perf_counter() - started_s
            marks[stage] = (marks.get(stage, (now_s, now_s))[0], now_s)
            _tell(stage)(fraction, detail)

        model = load_model(folder, LingBotOptions(), precision_plan("bf16", device=device), device, mark)
        _wait(device)
        load_s = time.perf_counter() - started_s
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "write_s": write_s,
        "load_s": load_s,
        "load_mb_per_s": plan.num_bytes / 1e6 / load_s,
        "stages_s": {str(stage): end - begin for stage, (begin, end) in marks.items()},
        "host_peak_above_start_bytes": _host_bytes("VmHWM") - before_bytes,
        "host_bytes_after": _host_bytes("VmRSS") - before_bytes,
        "text_encoder": str(model.text_encoder.placement),
        "first_prompt_s": _time_prompt(model, device),
        "second_prompt_s": _time_prompt(model, device),
        **_device_bytes(device),
    }


def _time_prompt(model: LoadedModel, device: torch.device) -> float:
    started_s = time.perf_counter()
    model.text_encoder.encode("a small town in the snow, seen from a hill at dusk " * 8)
    _wait(device)
    return time.perf_counter() - started_s


def _by_shard(plan: CheckpointPlan, name: str, folder: Path, device: torch.device, *, cold: bool) -> dict[str, object]:
    """Write, read and delete one file after the other. Everything goes to `device`."""
    empty = build_empty(random_checkpoint(name, SEED), LingBotOptions())
    modules = {"transformer": empty.transformer, "vae": empty.vae, "text_encoder": empty.text_encoder}
    before_bytes = _host_bytes("VmRSS")
    write_s = read_s = 0.0
    files = []
    with _writer() as writer:
        for planned in plan.tensor_files:
            with _timed() as writing:
                file, expected = writer.submit(_write_one, planned, folder).result()
                _sync_and_drop(file, drop=cold)
            module = modules[planned.path.partition("/")[0]]
            with _timed() as reading:
                _read_into(module, file, device)
                _wait(device)
            file.unlink()
            write_s, read_s = write_s + writing(), read_s + reading()
            _check(module, planned, expected)
            rate = planned.num_bytes / 1e6 / reading()
            files.append({"path": planned.path, "bytes": planned.num_bytes, "read_s": reading(), "mb_per_s": rate})
            _tell("reading")(read_s, f"{planned.path}: {rate:.0f} MB/s")
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "write_s": write_s,
        "load_s": read_s,
        "load_mb_per_s": plan.num_bytes / 1e6 / read_s,
        "files": files,
        "host_peak_above_start_bytes": _host_bytes("VmHWM") - before_bytes,
        "host_bytes_after": _host_bytes("VmRSS") - before_bytes,
        **_device_bytes(device),
    }


def _read_into(module: nn.Module, file: Path, device: torch.device) -> None:
    """Put one file's tensors into their places, in bfloat16."""
    names_of = {name: names for _, names in names_by_tensor(module) for name in names}
    infos: tuple[TensorInfo, ...] = read_safetensors_header(file).tensors
    total_bytes = sum(info.num_bytes for info in infos)

    def read() -> Iterator[tuple[list[str], Tensor, int]]:
        for info, tensor in stream_tensors(infos, lambda _: torch.bfloat16, device):
            yield names_of[info.name], tensor, info.num_bytes

    fill_module(module, read(), device=device, total_bytes=total_bytes, progress=None)


def _check(module: nn.Module, planned: PlannedFile, expected: npt.NDArray[np.float32]) -> None:
    """Compare the file's smallest tensor with what was written, so that a fast wrong read is noticed."""
    name = _smallest(planned).name
    got = module.get_parameter(name).detach().float().cpu().numpy()
    if not np.array_equal(got, expected):
        raise AssertionError(f"{planned.path}: {name} was not read as it was written")


def _smallest(planned: PlannedFile) -> PlannedTensor:
    return min(planned.tensors, key=lambda tensor: tensor.num_bytes)


def _writer() -> ProcessPoolExecutor:
    """Return one process that writes, so that its memory is not counted as that of loading."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _write_all(plan: CheckpointPlan, folder: Path) -> None:
    write_checkpoint(plan, folder, seed=SEED, progress=_tell("writing"))


def _write_one(planned: PlannedFile, folder: Path) -> tuple[Path, npt.NDArray[np.float32]]:
    """Write a file; return its path and the values of its smallest tensor as they are when read in bfloat16."""
    source = _source()
    file = write_file(planned, folder, source)
    return file, source.tensor(_smallest(planned), planned.gains).bfloat16().float().numpy()


@functools.cache
def _source() -> RandomSource:
    return RandomSource(SEED)


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    started_s = time.perf_counter()
    taken: list[float] = []
    yield lambda: taken[0]
    taken.append(time.perf_counter() - started_s)


def _sync_and_drop(file: Path, *, drop: bool) -> None:
    """Bring a file to the disk, so that its writing does not slow its reading down."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if drop:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _drop_from_cache(file: Path) -> None:
    _sync_and_drop(file, drop=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_bytes(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "device_bytes": torch.cuda.memory_allocated(device),
        "device_peak_bytes": torch.cuda.max_memory_allocated(device),
    }


def _host_bytes(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _tell(what: str) -> Callable[[float, str], None]:
    return lambda fraction, detail: print(f"\r\x1b[K{what} {fraction:.2f} {detail}", end="", flush=True, file=_ERROR)


_ERROR = os.fdopen(os.dup(2), "w")


if __name__ == "__main__":
    main()
