"""Where a measurement was made: the facts that somebody needs who wants to repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clients.bench.samples import Run

_MODEL_VERSIONS = ("device_name", "driver")
"""Entries of the worker's versions that are about the machine, and have fields of their own here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine that ran the benchmark's clients; that of the server too, if the benchmark started it."""

    system: str
    cpu: str
    num_cpus: int
    memory_bytes: int
    load_average_before: float
    load_average_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What was measured, when and where. Null: nobody could tell.

    `commit` is that of the server where the benchmark started it from a checkout, with "+changes" if the checkout had
    uncommitted ones. `model`, `versions`, `device_name` and `driver` are what the worker says.
    """

    date: str
    command: str
    commit: str | None
    server_version: str | None
    device: str | None
    device_name: str | None
    driver: str | None
    precision: str | None
    attention_backend: str | None
    versions: dict[str, str]
    model: dict[str, Any]
    host: Host


def load_average() -> float:
    """Return the system's load average over one minute."""
    return os.getloadavg()[0]


def provenance(runs: Sequence[Run], *, command: str, commit: str | None, load_before: float) -> Provenance:
    """Collect the facts; `runs` are all of one model."""
    model: Mapping[str, Any] = next((run.model for run in runs if run.model), {})
    versions = next((run.versions for run in runs if run.versions), {})
    return Provenance(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        commit=commit,
        server_version=next((run.server_version for run in runs if run.server_version), None),
        device=model.get("device"),
        device_name=versions.get("device_name"),
        driver=versions.get("driver"),
        precision=model.get("precision"),
        attention_backend=model.get("attention_backend"),
        versions={name: text for name, text in versions.items() if name not in _MODEL_VERSIONS},
        model=dict(model),
        host=Host(
            system=platform.platform(),
            cpu=_cpu_name(Path("/proc/cpuinfo")),
            num_cpus=os.cpu_count() or 1,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            load_average_before=round(load_before, 2),
            load_average_after=round(load_average(), 2),
        ),
    )


def commit_of_checkout(folder: Path) -> str | None:
    """Return the commit of the checkout that a folder of ours lies in, None if there is none or no git."""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name(cpuinfo: Path) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
