"""What becomes of a checkpoint folder when parts are put into it; without start images, which need a compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from training.demo_world import ship
from training.demo_world.files import write_tensors
from worldmodel.checkpoint.errors import CheckpointError

PARTS = {"transformer": "diffusion_pytorch_model", "text_encoder": "model", "vae": "diffusion_pytorch_model"}


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship, "start_image", lambda name: Image.new("RGB", (2, 2)))


def _make_part(folder: Path, part: str, content: str) -> None:
    (folder / part).mkdir(parents=True)
    (folder / part / "config.json").write_text(json.dumps({"of": content}))
    write_tensors({content: torch.zeros(1)}, folder / part / f"{PARTS[part]}.safetensors")


def _make(folder: Path, content: str) -> Path:
    for part in PARTS:
        _make_part(folder, part, content)
    for name in ship.FIXED:
        (folder / name).touch()
    return folder


def _read(folder: Path) -> dict[str, str]:
    contents = {part: json.loads((folder / part / "config.json").read_text())["of"] for part in PARTS}
    for part, stem in PARTS.items():
        assert contents[part].encode() in (folder / part / f"{stem}.safetensors").read_bytes()
    return contents


def test_a_run_s_parts_replace_those_of_the_checkpoint(tmp_path: Path) -> None:
    run, out = _make(tmp_path / "run", "new"), _make(tmp_path / "out", "old")
    (out / "vae" / "another.safetensors").touch()
    ship.assemble(run, run / "vae", out)
    assert _read(out) == dict.fromkeys(PARTS, "new")
    assert {path.name for path in out.iterdir()} == {*PARTS, *ship.FIXED, "examples", "layout.json"}
    assert not (out / "vae" / "another.safetensors").exists()
    assert {path.stem for path in (out / "examples").iterdir()} == set(ship.STARTS)


def test_a_part_that_is_in_its_place_already_stays(tmp_path: Path) -> None:
    run, out = _make(tmp_path / "run", "new"), _make(tmp_path / "out", "old")
    (tmp_path / "link").symlink_to(out)
    ship.assemble(run, tmp_path / "link" / "vae", out)
    assert _read(out) == {"transformer": "new", "text_encoder": "new", "vae": "old"}


@pytest.mark.parametrize("part", PARTS)
def test_nothing_changes_unless_every_part_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    run, out = _make(tmp_path / "run", "new"), _make(tmp_path / "out", "old")
    config, weights = run / part / "config.json", run / part / f"{PARTS[part]}.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"run/{part}"):
        ship.assemble(run, run / "vae", out)
    weights.write_bytes(content)
    config.write_text("[]")
    with pytest.raises(CheckpointError, match=rf"run/{part}/config\.json"):
        ship.assemble(run, run / "vae", out)
    config.unlink()
    argv = ["ship", "--run", str(run), "--vae", str(run / "vae"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit, match=rf"run/{part}: expected a trained part, has no config\.json"):
        ship.main()
    assert _read(out) == dict.fromkeys(PARTS, "old")
    assert {path.name for path in out.iterdir()} == {*PARTS, *ship.FIXED}


def test_parts_are_not_put_where_no_checkpoint_is(tmp_path: Path) -> None:
    run, out = _make(tmp_path / "run", "new"), tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"out: .*has no model_index\.json, scheduler, tokenizer"):
        ship.assemble(run, run / "vae", out)
    assert not out.exists()


def test_a_run_that_ended_while_it_saved_is_shipped_whole(tmp_path: Path) -> None:
    run, out = _make(tmp_path / "run", "old"), _make(tmp_path / "out", "older")
    _make_part(run / "finished", "transformer", "new")
    ship.assemble(run, run / "vae", out)
    assert _read(out) == {"transformer": "new", "text_encoder": "old", "vae": "old"}


def test_what_a_ship_that_ended_early_had_finished_is_put_in_its_place(tmp_path: Path) -> None:
    run, out = _make(tmp_path / "run", "newer"), _make(tmp_path / "out", "new")
    (out / "finished").mkdir()
    (out / "vae").rename(out / "finished" / "vae")
    ship.assemble(run, out / "vae", out)
    assert _read(out) == {"transformer": "newer", "text_encoder": "newer", "vae": "new"}
