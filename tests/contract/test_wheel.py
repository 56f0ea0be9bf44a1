"""The wheel holds the five packages with all their data, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from email.parser import BytesParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.listening import address_in

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = frozenset({"server", "worldmodel", "kvcache", "offload", "clients"})
UNPACKAGED = frozenset({"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def files_below(folder: str, pattern: str = "*") -> dict[str, Path]:
    """Files of the checkout, keyed by their path in it."""
    found = (path for path in (ROOT / folder).rglob(pattern) if path.is_file())
    return {str(path.relative_to(ROOT)): path for path in found if not UNPACKAGED & set(path.parts)}


def test_top_level_is_the_five_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    metadata = {name for name in top if name.endswith(".dist-info")}
    assert len(metadata) == 1
    assert top - metadata == PACKAGES


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_file_of_a_package_is_in_it(wheel: zipfile.ZipFile, package: str) -> None:
    wanted = files_below(package)
    packed = {name for name in wheel.namelist() if name.startswith(f"{package}/")}
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= packed
    assert set(wanted) == {name for name in packed if not name.startswith("server/_configs/")}


def test_the_demo_checkpoint_is_whole(wheel: zipfile.ZipFile) -> None:
    files = files_below("worldmodel/data/demo_world")
    assert {"worldmodel/data/demo_world/model_index.json"} <= set(files)
    assert [name for name, path in files.items() if wheel.read(name) != path.read_bytes()] == []


def test_the_page_is_in_it(wheel: zipfile.ZipFile) -> None:
    page = {name for pattern in ("*.js", "*.html", "*.css") for name in files_below("clients/browser", pattern)}
    assert page
    assert page <= set(wheel.namelist())


def test_configs_travel_inside_the_server_package(wheel: zipfile.ZipFile) -> None:
    configs = {f"server/_configs/{path.name}": path for path in (ROOT / "configs").glob("*.toml")}
    assert "server/_configs/demo.toml" in configs
    packed = {name for name in wheel.namelist() if name.startswith("server/_configs/")}
    assert packed == set(configs)
    assert [name for name, path in configs.items() if wheel.read(name) != path.read_bytes()] == []


def test_metadata_names_the_command_and_forbids_uploads(wheel: zipfile.ZipFile) -> None:
    (metadata_name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = BytesParser().parsebytes(wheel.read(metadata_name))
    assert metadata["Name"] == "worldserve"
    assert "Private :: Do Not Upload" in metadata.get_all("Classifier", [])
    needed = {
        requirement.split(";")[0].split()[0]
        for requirement in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in requirement
    }
    assert "torch" not in needed
    entry_points = wheel.read(metadata_name.replace("METADATA", "entry_points.txt")).decode()
    assert "worldserve = server.cli:main" in entry_points


def test_nothing_in_it_is_a_test_or_a_cache(wheel: zipfile.ZipFile) -> None:
    unwanted = UNPACKAGED | {"tests"}
    assert [name for name in wheel.namelist() if unwanted & set(name.split("/"))] == []


# ---------------------------------------------------------------- the image

TINY = {
    "WORLDSERVE_MODEL_CHECKPOINT": "package:worldmodel/data/demo_world",
    "WORLDSERVE_MODEL_WIDTH": "160",
    "WORLDSERVE_MODEL_HEIGHT": "96",
    "WORLDSERVE_MODEL_PRECISION": "fp32",
    "WORLDSERVE_WORKER_DEVICE": "cpu",
}
"""What `docker run -e` would set to serve the demo world's weights on a host without a GPU."""


def instruction(name: str) -> str:
    """Return the last instruction of this name in the Dockerfile, with its continuation lines joined."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [line.removeprefix(name).strip() for line in lines if line.startswith(f"{name} ")][-1]


def installed(wheel: zipfile.ZipFile, folder: Path) -> Path:
    """Install the wheel in a bare environment and return its `bin`. What it depends on comes from this environment."""
    venv.create(folder, with_pip=False)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, "--quiet", str(wheel.filename)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path alone: .pth files there, such as that of an editable worldserve, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def test_the_command_and_the_health_check_of_the_image_work_from_the_wheel(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    programs = installed(wheel, tmp_path / "venv")
    shutil.copytree(ROOT / "configs", tmp_path / "etc")
    command = json.loads(instruction("ENTRYPOINT")) + json.loads(instruction("CMD"))
    command = [part.replace("/etc/worldserve", str(tmp_path / "etc")) for part in command]
    check = instruction("HEALTHCHECK").partition(" CMD ")[2]
    environment = {"PATH": f"{programs}:{os.defpath}", "HOME": str(tmp_path), "WORLDSERVE_SERVER_PORT": "0", **TINY}
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(programs / command[0]), *command[1:]], stdout=output, stderr=output, env=environment, cwd=tmp_path
        )
    try:
        address = address_in(log, server)
        environment["WORLDSERVE_SERVER_PORT"] = str(urlsplit(address).port)
        for _ in range(300):
            healthy = subprocess.run(check, shell=True, env=environment, capture_output=True, check=False)
            if healthy.returncode == 0 or server.poll() is not None:
                break
        assert healthy.returncode == 0, log.read_text()
        with urllib.request.urlopen(f"{address}static/main.js", timeout=60) as answer:
            assert answer.read() == wheel.read("clients/browser/main.js")
    finally:
        server.terminate()
        code = server.wait(timeout=60)
    assert code in (0, -signal.SIGTERM), log.read_text()
