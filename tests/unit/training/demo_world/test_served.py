"""What a served walk is compared with, and the files beside the checkpoint."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import demo_process
from server.config_reading import load_config
from server.package_files import bundled_config
from tests.support.client_standin_server import FIRST_FRAMES, FRAMES, standin_server
from training.demo_world import evaluation, gate, scene, served, ship
from training.demo_world.trajectories import KEYS

ROOT = Path(__file__).resolve().parents[4]
SHIPPED = ROOT / "worldmodel" / "data" / "demo_world"


def _script(num_chunks: int, keys: str) -> served.Script:
    held = np.zeros((3 * num_chunks, len(KEYS)), bool)
    held[:, [KEYS.index(key) for key in keys]] = True
    return served.Script(start=(6.0, 3.0), heading=0.0, style=2, keys_TK=held, num_chunks=num_chunks)


@pytest.fixture
def poses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the renderer return what it was asked for: z of the eye in the first pixel, the style in the second."""

    def render(poses: np.ndarray, styles: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.stack([poses[:, 2], styles], axis=1))

    monkeypatch.setattr(scene, "render", render)


@pytest.mark.usefixtures("poses")
@pytest.mark.parametrize("first_chunk", [0, 1, 2])
def test_the_truth_begins_where_the_keys_acted(first_chunk: int) -> None:
    script = _script(4, "w")
    walk = served.Walk(frames=np.empty(0, np.uint8), first_chunk=first_chunk, styles_N=np.array([2, 2, 5, 5]))
    z, styles = served.truth(script, walk).T
    # The first frame of the script counts as none; then each latent frame is a quarter of a metre, over four pictures.
    moved = 0.25 * np.clip(np.arange(4 * 11 + 1) / 4 - 3 * first_chunk, 0, None)
    np.testing.assert_allclose(z, 3.0 + moved, atol=1e-5)
    assert list(styles) == [2] * 21 + [5] * 24
    np.testing.assert_array_equal(served.truth(script, walk, slice(-1, None)), [[z[-1], 5]])


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the renderer draw nothing, which needs no compiler."""
    monkeypatch.setattr(scene, "render", lambda poses, styles: torch.zeros(len(poses), 2, 2, 3, dtype=torch.uint8))


@pytest.mark.usefixtures("blank")
async def test_the_keys_of_a_script_act_from_the_first_chunk_on() -> None:
    async with standin_server() as server:
        server.behaviour.late_chunks = 2
        walk = await served.serve(server.url, _script(3, "wl"))
    assert walk.first_chunk == 0
    assert len(walk.frames) == FIRST_FRAMES + 2 * FRAMES
    assert list(walk.styles_N) == [2, 2, 2]
    (start,), (reset,), (event,) = (server.sent(f"session.{kind}") for kind in ("start", "reset", "event"))
    assert reset["prompt"] == start["prompt"] == "a snow town"
    assert event["controls"][0]["data"]["frames"] == [[], *[["w", "l"]] * 8]


def test_chunks_are_nine_media_frames_and_then_twelve() -> None:
    slices = [served.chunk_slice(chunk) for chunk in range(3)]
    assert [(part.start, part.stop) for part in slices] == [(0, 9), (9, 21), (21, 33)]


def test_measures_of_pictures() -> None:
    rng = np.random.default_rng(0)
    sharp = rng.integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    grey = np.full_like(sharp, 128)
    assert served.psnr_db(sharp, np.where(sharp < 255, sharp + 1, 254).astype(np.uint8)) == pytest.approx(
        48.13, abs=0.01
    )
    assert served.edges(grey) == 0 < served.edges(sharp)
    assert served.nearest(sharp, [grey, sharp, 255 - sharp]) == 1


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[served.Script]:
    """Serve noise, in every second session with keys from chunk 1 on; returns the scripts that were played."""
    rng = np.random.default_rng(0)
    scripts: list[served.Script] = []

    def render(poses: np.ndarray, styles: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 256, (len(poses), 4, 4, 3)).astype(np.uint8))

    async def serve(url: str, script: served.Script) -> served.Walk:
        frames = render(np.empty(12 * script.num_chunks - 3), np.empty(0)).numpy()
        scripts.append(script)
        return served.Walk(frames=frames, first_chunk=(len(scripts) - 1) % 2, styles_N=np.full(script.num_chunks, 0))

    monkeypatch.setattr(scene, "render", render)
    monkeypatch.setattr(served, "serve", serve)
    return scripts


NOTHING = evaluation.Plan(scripts=0, script_chunks=1, points=0, turns=0, long_scripts=0, long_chunks=1)


async def _report(plan: evaluation.Plan, out: Path) -> dict[str, Any]:
    await evaluation.Evaluation("ws://nowhere", plan, out).run()
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


async def test_the_report_says_in_which_chunk_the_keys_of_each_session_began(
    played: list[served.Script], tmp_path: Path
) -> None:
    report = await _report(replace(NOTHING, scripts=2, turns=1), tmp_path)
    assert report["first_chunks"] == [0, 1, 0]
    assert [script.num_chunks for script in played] == [1, 1, 22]


async def test_sessions_that_leave_no_sheet_are_measured_as_well(played: list[served.Script], tmp_path: Path) -> None:
    report = await _report(replace(NOTHING, points=1), tmp_path)
    assert len(played) == len(evaluation.KEY_STATES) + len(scene.STYLES) - 1
    assert len(report["rows"]) == 2
    assert not (tmp_path / "served.png").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--scripts -1", "argument --scripts: expected a finite number and at least 0; got -1"),
        ("--script-chunks 0", "argument --script-chunks: expected a finite number and at least 1; got 0"),
        ("--long-chunks 0", "argument --long-chunks: expected a finite number and at least 1; got 0"),
        ("--quick --scripts 0 --points 0 --turns 0", "got none of each"),
    ],
)
def test_counts_that_measure_nothing_are_refused(
    options: str, says: str, evaluate: Callable[..., object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert evaluate(*options.split()) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


async def test_long_scripts_have_a_row_of_their_own_whatever_their_length(
    played: list[served.Script], tmp_path: Path
) -> None:
    report = await _report(replace(NOTHING, scripts=1, script_chunks=3, long_scripts=1, long_chunks=3), tmp_path)
    mine, long = report["rows"]["PSNR at chunk 3, dB"], report["rows"]["long scripts, PSNR at chunk 3, dB"]
    assert mine != long
    assert (tmp_path / "table.md").read_text().splitlines()[3:] == [
        f"| PSNR at chunk 3, dB | {mine:.1f} | 20.4 | 23 | 25 |",
        f"| long scripts, PSNR at chunk 3, dB | {long:.1f} |  |  |  |",
    ]


def test_a_quick_evaluation_may_have_a_long_script() -> None:
    """Its length is the same as in the whole one."""
    assert evaluation.QUICK.long_chunks == evaluation.FULL.long_chunks


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of the server that an evaluation starts; there is none."""
    happened: list[str] = []

    @contextmanager
    def process(log: Path) -> Iterator[SimpleNamespace]:
        happened.append("started")
        try:
            yield SimpleNamespace(world_url="ws://nowhere")
        finally:
            happened.append("ended")

    monkeypatch.setattr(demo_process, "demo_process", process)
    return happened


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Run the program as far as it goes; returns its exit code, or the text that it leaves with."""

    def run(*options: str) -> object:
        monkeypatch.setattr(sys, "argv", ["evaluate", "demo", "--out", str(tmp_path / "out"), *options])
        with pytest.raises(SystemExit) as left:
            evaluation.main()
        return left.value.code

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("blank")
def test_a_signal_to_end_takes_the_server_along(
    evaluate: Callable[..., object], servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(self: evaluation.Evaluation) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(evaluation.Evaluation, "run", run)
    assert evaluate() == 128 + signal.SIGTERM
    assert servers == ["started", "ended"]


def test_a_compiler_that_is_missing_is_named_before_a_server_starts(
    evaluate: Callable[..., object], servers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Nothing has been compiled yet, in this process or in the user's cache.
    monkeypatch.setattr(scene, "_cpu_library", scene._cpu_library.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs the C++ compiler g++, which is not on PATH; install it" in str(evaluate())
    assert servers == []


@pytest.mark.usefixtures("blank")
def test_an_out_that_is_no_folder_is_refused_before_a_server_starts(
    evaluate: Callable[..., object], servers: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "out").touch()
    assert evaluate() == 2
    assert "argument --out: expected a folder to write to" in capsys.readouterr().err
    assert servers == []


@pytest.mark.usefixtures("blank")
def test_a_server_that_is_not_there_is_said_in_a_line(evaluate: Callable[..., object]) -> None:
    assert "cannot connect to ws://127.0.0.1:1/v1/world" in str(evaluate("--url", "ws://127.0.0.1:1/v1/world"))


def test_the_table_shows_what_was_measured_beside_bar_and_aim() -> None:
    text = evaluation.table({"PSNR at chunk 6, dB": 17.04, "something else": 1.0})
    assert text.splitlines()[2:] == ["| PSNR at chunk 6, dB | 17.0 | 17.7 | 21 | 24 |"]
    text = evaluation.table({"long scripts, PSNR at chunk 90, dB": 11.3})
    assert text.splitlines()[2:] == ["| long scripts, PSNR at chunk 90, dB | 11.3 | 14.3 | 17 | 20 |"]


def test_the_layout_beside_the_checkpoint_is_that_of_the_scene() -> None:
    assert json.loads((SHIPPED / "layout.json").read_text()) == ship.layout()
    objects = ship.layout()["objects"]
    assert isinstance(objects, list)
    assert [entry["label"] for entry in objects[:2]] == ["lighthouse", "house"]


def test_every_style_is_offered_with_an_image_and_a_prompt_that_was_taught() -> None:
    config = load_config(bundled_config("demo"), environment={})
    assert [image.name for image in config.model.start_images] == list(scene.STYLES) == list(ship.STARTS)


@pytest.mark.slow
def test_true_pictures_of_the_quality_tests_are_what_the_renderer_draws() -> None:
    """Needs a C++ compiler."""
    for name, drawn in (("walk.png", gate.walk_pictures()), ("styles.png", gate.style_pictures())):
        stored = gate.read_pictures(ROOT / "tests" / "golden" / "data" / "demo_world" / name, len(drawn))
        assert np.abs(stored.astype(int) - drawn).max() <= 2
