"""The report in a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from clients.bench import words
from clients.bench.report import Measured, Report, Window
from clients.bench.samples import STAGES
from clients.bench.statistics import Summary

BAR_CELLS = 24


def show(report: Report, console: Console) -> None:
    """Print the report: the verdict, the numbers, where they come from."""
    runs = [(name, run) for name, run in (("served", report.served), ("in process", report.in_process)) if run]
    parts: list[RenderableType] = [_verdict(report, runs[0][1])]
    parts += [Text(problem, style="red") for problem in report.problems]
    parts += [Padding(_numbers(report, runs), (1, 0))]
    parts += [Padding(_stages(name, run.headline), (0, 0, 1, 0)) for name, run in runs]
    parts.append(_facts(report))
    console.print(Panel(Group(*parts), title="worldserve bench", title_align="left", padding=(1, 2), expand=False))


def _verdict(report: Report, run: Measured) -> Text:
    holds = any(value >= 1 for value in run.headline.realtime_factor.values())
    style = "bold red" if not report.complete else "bold green" if holds else "bold yellow"
    return Text(report.verdict, style=style)


def _numbers(report: Report, runs: list[tuple[str, Measured]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column("")
    for name, _ in runs:
        table.add_column(name, justify="right")
    columns = [_rows(run) for _, run in runs]
    for cells in zip(*columns, strict=True):
        values = [value for _, value in cells]
        if any(value != words.NOTHING for value in values):
            table.add_row(cells[0][0], *values)
    if report.served_over_in_process is not None:
        table.add_row("served / in process", Text(f"{report.served_over_in_process:.3f}x", style="bold"))
    return table


def _rows(run: Measured) -> list[tuple[str, str]]:
    """List labels and values, the same labels for each run of a model."""
    events, memory = run.events, run.memory
    return [
        ("first chunk, median", words.median_ms(run.first_chunk_ms)),
        *((f"interval after chunk {each.after_chunk}", _interval(each)) for each in run.windows),
        ("media rate of a session", words.rate(run.headline.media_fps)),
        ("media rate of all", words.rate(run.headline.total_media_fps)),
        *((f"real time at {fps} fps", words.factor(each)) for fps, each in run.headline.realtime_factor.items()),
        *((f"deadlines met at {each.fps} fps", words.share(each.deadline_attainment)) for each in run.viewers),
        *((f"stall share at {each.fps} fps", words.share(each.stall_share)) for each in run.viewers),
        ("bytes of a chunk", words.size(run.headline.bytes_per_chunk)),
        ("event accepted to start", _latency(events.wait_ms)),
        ("event sent to chunk", _latency(events.to_chunk_ms)),
        ("event sent to frame", _latency(events.to_frame_ms)),
        (
            "event to effect, chunks",
            words.count(None if events.chunks_later is None else events.chunks_later.max),
        ),
        ("memory of the server", words.size(memory.server_bytes)),
        ("memory of the worker", words.size(memory.worker_bytes)),
        ("memory of the device", words.size(memory.device_bytes)),
        ("room for sessions", words.count(run.capacity_sessions)),
        ("loading", words.milliseconds(None if run.load_s is None else 1000 * run.load_s)),
    ]


def _interval(window: Window) -> str:
    if window.interval_ms is None:
        return words.NOTHING
    each = window.interval_ms
    return f"{words.milliseconds(each.median)}  p95 {each.p95:.0f}  p99 {each.p99:.0f}"


def _latency(summary: Summary | None) -> str:
    return words.NOTHING if summary is None else f"{words.milliseconds(summary.median)}  p95 {summary.p95:.0f}"


def _stages(name: str, window: Window) -> Table:
    """Draw the median of each stage as a bar."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    table.add_column(f"stages {name}")
    table.add_column("median", justify="right")
    table.add_column("")
    most = max(window.stages_ms.values(), default=0.0)
    for stage in STAGES:
        if stage in window.stages_ms:
            value = window.stages_ms[stage]
            table.add_row(stage, words.milliseconds(value), Text(_bar(value, most), style="cyan"))
    return table


def _bar(value: float, most: float) -> str:
    """Draw a bar in eighths of a cell."""
    eighths = round(8 * BAR_CELLS * value / most) if most > 0 else 0
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def _facts(report: Report) -> Table:
    facts, host, workload = report.provenance, report.provenance.host, report.workload
    sessions = f"{workload.num_sessions} session{'' if workload.num_sessions == 1 else 's'}"
    keys = f"{workload.events_per_second:g} key events a second, seed {workload.seed}"
    versions = ", ".join(f"{name} {text}" for name, text in facts.versions.items())
    run = report.served or report.in_process
    geometry = "" if run is None else f", {run.width}x{run.height}"
    rows = {
        "workload": f"{sessions} of {workload.num_chunks} chunks, pacing {workload.pacing}, {keys}",
        "model": f"{facts.model.get('name', 'unknown')}{geometry}, image {workload.start_image}",
        "device": ", ".join(
            each for each in (facts.device_name, facts.device, facts.driver and f"driver {facts.driver}") if each
        ),
        "precision": f"{facts.precision or 'unknown'}, attention {facts.attention_backend or 'unknown'}",
        "commit": f"{facts.commit or 'unknown'}, worldserve {facts.server_version or 'unknown'}",
        "versions": versions,
        "host": f"{host.num_cpus}x {host.cpu}, load {host.load_average_before:g} to {host.load_average_after:g}",
        "date": facts.date,
    }
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0), style="dim")
    for name, text in rows.items():
        table.add_row(name, text or "unknown")
    return table
