"""Where and when a benchmark was run, and of what: a part of every report."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from clients.bench.provenance import commit_of_checkout


def provenance(device: torch.device) -> dict[str, str]:
    """Say what was measured where; the commit ends in "+changes" if the checkout had uncommitted ones."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "commit": commit_of_checkout(Path(__file__).resolve().parents[1]) or "unknown",
        "device": name,
        "torch": torch.__version__,
    }
