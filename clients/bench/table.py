"""The report in a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from clients.bench import words
from clients.bench.report import Measured, Report
from clients.bench.samples import STAGES
from clients.bench.statistics import Summary

BAR_CELLS = 18


def show(report: Report, console: Console) -> None:
    """Print the report: the verdict, the numbers, where they come from."""
    runs = [(name, run) for name, run in (("served", report.served), ("in process", report.in_process)) if run]
    parts: list[RenderableType] = [_verdict(report, runs[0][1])]
    parts += [Text(problem, style="red") for problem in report.problems]
    parts += [Padding(_numbers(report, runs), (1, 0))]
    parts += [Padding(_stages(runs), (0, 0, 1, 0))]
    parts.append(_facts(report))
    console.print(Panel(Group(*parts), title="worldserve bench", title_align="left", padding=(1, 2), expand=False))


def _verdict(report: Report, run: Measured) -> Text:
    holds = any(value >= 1 for value in run.headline.realtime_factor.values())
    style = "bold red" if not report.complete else "bold green" if holds else "bold yellow"
    return Text(report.verdict, style=style)


def _numbers(report: Report, runs: list[tuple[str, Measured]]) -> Table:
    """Lay out three columns for each run: median or value, p95, p99. The name of the run stands above the first."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    for name, _ in runs:
        table.add_column(name, justify="right", header_style="bold")
        for tail in ("p95", "p99"):
            table.add_column(tail, justify="right", style="dim")
    columns = [_rows(run) for _, run in runs]
    for cells in zip(*columns, strict=True):
        if any(values[0] != words.NOTHING for _, values in cells):
            table.add_row(cells[0][0], *(cell for _, values in cells for cell in values))
    if report.served_over_in_process is not None:
        table.add_row("served / in process", Text(f"{report.served_over_in_process:.3f}x", style="bold"))
    return table


Cells = tuple[str, str, str]
"""What stands in the three columns of a run."""


def _rows(run: Measured) -> list[tuple[str, Cells]]:
    """List labels and values, the same labels for each run of a model."""
    events, memory = run.events, run.memory
    later = None if events.chunks_later is None else events.chunks_later.max
    return [
        ("first chunk", _one(words.median_ms(run.first_chunk_ms))),
        *((f"interval after chunk {each.after_chunk}", _spread(each.interval_ms)) for each in run.windows),
        ("media rate of a session", _one(words.rate(run.headline.media_fps))),
        ("media rate of all", _one(words.rate(run.headline.total_media_fps))),
        *((f"real time at {fps} fps", _one(words.factor(each))) for fps, each in run.headline.realtime_factor.items()),
        *((f"deadlines met at {each.fps} fps", _one(words.share(each.deadline_attainment))) for each in run.viewers),
        *((f"stall share at {each.fps} fps", _one(words.share(each.stall_share))) for each in run.viewers),
        ("bytes of a chunk", _one(words.size(run.headline.bytes_per_chunk))),
        ("event accepted to start", _spread(events.wait_ms)),
        ("event sent to chunk", _spread(events.to_chunk_ms)),
        ("event sent to frame", _spread(events.to_frame_ms)),
        ("event to effect, chunks", _one(words.count(later))),
        ("memory of the server", _one(words.size(memory.server_bytes))),
        ("memory of the worker", _one(words.size(memory.worker_bytes))),
        ("memory of the device", _one(words.size(memory.device_bytes))),
        ("room for sessions", _one(words.count(run.capacity_sessions))),
        ("loading", _one(words.seconds(run.load_s))),
    ]


def _one(value: str) -> Cells:
    return value, "", ""


def _spread(summary: Summary | None) -> Cells:
    if summary is None:
        return _one(words.NOTHING)
    return words.milliseconds(summary.median), f"{summary.p95:.0f}", f"{summary.p99:.0f}"


def _stages(runs: list[tuple[str, Measured]]) -> Table:
    """Draw the median of each stage as a bar, all to one scale."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("stage, median")
    for name, _ in runs:
        table.add_column(name, justify="right", header_style="bold")
        table.add_column("", min_width=BAR_CELLS)
    stages = [run.headline.stages_ms for _, run in runs]
    most = max((value for each in stages for value in each.values()), default=0.0)
    for stage in STAGES:
        if any(stage in each for each in stages):
            cells = [_stage(each.get(stage), most) for each in stages]
            table.add_row(stage, *(cell for pair in cells for cell in pair))
    return table


def _stage(value_ms: float | None, most_ms: float) -> tuple[str, Text]:
    bar = "" if value_ms is None else _bar(value_ms, most_ms)
    return words.milliseconds(value_ms), Text(bar, style="cyan")


def _bar(value: float, most: float) -> str:
    """Draw a bar in eighths of a cell."""
    eighths = round(8 * BAR_CELLS * value / most) if most > 0 else 0
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def _facts(report: Report) -> Table:
    facts, host, workload = report.provenance, report.provenance.host, report.workload
    sessions = f"{workload.num_sessions} session{'' if workload.num_sessions == 1 else 's'}"
    rate = f"{workload.events_per_second:g}"
    keys = f"{rate} key event{'' if rate == '1' else 's'} a second, seed {workload.seed}"
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
