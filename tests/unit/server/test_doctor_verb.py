"""The server's half of `doctor`, and how both halves become one report."""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from server import doctor_verb
from server.config import ServerConfig
from server.config_reading import load_config
from server.doctor_verb import Check, doctor, server_checks
from server.package_files import bundled_config


def config(**flags: str) -> ServerConfig:
    settings = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(bundled_config("demo"), environment={}, flags={"server.port": "0", **settings})


def found(settings: ServerConfig) -> dict[str, Check]:
    return {check.name: check for check in server_checks(settings)}


def test_a_good_host_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_verb.shutil, "disk_usage", lambda _: SimpleNamespace(free=20 * 10**9))
    assert {check.status for check in found(config()).values()} == {"OK"}


def test_a_taken_port_fails_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = found(config(server__port=str(taken.getsockname()[1])))["port"]
    assert check.status == "FAIL"
    assert "the port is in use" in check.found


def test_missing_packages_fail_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = doctor_verb.importlib.util.find_spec
    monkeypatch.setattr(doctor_verb.importlib.util, "find_spec", lambda name: None if name == "av" else find_spec(name))
    checks = found(config())
    assert checks["packages"].status == "FAIL"
    assert checks["packages"].found == "missing av: pip install 'worldserve[demo]'"
    assert "encoder" not in checks


def test_every_start_image_that_cannot_be_decoded_is_told(tmp_path: Path) -> None:
    assert found(config())["start images"].status == "OK"
    check = found(config(model__checkpoint=str(tmp_path)))["start images"]
    assert (check.status, check.expected) == ("FAIL", "6 that can be decoded")
    assert check.found.startswith("6 cannot: model.start_images[0].file: ")
    assert check.found.endswith(": No such file or directory")
    assert len(check.details) == 6


@pytest.mark.parametrize(("free_bytes", "status"), [(20e9, "OK"), (5e9, "WARN"), (0.5e9, "FAIL")])
def test_room_for_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: float, status: str) -> None:
    monkeypatch.setattr(doctor_verb.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free_bytes)))
    check = found(config(recording__folder=str(tmp_path / "new")))["disk for recordings"]
    assert check.status == status
    assert check.expected.startswith("10.7 GB in")


@pytest.mark.parametrize(("free_bytes", "status"), [(20e9, "OK"), (0.5e9, "WARN")])
def test_room_for_temporary_files_without_recordings(
    monkeypatch: pytest.MonkeyPatch, free_bytes: float, status: str
) -> None:
    monkeypatch.setattr(doctor_verb.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free_bytes)))
    checks = found(config())
    assert "disk for recordings" not in checks
    assert checks["disk"].status == status
    assert checks["disk"].found == f"{free_bytes / 1e9:.1f} GB free in {tempfile.gettempdir()}"


def test_without_a_temporary_folder_the_disk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(doctor_verb.tempfile, "gettempdir", none)
    assert (found(config())["disk"].status, found(config())["disk"].found[:9]) == ("FAIL", "no folder")


def test_a_worker_that_cannot_start_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(returncode=1, stdout=b"", stderr=b"Traceback\nImportError: no torch here\n")
    monkeypatch.setattr(doctor_verb.subprocess, "run", lambda *_, **__: ended)
    [check] = doctor_verb.worker_checks(config())
    assert (check.status, check.found) == ("FAIL", "it ended with exit code 1: ImportError: no torch here")


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [
        ("OK", 0, "can run here"),
        ("WARN", 0, "can run here, but look at: device"),
        ("FAIL", 1, "CAN NOT RUN HERE: device"),
    ],
)
def test_the_report_has_a_row_for_each_check_a_verdict_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int, verdict: str
) -> None:
    long = "a very long finding that would not fit into the width of a terminal of eighty columns at all, ever"
    server = [Check(status="OK", name="port", expected="free", found="free")]
    answer = Check(status=status, name="device", expected="cuda:0", found=long)
    monkeypatch.setattr(doctor_verb, "server_checks", lambda _: server)
    monkeypatch.setattr(doctor_verb, "worker_checks", lambda _: [answer])
    assert doctor(config(), as_json=False) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("worldserve doctor   lingbot_world_v2, ")
    rows = [line.split() for line in lines if line.startswith(("OK", "WARN", "FAIL"))]
    assert [(row[0], row[1]) for row in rows] == [("OK", "port"), (status, "device")]
    words = " ".join(lines).split()
    assert [word for word in words if word in long.split()] == long.split()
    assert 80 < max(map(len, lines)) <= 110, "a pipe gets the width that conformance gives it"
    assert lines[-1] == verdict
    assert doctor(config(), as_json=True) == code
    assert json.loads(capsys.readouterr().out)[-1]["name"] == "device"
