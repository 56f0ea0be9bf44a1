"""What a worker says about its machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from worldmodel.device_info import cpu_name, driver_version, versions


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar  2 01:00:00 UTC 2025", "570.133.20"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build", "580.82.07"),
        ("nothing of the kind", None),
    ],
)
def test_driver_version(tmp_path: Path, line: str, version: str | None):
    file = tmp_path / "version"
    file.write_text(f"{line}\nGCC version:  gcc version 13.3.0\n")
    assert driver_version(file) == version


def test_no_driver(tmp_path: Path):
    assert driver_version(tmp_path / "absent") is None


def test_cpu_name(tmp_path: Path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A Fast CPU\nmodel name\t: A Fast CPU\n")
    assert cpu_name(file) == "A Fast CPU"
    assert cpu_name(tmp_path / "absent") == (platform.processor() or platform.machine())


def test_versions_of_a_cpu():
    found = versions(torch.device("cpu"))
    assert found["python"] == platform.python_version()
    assert found["device_name"]
    assert "driver" not in found
