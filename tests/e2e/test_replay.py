"""The replay command with the fake model: plain logs, recorded logs, and wrong calls that say why.

That a served session of the demo world comes out again bit by bit is in `test_demo_world.py`, which has the server.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import pytest

from server.app import start_message
from server.cli import main
from server.config_reading import load_config
from server.event_log import LoggedImage, encode_line, image_digest, start_line
from tests.support.server_client import png
from tests.support.server_worker import model_info
from tests.support.verb_process import Outcome, worldserve

pytestmark = pytest.mark.timeout(240)

FAKE = """\
[model]
name = "fake"
checkpoint = "package:worldmodel/data/demo_world"
width = 32
height = 32
fps = 12
precision = "fp32"
"""


def num_frames(mp4: bytes) -> int:
    with av.open(io.BytesIO(mp4), format="mp4") as video:
        return sum(1 for _ in video.decode(video=0))


@dataclass
class Fake:
    """A configuration, an image and a plain log."""

    config: Path
    image: Path
    log: Path

    async def replay(self, log: Path, *arguments: str | Path) -> Outcome:
        return await worldserve("replay", log, "--config", self.config, *arguments)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    fake = Fake(config=tmp_path / "fake.toml", image=tmp_path / "start.png", log=tmp_path / "plain.jsonl")
    fake.config.write_text(FAKE)
    fake.image.write_bytes(png())
    lines: list[dict[str, Any]] = [
        {"event_id": 0, "prompt": "a town", "frames": [["w"], ["w"], ["w"]]},
        {"event_id": 1, "prompt": "night"},
        {"event_id": 2},
    ]
    fake.log.write_text("\n".join(map(json.dumps, lines)))
    return fake


async def test_a_plain_log_has_a_chunk_on_each_line(fake: Fake, tmp_path: Path) -> None:
    mp4 = tmp_path / "x.mp4"
    outcome = await fake.replay(fake.log, "--image", fake.image, "--seed", "3", "--out", mp4)
    assert outcome.code == 0, outcome.err
    assert num_frames(mp4.read_bytes()) == 9 + 12 + 12


def recorded_log(fake: Fake, *, digest: str) -> Path:
    """A log of the fake model as if weights of this digest had made it."""
    start = start_line(
        model_info(),
        session_id="s",
        created_at="",
        model_options=start_message(load_config(fake.config, environment={})).model_options,
        version="0",
        prompt="a town",
        seed=1,
        image=LoggedImage(file="image-0.png", sha256=image_digest(fake.image.read_bytes())),
    )
    fields = json.loads(encode_line(start)) | {"model_digest": digest}
    tick = {"run": 0, "chunk_index": 0, "events": [], "num_media_frames": 9}
    log = fake.config.with_name("events.jsonl")
    log.write_text(f"{json.dumps(fields)}\n{json.dumps(tick)}\n")
    return log


async def test_another_model_is_refused_unless_asked_for(fake: Fake, tmp_path: Path) -> None:
    log, mp4 = recorded_log(fake, digest="another-digest"), tmp_path / "x.mp4"
    outcome = await fake.replay(log, "--out", mp4, "--image", fake.image)
    assert outcome.code == 2
    assert "model_digest: the log has another-digest, this is " in outcome.err
    assert "--any-model" in outcome.err
    assert not mp4.exists()
    outcome = await fake.replay(log, "--out", mp4, "--image", fake.image, "--any-model")
    assert outcome.code == 0, outcome.err
    assert "note: latents may differ" in outcome.err
    assert num_frames(mp4.read_bytes()) == 9


# ---------------------------------------------------------------- refused before a worker is started


def refused(capsys: pytest.CaptureFixture[str], log: Path, fake: Fake, *arguments: str | Path) -> str:
    """Run the command in this process and return why it was refused."""
    assert main(["replay", str(log), "--config", str(fake.config), *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_plain_log_brings_no_image(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--image: expected one" in refused(capsys, fake.log, fake, "--out", tmp_path / "x.mp4")


def test_an_image_must_be_the_logged_one(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = recorded_log(fake, digest="d")
    (tmp_path / "image-0.png").write_bytes(png(8, 8))
    assert "line 1: no image with SHA-256" in refused(capsys, log, fake, "--out", tmp_path / "x.mp4")


def test_a_log_can_name_no_file_elsewhere(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = recorded_log(fake, digest="d")
    log.write_text(log.read_text().replace("image-0.png", "../image-0.png"))
    reason = refused(capsys, log, fake, "--out", tmp_path / "x.mp4", "--image", fake.image)
    assert "line 1: image.file: expected a name without a folder" in reason


def test_a_recorded_log_has_its_own_seed(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = recorded_log(fake, digest="d")
    assert "--seed" in refused(capsys, log, fake, "--seed", "1", "--out", tmp_path / "x.mp4")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "--out or --latents"),
        (("--out", "/nowhere/x.mp4"), "does not exist"),
        (("--out", "x.mp4", "--seed", "-1"), "--seed"),
        (("--out", "x.mp4", "--image", "none.png"), "none.png"),
    ],
)
def test_a_wrong_call_says_why(
    fake: Fake, arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = () if "--image" in arguments else ("--image", fake.image)
    assert reason in refused(capsys, fake.log, fake, *image, *arguments)


def test_a_missing_log_says_so(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, tmp_path / "none.jsonl", fake, "--out", tmp_path / "x.mp4")
