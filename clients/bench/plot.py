"""The report as a picture: chunk intervals over time and what a chunk's time is made of. SVG, one file, no scripts."""

from __future__ import annotations

import math
from itertools import pairwise

from clients.bench import words
from clients.bench.plot_svg import ACCENT, FAINT, GRID, INK, LATE, MUTED, ON_COLOUR, SOFT, Canvas, Colour
from clients.bench.report import Measured, Report
from clients.bench.samples import STAGES, SessionSamples
from clients.bench.statistics import percentile

WIDTH = 1200
MARGIN = 48
ROOM = WIDTH - 2 * MARGIN
TILES_Y = 138
CHART_TOP, CHART_BOTTOM = 306, 596
CHART_LEFT, CHART_RIGHT = MARGIN + 58, WIDTH - MARGIN
BARS_Y = 700
BAR_HEIGHT, BAR_STEP = 34, 62
BUDGET_TEXT = 14
"""Height of the words at a line of real time."""
TOTAL_ROOM = 96
"""Right of a bar, for the sum of its stages."""
LEGEND_STEP = 92
"""From one word of the legend to the next; the longest is shorter."""

ORANGE = Colour(name="orange", light="#d9480f", dark="#ff8a4c")
GREEN = Colour(name="green", light="#0b8a6a", dark="#35b892")
GOLD = Colour(name="gold", light="#b7791f", dark="#e0b04a")

SESSION_COLOURS = (
    ACCENT,
    ORANGE,
    GREEN,
    Colour(name="violet", light="#7c3aed", dark="#a98bff"),
    GOLD,
    Colour(name="teal", light="#0e7490", dark="#4cc3dd"),
    Colour(name="pink", light="#be185d", dark="#f277ad"),
    Colour(name="slate", light="#475569", dark="#a3b1c2"),
)
STAGE_COLOURS = {
    "queue": Colour(name="queue", light="#b8c4d0", dark="#56677a"),
    "denoise": ACCENT,
    "commit": Colour(name="commit", light="#7aa5f0", dark="#2f5fb8"),
    "decode": GREEN,
    "transfer": GOLD,
    "encode": ORANGE,
}


def draw(report: Report) -> str:
    """Return the picture as the text of an SVG file."""
    runs = [(name, run) for name, run in (("served", report.served), ("in process", report.in_process)) if run]
    height = BARS_Y + BAR_STEP * len(runs) + 74
    canvas = Canvas(WIDTH, height, title=f"worldserve bench: {report.verdict}")
    _head(canvas, report)
    _tiles(canvas, runs[0][1])
    _Chart(canvas, runs[0][0], runs[0][1]).draw()
    _bars(canvas, runs)
    _foot(canvas, report, height)
    return canvas.text()


# ---------------------------------------------------------------- head and foot


def _head(canvas: Canvas, report: Report) -> None:
    canvas.write(MARGIN, 46, "WORLDSERVE BENCH", size=13, colour=MUTED, weight=600, spacing=1.6)
    canvas.write(MARGIN, 82, report.verdict, size=22, colour=INK if report.complete else LATE, weight=650, room=ROOM)
    facts, workload = report.provenance, report.workload
    run = report.served or report.in_process
    told = [
        str(facts.model.get("name", "unknown model")),
        "" if run is None else f"{run.width}x{run.height}",
        facts.device_name or facts.device or "unknown device",
        facts.precision or "",
        f"attention {facts.attention_backend}" if facts.attention_backend else "",
        f"{workload.num_sessions} session{'' if workload.num_sessions == 1 else 's'}",
        f"pacing {workload.pacing}",
    ]
    canvas.write(MARGIN, 109, "  ·  ".join(part for part in told if part), size=14, colour=MUTED, room=ROOM)


def _foot(canvas: Canvas, report: Report, height: int) -> None:
    facts, host = report.provenance, report.provenance.host
    told = [
        facts.date.replace("T", " ").replace("+00:00", " UTC"),
        f"commit {facts.commit}" if facts.commit else f"worldserve {facts.server_version or 'unknown'}",
        f"driver {facts.driver}" if facts.driver else "",
        f"torch {facts.versions['torch']}" if "torch" in facts.versions else "",
        f"{host.num_cpus} CPUs, load {host.load_average_before:g} to {host.load_average_after:g}",
    ]
    canvas.line(MARGIN, height - 50, WIDTH - MARGIN, height - 50, colour=GRID)
    canvas.write(MARGIN, height - 24, "  ·  ".join(part for part in told if part), size=12, colour=FAINT, room=ROOM)


def _tiles(canvas: Canvas, run: Measured) -> None:
    window, viewer = run.headline, run.viewers[0]
    interval, events = window.interval_ms, run.events.to_frame_ms
    tiles = [
        ("first chunk", words.median_ms(run.first_chunk_ms)),
        ("chunk interval, median", words.median_ms(interval)),
        ("p95 / p99, ms", "-" if interval is None else f"{interval.p95:.0f} / {interval.p99:.0f}"),
        ("media rate" + (" each" if len(run.sessions) > 1 else ""), words.rate(window.media_fps)),
        (f"stalled at {viewer.fps} fps", words.share(viewer.stall_share)),
        ("key to frame, median", words.median_ms(events)),
    ]
    gap = 14
    width = (WIDTH - 2 * MARGIN - gap * (len(tiles) - 1)) / len(tiles)
    for number, (label, value) in enumerate(tiles):
        x = MARGIN + number * (width + gap)
        canvas.box(x, TILES_Y, width, 92, colour=SOFT, radius=10)
        canvas.write(x + 16, TILES_Y + 32, label, size=13, colour=MUTED, room=width - 32)
        canvas.write(x + 16, TILES_Y + 68, value, size=24, colour=INK, weight=650, room=width - 32)


# ---------------------------------------------------------------- intervals over time


class _Chart:
    """Chunk intervals of one run over the time since its first session began."""

    def __init__(self, canvas: Canvas, name: str, run: Measured) -> None:
        self._canvas = canvas
        self._name = name
        self._run = run
        self._began_s = min(session.began_s for session in run.sessions)
        self._points = [self._session_points(session) for session in run.sessions]
        flat = [point for points in self._points for point in points]
        self._end_s = max((at_s for at_s, _ in flat), default=1.0)
        self._budgets = {
            fps: 1000 * run.sessions[0].chunks[-1].num_frames / fps
            for fps in (each.fps for each in run.viewers)
            if run.sessions[0].chunks
        }
        self._top_ms = self._scale([value for _, value in flat])

    def _session_points(self, session: SessionSamples) -> list[tuple[float, float]]:
        return [
            (later.arrived_s - self._began_s, 1000 * (later.arrived_s - earlier.arrived_s))
            for earlier, later in pairwise(session.chunks)
        ]

    def _scale(self, values: list[float]) -> float:
        """Show nearly all points: a few far above are drawn at the edge, with their value."""
        if not values:
            return 1000.0
        usual = percentile(values, 0.95) * 1.3
        near = [budget for budget in self._budgets.values() if budget < 2.5 * usual]
        return max(usual, *(1.12 * budget for budget in near)) if near else usual

    def draw(self) -> None:
        canvas = self._canvas
        canvas.write(MARGIN, CHART_TOP - 32, f"Chunk interval over time, {self._name}", size=16, colour=INK, weight=600)
        self._warm_up()
        self._axes()
        self._budget_lines()
        for number, points in enumerate(self._points):
            self._session(points, SESSION_COLOURS[number % len(SESSION_COLOURS)], label_outliers=number == 0)

    def _x(self, at_s: float) -> float:
        return CHART_LEFT + (CHART_RIGHT - CHART_LEFT) * at_s / self._end_s

    def _y(self, value_ms: float) -> float:
        return CHART_BOTTOM - (CHART_BOTTOM - CHART_TOP) * min(1.0, value_ms / self._top_ms)

    def _axes(self) -> None:
        canvas = self._canvas
        for value in ticks(self._top_ms, 5):
            canvas.line(CHART_LEFT, self._y(value), CHART_RIGHT, self._y(value), colour=GRID)
            canvas.write(CHART_LEFT - 12, self._y(value) + 4, f"{value:g}", size=12, colour=MUTED, anchor="end")
        canvas.write(CHART_LEFT - 12, CHART_TOP - 10, "ms", size=12, colour=FAINT, anchor="end")
        for value in ticks(self._end_s, 10):
            canvas.write(self._x(value), CHART_BOTTOM + 22, f"{value:g} s", size=12, colour=MUTED, anchor="middle")

    def _warm_up(self) -> None:
        """Shade the time before the headline's window begins."""
        after = self._run.headline_after_chunk
        ends = [
            chunk.arrived_s - self._began_s
            for session in self._run.sessions
            for chunk in session.chunks
            if chunk.chunk_index == after
        ]
        if after == 0 or not ends:
            return
        right = self._x(max(ends))
        self._canvas.box(CHART_LEFT, CHART_TOP, right - CHART_LEFT, CHART_BOTTOM - CHART_TOP, colour=SOFT, radius=0)
        words_ = f"up to chunk {after}: not counted"
        self._canvas.write(CHART_LEFT, CHART_TOP - 8, words_, size=12, colour=FAINT)

    def _budget_lines(self) -> None:
        above = -math.inf
        for fps, budget_ms in sorted(self._budgets.items()):
            if budget_ms <= self._top_ms:
                y = self._y(budget_ms)
                self._canvas.line(CHART_LEFT, y, CHART_RIGHT, y, colour=LATE, width=1.2, dashes="5 5")
                text = f"real time at {fps} fps: {budget_ms:g} ms"
                # Where two lines are close, the lower one has its words below it.
                baseline = y - 7 if y - above >= 2 * BUDGET_TEXT else y + BUDGET_TEXT
                self._canvas.write(CHART_RIGHT, baseline, text, size=12, colour=LATE, anchor="end", halo=True)
                above = y

    def _session(self, points: list[tuple[float, float]], colour: Colour, *, label_outliers: bool) -> None:
        places = [(self._x(at_s), self._y(value)) for at_s, value in points]
        self._canvas.path(places, colour=colour, width=1.6, opacity=0.45)
        for (x, y), (_, value) in zip(places, points, strict=True):
            if value > self._top_ms:
                self._canvas.triangle(x, CHART_TOP + 3, colour=colour)
                if label_outliers:
                    self._canvas.write(x + 9, CHART_TOP + 9, f"{value:.0f}", size=11, colour=colour, halo=True)
            else:
                self._canvas.dot(x, y, colour=colour, radius=2.6 if len(points) > 150 else 3.4)


def ticks(top: float, num_wanted: int) -> list[float]:
    """Return round values from 0 to at most `top`: steps of 1, 2 or 5 times a power of ten, about as many as wanted."""
    if top <= 0:
        return [0.0]
    rough = top / num_wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough * 0.999)
    return [round(step * number, 9) for number in range(math.floor(top / step * (1 + 1e-9)) + 1)]


# ---------------------------------------------------------------- stages


def _bars(canvas: Canvas, runs: list[tuple[str, Measured]]) -> None:
    """Lay the median stages of each run end to end, with its median interval as a mark."""
    canvas.write(MARGIN, BARS_Y - 36, "Where a chunk's time goes, medians", size=16, colour=INK, weight=600)
    _legend(canvas, {stage for _, run in runs for stage in run.headline.stages_ms})
    left, right = MARGIN + 92, WIDTH - MARGIN - TOTAL_ROOM
    longest = max([_longest(run) for _, run in runs])
    for number, (name, run) in enumerate(runs):
        y = BARS_Y + number * BAR_STEP
        canvas.write(MARGIN, y + 22, name, size=14, colour=INK)
        x: float = left
        for stage in STAGES:
            value = run.headline.stages_ms.get(stage, 0.0)
            width = (right - left) * value / longest
            if width <= 0:
                continue
            canvas.box(x, y, width, BAR_HEIGHT, colour=STAGE_COLOURS[stage], radius=0)
            if width >= 46:
                colour = INK if stage == "queue" else ON_COLOUR
                canvas.write(x + width / 2, y + 22, f"{value:.0f}", size=13, colour=colour, anchor="middle", weight=600)
            x += width
        total = words.milliseconds(math.fsum(run.headline.stages_ms.values()))
        if run.headline.interval_ms is not None:
            mark = left + (right - left) * run.headline.interval_ms.median / longest
            _interval_mark(canvas, mark, y)
            x = mark if x < mark < x + TOTAL_ROOM else x
        canvas.write(x + 12, y + 22, total, size=14, colour=INK, weight=600, halo=True)
    canvas.write(
        WIDTH - MARGIN,
        BARS_Y + BAR_STEP * len(runs),
        "mark: median chunk interval; stages of neighbouring chunks may overlap",
        size=12,
        colour=FAINT,
        anchor="end",
    )


def _longest(run: Measured) -> float:
    interval = 0.0 if run.headline.interval_ms is None else run.headline.interval_ms.median
    return max(math.fsum(run.headline.stages_ms.values()), interval) or 1.0


def _interval_mark(canvas: Canvas, x: float, y: float) -> None:
    canvas.line(x, y - 7, x, y + BAR_HEIGHT + 7, colour=INK, width=2)


def _legend(canvas: Canvas, present: set[str]) -> None:
    stages = [each for each in STAGES if each in present]
    x: float = WIDTH - MARGIN - LEGEND_STEP * len(stages) + 18
    for stage in stages:
        canvas.box(x, BARS_Y - 46, 11, 11, colour=STAGE_COLOURS[stage], radius=3)
        canvas.write(x + 17, BARS_Y - 36, stage, size=13, colour=MUTED)
        x += LEGEND_STEP
