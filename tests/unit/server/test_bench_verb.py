"""`worldserve bench`: what is refused before anything starts, and what is handed on."""

from __future__ import annotations

import argparse
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from server import bench_verb, cli
from server.bench_arguments import BenchRequest, Ways, add_bench_arguments, read_bench_arguments
from server.bench_picture import synthetic_image
from server.bench_verb import bench_job, choose_beginning
from server.config_reading import load_config
from server.package_files import bundled_config
from tests.support.server_client import fake_config
from worldmodel.catalog import ModelKind, lookup

DEMO = str(bundled_config("demo"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "bench: expected either the URL of a running server or --config FILE"),
        (("http://h", "--config", DEMO), "bench: expected either the URL of a running server or --config FILE"),
        (("http://h", "--in-process"), "--in-process: expected --config, since it loads the model itself"),
        (("http://h", "--media.crf", "20"), "--media.crf: a running server has its own settings"),
        (("--config", DEMO, "--token", "t"), "--token: expected a URL"),
        (("--config", DEMO, "--sessions", "0"), "--sessions: expected a number from 1, got 0"),
        (("--config", DEMO, "--sessions", "9"), "--sessions: 9 sessions need as many places"),
        (("--config", DEMO, "--chunks", "1"), "--chunks: expected a number from 2, got 1"),
        (("--config", DEMO, "--time-limit", "0"), "--time-limit: expected seconds above 0, got 0"),
        (("--config", DEMO, "--chunk-timeout", "nan"), "--chunk-timeout: expected seconds above 0, got nan"),
        (("--config", DEMO, "--events-per-second", "-1"), "--events-per-second: expected 0 to 1000, got -1"),
        (("--config", DEMO, "--seed", "-1"), "--seed: expected a number from 0 to 9007199254740990, got -1"),
        (("--config", DEMO, "--json", "no/such/folder/x.json"), "no/such/folder/x.json: expected the name of a file"),
        (("--config", DEMO, "--plot", "x.png"), "--plot: expected a name that ends in .svg, got x.png"),
        (("--config", "absent.toml"), "absent.toml: No such file"),
    ],
)
def test_wrong_call_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
):
    assert cli.main(["bench", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"worldserve: {message}")
    assert text.count("\n") == 1


def request_of(*arguments: str) -> BenchRequest:
    """Parse a call without running it."""
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    return read_bench_arguments(parser.parse_args(arguments), {}, argv=["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "ways"),
    [((), Ways.SERVED), (("--in-process",), Ways.BOTH), (("--in-process", "only"), Ways.IN_PROCESS)],
)
def test_ways_of_running(arguments: tuple[str, ...], ways: Ways):
    assert request_of("--config", DEMO, *arguments).ways is ways


@pytest.mark.parametrize("arguments", [("--token", "s3cret"), ("--token=s3cret",)])
def test_the_token_is_not_in_the_report(arguments: tuple[str, ...]):
    request = request_of("http://h", *arguments)
    assert request.token == "s3cret"
    assert "s3cret" not in request.command
    assert bench_job(request, Path("x.png"))["token"] == "s3cret"


def test_the_job_has_everything_the_driver_is_told():
    job = bench_job(request_of("http://h", "--sessions", "2", "--seed", "5", "--json", "r.json"), Path("x.png"))
    assert (job["url"], job["num_sessions"], job["seed"], job["json_file"]) == ("http://h", 2, 5, "r.json")
    assert job["prompt"]
    assert not job["prompt_given"]


def test_the_model_alone_starts_from_the_same_image_as_a_session():
    request = request_of("--config", DEMO, "--in-process")
    config = load_config(Path(DEMO), environment={})
    image, prompt = choose_beginning(config, request)
    assert image == (config.checkpoint_path / "examples/day.png").read_bytes()
    assert prompt == "a small town, day"
    bare, default = choose_beginning(fake_config(), request)
    assert Image.open(io.BytesIO(bare)).size == (32, 32)
    assert default == bench_job(request, Path("x.png"))["prompt"]


def test_the_synthetic_image_is_the_same_every_time_and_no_flat_colour():
    first, second = synthetic_image(160, 96), synthetic_image(160, 96)
    assert first == second
    pixels = np.asarray(Image.open(io.BytesIO(first)))
    assert pixels.shape == (96, 160, 3)
    assert math.sqrt(float(pixels.var())) > 30


def test_a_robot_is_no_world(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def as_robot(name: str) -> Any:
        return replace(lookup(name), kind=ModelKind.ROBOT)

    monkeypatch.setattr(bench_verb, "lookup", as_robot)
    assert cli.main(["bench", "--config", DEMO]) == 2
    assert "expected a model that makes worlds, lingbot_world_v2 is a robot" in capsys.readouterr().err
