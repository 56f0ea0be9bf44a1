"""`python -m clients.bench`: one benchmark, told by a JSON object on standard input (`clients/bench/job.py`).

People call `worldserve bench`, which starts this. Exit codes: 0 done, 1 failed or only part of it done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clients.bench.driver import Beginning, Driver
from clients.bench.errors import BenchError
from clients.bench.job import Job, read_job
from clients.bench.plot import draw
from clients.bench.probe import memory_sample, read_info, require_room, watch_memory
from clients.bench.provenance import commit_of_checkout, load_average, provenance
from clients.bench.report import Report, Workload, make_report, to_json
from clients.bench.samples import Run
from clients.bench.table import show
from server.wire.rest import ServerInfo

SYNTHETIC = "synthetic"

PLAIN_WIDTH = 110
"""Columns where the output is no terminal, such as a log of a build."""


def main() -> int:
    """Run the job on standard input and return the exit code."""
    logging.basicConfig(level=logging.ERROR)
    try:
        report = run(read_job(sys.stdin.buffer.read()))
    except BenchError as error:
        print(f"worldserve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if report.complete else 1


def run(job: Job) -> Report:
    """Measure, write the files, print the table. Raises `BenchError` if there is nothing to report."""
    load_before = load_average()
    in_process = None if job.in_process_run is None else read_run(job.in_process_run)
    served, start_image = (None, SYNTHETIC) if job.url is None else asyncio.run(drive(job, job.url))
    runs = [run for run in (served, in_process) if run is not None]
    report = make_report(
        served,
        in_process,
        Workload(
            num_sessions=job.num_sessions,
            num_chunks=job.num_chunks,
            pacing=job.pacing,
            events_per_second=job.events_per_second,
            seed=job.seed,
            start_image=start_image,
        ),
        provenance(runs, command=job.command, commit=_commit(job), load_before=load_before),
    )
    _write(job.json_file, to_json(report))
    _write(job.plot_file, draw(report).encode())
    show(report, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    return report


def read_run(path: Path) -> Run:
    """Read the samples that a run without a server left. Raises `BenchError`."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path}: {error}") from error
    if not any(session.chunks for session in run.sessions):
        raise BenchError("in process: no chunk was made")
    return run


async def drive(job: Job, url: str) -> tuple[Run, str]:
    """Drive the server at a URL; returns what was seen and the name of the start image."""
    info = await asyncio.to_thread(read_info, url, job.token)
    require_room(info, url=url, num_sessions=job.num_sessions)
    beginning, name = await asyncio.to_thread(choose_beginning, job, info)
    memory = [memory_sample(info)]
    watcher = asyncio.create_task(watch_memory(url, job.token, memory), name="bench-memory")
    try:
        with _progress() as progress:
            bar = progress.add_task("chunks", total=job.num_sessions * job.num_chunks)
            sessions = await Driver(job, url, beginning, on_chunk=lambda: progress.advance(bar)).run()
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    return (
        Run(
            sessions=sessions,
            memory=memory,
            model={} if info.model is None else info.model.model_dump(mode="json"),
            versions=dict(info.versions),
            capacity_sessions=None if info.capacity is None else info.capacity.sessions,
            kv_bytes_per_session=None if info.capacity is None else info.capacity.kv_bytes_per_session,
            load_s=job.load_s,
            server_version=info.version,
        ),
        name,
    )


def choose_beginning(job: Job, info: ServerInfo) -> tuple[Beginning, str]:
    """Take the image that the server begins with, else the first it offers, else the job's own; with its name."""
    offers = {offer.name: offer for offer in info.start_images}
    offer = offers.get(info.begin_image or "") or next(iter(offers.values()), None)
    if offer is None:
        return Beginning(image=job.spare_image.read_bytes(), prompt=job.prompt), SYNTHETIC
    return Beginning(image=offer.name, prompt=job.prompt if job.prompt_given else offer.prompt), offer.name


def _commit(job: Job) -> str | None:
    """Return what was given, else the commit of the checkout that the server was started from."""
    if job.commit is not None or not job.own_server:
        return job.commit
    return commit_of_checkout(Path(__file__).resolve().parents[2])


def _write(path: Path | None, data: bytes) -> None:
    if path is None:
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    sys.exit(main())
