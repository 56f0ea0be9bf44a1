"""`worldserve bench` as people call it: a server of its own, the model alone, a running server, a server that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.server_process import CONFIG, ROOT, ServerProcess, server_process

SCHEMA = json.loads((ROOT / "docs/bench_report.schema.json").read_text(encoding="utf-8"))


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "server", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )


def read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(report, SCHEMA)
    return report


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("bench"), capacity=2) as process:
        yield process


def test_a_server_of_its_own_beside_the_model_alone(tmp_path: Path):
    config = tmp_path / "fake.toml"
    # Long enough that keys are pressed in time where the client is held up at first.
    config.write_text(CONFIG.format(capacity=2, chunk_ms=20, load_ms=0), encoding="utf-8")
    files = ("--json", tmp_path / "r.json", "--plot", tmp_path / "r.svg")
    done = bench("--config", config, "--in-process", "--sessions", 2, "--chunks", 17, "--events-per-second", 50, *files)
    assert done.returncode == 0, done.stderr
    report = read(tmp_path / "r.json")
    assert report["complete"]
    for way in ("served", "in_process"):
        run = report[way]
        assert [len(session["chunks"]) for session in run["sessions"]] == [17, 17]
        assert [window["interval_ms"]["count"] for window in run["windows"]] == [32, 20, 8]
        assert run["headline_after_chunk"] == 12
        assert run["capacity_sessions"] == 2
        assert run["memory"]["worker_bytes"] > 1e7
    assert set(report["served"]["windows"][2]["stages_ms"]) == {
        "queue",
        "denoise",
        "commit",
        "decode",
        "transfer",
        "encode",
    }
    assert report["served"]["events"]["num_applied"] > 0
    assert report["served"]["memory"]["server_bytes"] > 1e7
    assert report["served_over_in_process"] > 0
    assert report["provenance"]["model"]["name"] == "fake"
    assert report["provenance"]["versions"]["torch"]
    assert report["workload"]["start_image"] == "synthetic"
    assert report["verdict"] in (tmp_path / "r.svg").read_text(encoding="utf-8")
    assert "served / in process" in done.stdout


def test_the_benchmark_of_the_full_size_runs_tiny_on_a_cpu(tmp_path: Path):
    tiny = ("--model.checkpoint", "random:lingbot-world-v2-tiny", "--model.width", 48, "--model.height", 32)
    config = ROOT / "configs/lingbot_world_v2_benchmark.toml"
    files = ("--json", tmp_path / "r.json")
    done = bench("--config", config, *tiny, "--device", "cpu", "--in-process", "only", "--chunks", 3, *files)
    assert done.returncode == 0, done.stderr
    report = read(tmp_path / "r.json")
    assert report["complete"]
    assert report["served"] is None
    (session,) = report["in_process"]["sessions"]
    assert [chunk["num_frames"] for chunk in session["chunks"]] == [9, 12, 12]
    facts = report["provenance"]
    assert (facts["device"], facts["precision"]) == ("cpu", "bf16")
    assert facts["attention_backend"] == "torch_sdpa; layers unfused"
    assert facts["model"]["checkpoint_digest"].endswith("(random weights, for benchmarks only)")


def test_a_running_server_is_driven_and_left_as_it_was(server: ServerProcess, tmp_path: Path):
    done = bench(server.url, "--chunks", 5, "--pacing", "playback", "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    report = read(tmp_path / "r.json")
    assert report["in_process"] is None
    assert report["served"]["headline_after_chunk"] == 0
    assert len(report["served"]["sessions"][0]["chunks"]) == 5
    server.until_empty()


def test_too_many_sessions_for_a_server(server: ServerProcess):
    done = bench(server.url, "--sessions", 3)
    assert done.returncode == 1
    assert "3 sessions were asked for, and the server at" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_url():
    done = bench("http://127.0.0.1:1/")
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:1/v1/info" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_a_partial_report(tmp_path: Path):
    with server_process(tmp_path, capacity=1, chunk_ms=50) as server:
        results: list[subprocess.CompletedProcess[str]] = []
        arguments = (server.url, "--chunks", 1000, "--json", tmp_path / "r.json")
        thread = threading.Thread(target=lambda: results.append(bench(*arguments)))
        thread.start()
        server.until(lambda: server.metric("worldserve_chunks_total") >= 3, what="some chunks are made")
        for process in (*server.ps.children(recursive=True), server.ps):
            process.send_signal(signal.SIGKILL)
        server.process.wait()
        thread.join()
    (done,) = results
    assert done.returncode == 1
    report = read(tmp_path / "r.json")
    assert not report["complete"]
    assert report["verdict"].startswith("PARTIAL: ")
    assert report["problems"][0].startswith("served: session 0 ended after ")
    assert "PARTIAL" in done.stdout


@pytest.mark.slow
def test_a_model_that_does_not_load(tmp_path: Path):
    config = tmp_path / "fake.toml"
    text = CONFIG.format(capacity=2, chunk_ms=5, load_ms=0)
    config.write_text(text.replace("[model.options]", '[model.options]\nload_error = "no such weights"'))
    done = bench("--config", config, "--chunks", 5)
    assert done.returncode == 1
    assert "no such weights" in done.stderr
    assert "Traceback" not in done.stderr
