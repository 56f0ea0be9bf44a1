"""Which machine and which kernels a worker computes with, as `/v1/info` and event logs show it."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import torch

KERNEL_PACKAGES = ("triton", "fa3-fwd")
"""Packages whose version may change what is computed, named where they are installed."""

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CPU_FILE = Path("/proc/cpuinfo")


def versions(device: torch.device) -> dict[str, str]:
    """Return versions of python, torch and kernel packages, and `device_name`; of CUDA devices also cuda and driver."""
    found = {"python": platform.python_version(), "torch": importlib.metadata.version("torch")}
    for package in KERNEL_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.type != "cuda":
        return found | {"device_name": cpu_name(_CPU_FILE)}
    found["device_name"] = torch.cuda.get_device_name(device)
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    driver = driver_version(_DRIVER_FILE)
    return found if driver is None else found | {"driver": driver}


def driver_version(file: Path) -> str | None:
    """Read the version of NVIDIA's kernel module from its first line, None if it does not say.

    The line is "NVRM version: NVIDIA UNIX ... Kernel Module  VERSION  DATE"; the version is the first word that begins
    with a digit and has a dot.
    """
    if not file.is_file():
        return None
    first_line = file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    words = (word for word in first_line.split() if word[0].isdigit() and "." in word)
    return next(words, None)


def cpu_name(file: Path) -> str:
    """Return the CPU's name as Linux tells it, elsewhere the architecture."""
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
