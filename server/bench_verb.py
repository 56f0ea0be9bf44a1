"""The `bench` verb: starts what is to be measured, and the programs that measure it, one after the other.

    worldserve bench ─┬─> python -m worldmodel.tools.bench_inprocess    the model alone (torch), if asked for
                      ├─> python -m server serve CONFIG --port 0        a server of its own, if there is no URL
                      └─> python -m clients.bench                       drives it over a real socket, makes the report

Each is a process of its own, because the command line loads neither torch nor a client.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from server.app import start_message
from server.bench_arguments import BenchRequest, Ways
from server.bench_picture import PROMPT, synthetic_image
from server.clip_arguments import decode
from server.config import ServerConfig
from server.config_values import ConfigError
from server.worker_process import worker_environment
from worldmodel.catalog import ModelKind, lookup
from worldmodel.errors import WorldModelError

STOP_TIMEOUT_S = 30.0
_READY = re.compile(r"^ready: (http\S+)")


class BenchFailed(WorldModelError):
    """Report that a part of the benchmark failed; it has said why itself."""


def bench(config: ServerConfig | None, request: BenchRequest) -> None:
    """Measure and report. `config` is that of `request.config_file`.

    Raises `ConfigError` for a model that cannot be measured so, `BenchFailed` if a part failed or the report covers
    only part of the run.
    """
    if config is not None:
        _check_model(config, request)
    with tempfile.TemporaryDirectory(prefix="worldserve-bench-") as name:
        folder = Path(name)
        image = folder / "start.png"
        image.write_bytes(_spare_image(config))
        job = bench_job(request, image)
        if config is not None and request.ways is not Ways.SERVED:
            job["in_process_run"] = str(_run_in_process(config, request, folder / "in_process.json"))
        if request.url is not None:
            _report(job)
        elif config is None or request.ways is Ways.IN_PROCESS:
            _report({**job, "url": None, "own_server": True})
        else:
            with _own_server(config, request) as (url, load_s):
                _report({**job, "url": url, "own_server": True, "load_s": load_s, "token": _token(config)})


def _check_model(config: ServerConfig, request: BenchRequest) -> None:
    entry = lookup(config.model.name)
    if entry.kind is not ModelKind.WORLD:
        raise ConfigError(f"bench: expected a model that makes worlds, {entry.name} is a {entry.kind}")
    if request.num_sessions > config.kvcache.requested_sessions:
        raise ConfigError(
            f"--sessions: {request.num_sessions} sessions need as many places, and kvcache.requested_sessions is "
            f"{config.kvcache.requested_sessions}"
        )


def _spare_image(config: ServerConfig | None) -> bytes:
    return synthetic_image(832, 480) if config is None else synthetic_image(config.model.width, config.model.height)


def _token(config: ServerConfig) -> str | None:
    return config.server.tokens[0] if config.server.tokens else None


# ---------------------------------------------------------------- programs


def bench_job(request: BenchRequest, image: Path) -> dict[str, Any]:
    """Write the request as `clients/bench/job.py` reads it."""
    return {
        "url": request.url,
        "token": request.token,
        "spare_image": str(image),
        "prompt": PROMPT if request.prompt is None else request.prompt,
        "prompt_given": request.prompt is not None,
        "num_sessions": request.num_sessions,
        "num_chunks": request.num_chunks,
        "pacing": request.pacing,
        "events_per_second": request.events_per_second,
        "seed": request.seed,
        "time_limit_s": request.time_limit_s,
        "chunk_timeout_s": request.chunk_timeout_s,
        "command": request.command,
        "commit": request.commit,
        "json_file": None if request.json_file is None else str(request.json_file),
        "plot_file": None if request.plot_file is None else str(request.plot_file),
    }


def _report(job: dict[str, Any]) -> None:
    _run("clients.bench", msgspec.json.encode(job), cpu_threads=1)


def _run_in_process(config: ServerConfig, request: BenchRequest, out: Path) -> Path:
    """Run the model without a server; what it saw is in `out`. Raises `BenchFailed` if nothing is."""
    file, prompt = choose_beginning(config, request)
    image = decode(config, file, what="the start image")
    job = {
        "start": start_message(config),
        "prompt": prompt,
        "image": image.size,
        "image_rgb": image.pixels,
        "seed": request.seed,
        "num_sessions": request.num_sessions,
        "num_chunks": request.num_chunks,
        "time_limit_s": request.time_limit_s,
        "steer": request.events_per_second > 0,
        "out": str(out),
    }
    try:
        _run("worldmodel.tools.bench_inprocess", msgspec.json.encode(job), cpu_threads=config.cpu_threads)
    except BenchFailed:
        # What was measured before a failure is reported, and marked as partial.
        if not out.exists():
            raise
    return out


def choose_beginning(config: ServerConfig, request: BenchRequest) -> tuple[bytes, str]:
    """Choose start image and prompt as a served session would have them."""
    model = config.model
    offered = next((each for each in model.start_images if each.name == model.begin_image), None)
    offered = offered or next(iter(model.start_images), None)
    if offered is None:
        return synthetic_image(model.width, model.height), PROMPT if request.prompt is None else request.prompt
    try:
        file = (config.checkpoint_path / offered.file).read_bytes()
    except OSError as error:
        raise ConfigError(f"model.start_images: {offered.file}: {error.strerror or error}") from error
    return file, offered.prompt if request.prompt is None else request.prompt


def _run(module: str, job: bytes, *, cpu_threads: int) -> None:
    """Run a module of ours with a job on its standard input. Raises `BenchFailed`."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, env=worker_environment(cpu_threads)
    )
    try:
        process.communicate(job)
    finally:
        _end(process)
    if process.returncode != 0:
        raise BenchFailed(f"the benchmark is not complete (exit code {process.returncode} of {module})")


@contextmanager
def _own_server(config: ServerConfig, request: BenchRequest) -> Iterator[tuple[str, float]]:
    """Run a server until the caller is done; gives its URL and how long it took to be ready. Raises `BenchFailed`."""
    assert request.config_file is not None
    settings = {"server.log_level": "warning", **request.settings, "server.host": "127.0.0.1", "server.port": "0"}
    flags = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value)]
    command: Sequence[str] = [sys.executable, "-P", "-m", "server", "serve", str(request.config_file), *flags]
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=worker_environment(config.cpu_threads))
    try:
        assert process.stdout is not None
        ready = next((found for line in process.stdout if (found := _READY.match(line))), None)
        if ready is None:
            raise BenchFailed(f"the server ended with exit code {process.wait()} before it was ready")
        yield ready[1], time.monotonic() - began_s
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process politely, then by force; one that is gone is only collected."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
