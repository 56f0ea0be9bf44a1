"""Measure the demo world as it is served, against the renderer: `worldserve evaluate demo`.

    python -m training.demo_world.evaluation demo --out FOLDER [--quick] [--url URL]

Starts a demo server (or takes a running one), plays held-out scripts over its socket, decodes the H.264 that came and
compares it with the true pictures. Leaves `report.json`, `table.md` and `served.png` (truth above served).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from clients.python import ConnectFailed
from training.demo_world import scene, served, trajectories
from training.demo_world.compiled import CompilerMissing
from training.demo_world.options import count, make_out
from training.demo_world.served import Script

CHUNKS_SHOWN = (1, 3, 6, 10, 12, 20)
KEY_STATES = ("", *trajectories.KEYS)
TURN_FRAMES = 60
LAST, SPREAD = slice(-1, None), slice(None, None, 22)
SEED = 4242
"""Scripts are drawn from here; the training never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured: numbers of sessions, and chunks of those that walk."""

    scripts: int
    script_chunks: int
    points: int
    turns: int
    long_scripts: int
    long_chunks: int

    @property
    def measures_anything(self) -> bool:
        return any((self.scripts, self.points, self.turns, self.long_scripts))


FULL = Plan(scripts=24, script_chunks=20, points=10, turns=6, long_scripts=4, long_chunks=90)
QUICK = Plan(scripts=4, script_chunks=10, points=1, turns=1, long_scripts=0, long_chunks=90)

COUNTS = {
    "scripts": "random key scripts",
    "script_chunks": "chunks of each of them",
    "points": "start points at which every key and every style is tried",
    "turns": "full turns",
    "long_scripts": "long random scripts",
    "long_chunks": "chunks of each of them",
}

LONG = "long scripts, "
"""Begins the row of the long scripts, whose last chunk may be one that the other scripts have as well."""

TARGETS: dict[str, tuple[str, str, str]] = {
    "PSNR at chunk 1, dB": ("24.4", "26", "28"),
    "PSNR at chunk 3, dB": ("20.4", "23", "25"),
    "PSNR at chunk 6, dB": ("17.7", "21", "24"),
    "PSNR at chunk 10, dB": ("16.3", "20", "23"),
    "PSNR at chunk 20, dB": ("14.7", "18.5", "22"),
    "edges over the truth's at chunk 12": ("", "", ""),
    "full turn, PSNR of the view returned to, dB": ("", "19", "22"),
    "key states nearest their own true picture, %": ("", "95", "99"),
    "prompt switches nearest their own true picture, %": ("", "95", "99"),
    "long scripts, PSNR at chunk 90, dB": ("14.3", "17", "20"),
    "PSNR at chunk 6 of a picture that stands still, dB": ("13.0", "", ""),
    "PSNR at chunk 20 of a picture that stands still, dB": ("10.6", "", ""),
}
"""Rows of the table: the first preview of another world, the bar, the aim."""


class Evaluation:
    """Plays scripts on one server and gathers the rows of the table."""

    def __init__(self, world_url: str, plan: Plan, out: Path) -> None:
        self._url, self._plan, self._out = world_url, plan, out
        self._rng = np.random.default_rng(SEED)
        self._shown: list[tuple[served.Frames, served.Frames]] = []
        self._first_chunks: list[int] = []
        self.rows: dict[str, float] = {}

    async def run(self) -> None:
        """Measure everything; what was measured is written after each part."""
        plan = self._plan
        for part, num_sessions in (
            (self._scripts, plan.scripts),
            (self._turns, plan.turns),
            (self._key_states, plan.points),
            (self._switches, plan.points),
            (self._long, plan.long_scripts),
        ):
            if num_sessions:
                await part()
                self._write()

    def _write(self) -> None:
        report: dict[str, Any] = {"plan": asdict(self._plan), "rows": self.rows, "first_chunks": self._first_chunks}
        (self._out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        (self._out / "table.md").write_text(table(self.rows))
        if self._shown:
            self.sheet().save(self._out / "served.png")

    def sheet(self) -> Image.Image:
        """Put the truth above what was served, for some of the scripts."""
        rows = []
        for pair in self._shown[:: max(1, len(self._shown) // 6)][:6]:
            for frames in pair:
                index = np.linspace(0, len(frames) - 1, 12).astype(int)
                rows.append(np.concatenate(list(frames[index]), axis=1))
        return Image.fromarray(np.concatenate(rows, axis=0))

    # ------------------------------------------------------------ what is played

    async def _scripts(self) -> None:
        plan, by_chunk, still, sharp = self._plan, [], [], []
        looked_at = [chunk for chunk in CHUNKS_SHOWN if chunk <= plan.script_chunks]
        for index in range(plan.scripts):
            script = self._random_script(plan.script_chunks, switches=index >= plan.scripts // 2)
            walk = await self._play(script)
            parts = [served.chunk_slice(chunk - 1) for chunk in looked_at]
            true = [served.truth(script, walk, part) for part in parts]
            shown = [walk.frames[part] for part in parts]
            first = np.asarray(Image.open(io.BytesIO(served.start_png(script))))[None]
            self._shown.append((np.concatenate([part[-2:] for part in true]), np.concatenate([s[-2:] for s in shown])))
            by_chunk.append([served.psnr_db(*pair) for pair in zip(shown, true, strict=True)])
            still.append([served.psnr_db(np.broadcast_to(first, part.shape), part) for part in true])
            sharp.append([(served.edges(ours), served.edges(real)) for ours, real in zip(shown, true, strict=True)])
            self._say(f"script {index + 1} of {plan.scripts}: " + " ".join(f"{value:.1f}" for value in by_chunk[-1]))
        means = zip(looked_at, *(np.mean(series, axis=0) for series in (by_chunk, still, sharp)), strict=True)
        for chunk, psnr, of_still, (ours, real) in means:
            self.rows[f"PSNR at chunk {chunk}, dB"] = float(psnr)
            self.rows[f"PSNR at chunk {chunk} of a picture that stands still, dB"] = float(of_still)
            self.rows[f"edges over the truth's at chunk {chunk}"] = float(ours / real)

    async def _key_states(self) -> None:
        hits = []
        for _ in range(self._plan.points):
            place = self._random_script(1)
            scripts = [self._holding(place, keys, num_chunks=4) for keys in KEY_STATES]
            for state, script in enumerate(scripts):
                walk = await self._play(script)
                candidates = [served.truth(other, walk, LAST) for other in scripts]
                hits.append(served.nearest(walk.frames[-1:], candidates) == state)
        self._share("key states nearest their own true picture, %", hits)

    async def _switches(self) -> None:
        hits = []
        for _ in range(self._plan.points):
            place = self._random_script(1)
            for style in (index for index in range(len(scene.STYLES)) if index != place.style):
                script = self._holding(place, "w", num_chunks=5, switches={1: style})
                walk = await self._play(script)
                candidates = [
                    served.truth(script, replace(walk, styles_N=np.full_like(walk.styles_N, other)), LAST)
                    for other in range(len(scene.STYLES))
                ]
                hits.append(served.nearest(walk.frames[-1:], candidates) == style)
        self._share("prompt switches nearest their own true picture, %", hits)

    async def _turns(self) -> None:
        values = []
        for index in range(self._plan.turns):
            place = self._random_script(1)
            num_chunks = TURN_FRAMES // served.FRAMES_PER_CHUNK + 2
            script = self._holding(place, "l" if index % 2 else "j", num_chunks=num_chunks, held_frames=TURN_FRAMES + 1)
            walk = await self._play(script)
            self._shown.append((served.truth(script, walk, SPREAD), walk.frames[SPREAD]))
            values.append(served.psnr_db(walk.frames[LAST], served.truth(script, walk, LAST)))
        self.rows["full turn, PSNR of the view returned to, dB"] = float(np.mean(values))
        self._say(f"turns: {self.rows['full turn, PSNR of the view returned to, dB']:.1f} dB")

    async def _long(self) -> None:
        values = []
        for _ in range(self._plan.long_scripts):
            script = self._random_script(self._plan.long_chunks, switches=True)
            walk = await self._play(script)
            part = served.chunk_slice(self._plan.long_chunks - 1)
            values.append(served.psnr_db(walk.frames[part], served.truth(script, walk, part)))
            self._say(f"long script: {values[-1]:.1f} dB")
        self.rows[f"{LONG}PSNR at chunk {self._plan.long_chunks}, dB"] = float(np.mean(values))

    # ------------------------------------------------------------ scripts

    async def _play(self, script: Script) -> served.Walk:
        walk = await served.serve(self._url, script)
        self._first_chunks.append(walk.first_chunk)
        return walk

    def _random_script(self, num_chunks: int, *, switches: bool = False) -> Script:
        rng = self._rng
        start = trajectories.sample_starts(rng, 1)[0] * trajectories.METRES_PER_UNIT
        num_styles = len(scene.STYLES)
        changes = {}
        if switches:
            changes = {c: int(rng.integers(num_styles)) for c in range(2, num_chunks - 2) if rng.random() < 0.08}
        return Script(
            start=(float(start[0]), float(start[1])),
            heading=float(trajectories.sample_headings(rng, 1)[0]),
            style=int(rng.integers(num_styles)),
            keys_TK=trajectories.sample_keys(rng, 1, served.FRAMES_PER_CHUNK * num_chunks)[0],
            num_chunks=num_chunks,
            switches=changes,
            seed=int(rng.integers(1 << 30)),
        )

    def _holding(
        self,
        place: Script,
        keys: str,
        *,
        num_chunks: int,
        held_frames: int | None = None,
        switches: dict[int, int] | None = None,
    ) -> Script:
        frames = np.zeros((served.FRAMES_PER_CHUNK * num_chunks, len(trajectories.KEYS)), bool)
        frames[:held_frames, [trajectories.KEYS.index(key) for key in keys]] = True
        return Script(
            start=place.start,
            heading=place.heading,
            style=place.style,
            keys_TK=frames,
            num_chunks=num_chunks,
            switches=switches or {},
            seed=place.seed,
        )

    def _share(self, row: str, hits: list[bool]) -> None:
        self.rows[row] = 100.0 * sum(hits) / len(hits)
        self._say(f"{row}: {sum(hits)} of {len(hits)}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def table(rows: dict[str, float]) -> str:
    """Write the rows that were measured as Markdown, beside what they are held against."""
    lines = ["| | served | first preview | bar | aim |", "|---|---|---|---|---|"]
    others = {row: ("", "", "") for row in rows if row.startswith(LONG) and row not in TARGETS}
    for row, targets in (TARGETS | others).items():
        if row in rows:
            lines.append(f"| {row} | {rows[row]:.{2 if 'edges' in row else 1}f} | {' | '.join(targets)} |")
    return "\n".join(lines) + "\n"


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Take the same way out as an error, so that no server is left behind."""
    raise SystemExit(128 + number)


def _compile_renderer() -> None:
    """Draw one picture, so that what the renderer lacks is known before a server has started."""
    pose = np.concatenate([np.zeros(3), np.eye(3).ravel()]).astype(np.float32)
    scene.render(pose[None], np.zeros(1, np.int32))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="worldserve evaluate",
        allow_abbrev=False,
        description="Compare a served world with the renderer that it was trained on.",
    )
    parser.add_argument("world", choices=["demo"], help="the world that has a renderer")
    parser.add_argument("--out", type=Path, default=Path("evaluation"), help="folder for report, table and sheet")
    parser.add_argument("--quick", action="store_true", help="few sessions: minutes instead of half an hour")
    parser.add_argument("--url", help="WebSocket of a running demo server, ws://HOST:PORT/v1/world")
    for name, meaning in COUNTS.items():
        least = 1 if name.endswith("_chunks") else 0
        parser.add_argument(f"--{name.replace('_', '-')}", type=count(least=least), metavar="N", help=meaning)
    arguments = parser.parse_args()
    asked = {name: value for name in COUNTS if (value := getattr(arguments, name)) is not None}
    plan = replace(QUICK if arguments.quick else FULL, **asked)
    if not plan.measures_anything:
        parser.error("expected some scripts, points, turns or long scripts, got none of each")
    signal.signal(signal.SIGTERM, _leave)
    try:
        _compile_renderer()
    except (CompilerMissing, PermissionError) as error:
        sys.exit(f"{parser.prog}: {error}")
    make_out(parser, arguments.out)
    with ExitStack() as stack:
        url = arguments.url
        if url is None:
            from benchmarks.demo_process import demo_process

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="worldserve-evaluate-")))
            url = stack.enter_context(demo_process(folder / "server.log")).world_url
        evaluation = Evaluation(url, plan, arguments.out)
        try:
            asyncio.run(evaluation.run())
        except ConnectFailed as error:
            sys.exit(f"{parser.prog}: {error}")
    print(table(evaluation.rows), end="", flush=True)


if __name__ == "__main__":
    main()
