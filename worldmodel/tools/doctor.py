"""Can this host run a configuration? The worker's half of `worldserve doctor`: `python -m worldmodel.tools.doctor`.

Reads a `StartWorker` as JSON from standard input and writes a JSON list of checks, each with `status` (OK, WARN, FAIL),
`name`, `expected` and `found`. Nothing is loaded and nothing is allocated on a device. Works without a GPU and without
torch. The exit code is 0 even if checks fail; whoever asked decides.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import resource
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from worldmodel.checkpoint.errors import findings_of
from worldmodel.errors import WorldModelError
from worldmodel.messages import StartWorker
from worldmodel.tools.amounts import bytes_text

if TYPE_CHECKING:
    from worldmodel.tools.doctor_needs import Findings

MIN_TORCH = (2, 6)
MIN_CAPABILITY = (8, 0)
"""Compute capability of the first cards with bfloat16 tensor cores."""

STAGING_BYTES = 1_000_000_000
"""Host memory that torch, staging buffers and pinned pixels take besides weights; an estimate."""

KERNELS = (("triton", "fused kernels"), ("fa3_fwd_interface", "FlashAttention-3"))
"""Optional modules, and what is done without where they are missing."""


class Status(StrEnum):
    """WARN: it runs, but slower or smaller than it might."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. `details` has in full what is cut in `found`."""

    status: Status
    name: str
    expected: str
    found: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that a configuration takes by what they are for: of the device for one session, of the host, page-locked.

    `session_bytes` are those of the device beside weights and libraries, `shared_bytes` those of the host that are
    files: another process may have them in memory already.
    """

    device: Mapping[str, int]
    session_bytes: int
    host: Mapping[str, int]
    locked: Mapping[str, int]
    shared_bytes: int = 0


def main() -> int:
    """Answer the request on standard input."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=StartWorker)
    print(json.dumps([asdict(check) for check in run_checks(start)]))
    return 0


def run_checks(start: StartWorker) -> Iterator[Check]:
    """Yield all checks, in the order in which a start would meet the problems."""
    torch_check = _check_torch()
    yield torch_check
    if torch_check.status is Status.FAIL:
        return
    device_checks = list(_check_device(start.device))
    yield from device_checks
    has_device = all(check.status is Status.OK for check in device_checks)
    found = yield from _check_checkpoint(start, has_device=has_device)
    if found is not None:
        if has_device and found.needs is not None:
            yield from _check_device_memory(start, found.needs)
        if found.outlook is not None:
            yield from found.outlook.checks()
        if found.needs is not None:
            yield _check_host_memory(found.needs)
            yield _check_locked_memory(found.needs)
    yield from _check_kernels(start.device)


def _check_torch() -> Check:
    expected = f"{'.'.join(map(str, MIN_TORCH))} or later"
    if importlib.util.find_spec("torch") is None:
        return Check(status=Status.FAIL, name="torch", expected=expected, found="not installed")
    version = importlib.metadata.version("torch")
    is_new = tuple(int(part) for part in version.split(".")[:2]) >= MIN_TORCH
    return Check(status=Status.OK if is_new else Status.FAIL, name="torch", expected=expected, found=version)


def _check_device(name: str) -> Iterator[Check]:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        yield Check(status=Status.FAIL, name="device", expected="cpu, cuda or cuda:N", found=repr(name))
        return
    if device.type != "cuda":
        yield Check(status=Status.OK, name="device", expected=name, found=f"{device.type} (small models only)")
        return
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= num_devices:
        found = f"torch {torch.__version__} finds {num_devices} CUDA devices"
        yield Check(status=Status.FAIL, name="device", expected=name, found=found)
        return
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    found = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    status = Status.OK if capability >= MIN_CAPABILITY else Status.FAIL
    yield Check(status=status, name="device", expected=f"{name} with capability 8.0 or later", found=found)


def _check_checkpoint(start: StartWorker, *, has_device: bool) -> Generator[Check, None, Findings | None]:
    """Yield the check of the checkpoint; return what was found, None if that cannot be known."""
    from worldmodel.tools.doctor_needs import look_into

    expected = f"a checkpoint for {start.model}"
    try:
        found = look_into(start, has_device=has_device)
    except (WorldModelError, ValueError) as error:
        details = tuple(each.whole for each in findings_of(error)) if isinstance(error, WorldModelError) else ()
        yield Check(status=Status.FAIL, name="checkpoint", expected=expected, found=str(error), details=details)
        return None
    if found.problems:
        text = "; ".join(map(str, found.problems))
        details = tuple(problem.whole for problem in found.problems)
        yield Check(status=Status.FAIL, name="checkpoint", expected=expected, found=text, details=details)
    else:
        yield Check(status=Status.OK, name="checkpoint", expected=expected, found=found.about)
    return found


def _check_device_memory(start: StartWorker, needs: Needs) -> Iterator[Check]:
    import torch

    needed_bytes, expected = sum(needs.device.values()), _listed(needs.device)
    if torch.device(start.device).type != "cuda":
        yield _memory_check("memory for the model", expected, _available_bytes(), needed_bytes)
        if start.memory_bytes is not None:
            yield _check_session_budget(start.memory_bytes, needs)
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info(start.device)
    status = Status.OK if free_bytes >= needed_bytes else Status.FAIL
    found = f"{bytes_text(free_bytes)} free of {bytes_text(total_bytes)}"
    yield Check(status=status, name="device memory", expected=expected, found=found)


def _check_session_budget(allowed_bytes: int, needs: Needs) -> Check:
    status = Status.OK if allowed_bytes >= needs.session_bytes else Status.FAIL
    expected = f"{bytes_text(needs.session_bytes)} for one session"
    found = f"{bytes_text(allowed_bytes)} allowed by kvcache.cpu_memory_bytes"
    return Check(status=status, name="memory for sessions", expected=expected, found=found)


def _check_host_memory(needs: Needs) -> Check:
    """FAIL where memory lacks, WARN where it is enough for a worker whose mapped files are in memory already."""
    available_bytes, wanted_bytes = _available_bytes(), sum(needs.host.values())
    found = _memory_check("host memory", _listed(needs.host), available_bytes, wanted_bytes)
    if found.status is Status.OK or available_bytes < wanted_bytes - needs.shared_bytes:
        return found
    shared = f"; {bytes_text(needs.shared_bytes)} are files, which another worker may have in memory"
    return replace(found, status=Status.WARN, found=f"{found.found}{shared}")


def _memory_check(name: str, expected: str, available_bytes: int, wanted_bytes: int) -> Check:
    status = Status.OK if available_bytes >= wanted_bytes else Status.FAIL
    return Check(status=status, name=name, expected=expected, found=f"{bytes_text(available_bytes)} available")


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _check_locked_memory(needs: Needs) -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if limit == resource.RLIM_INFINITY else f"limit of {bytes_text(limit)}"
    locked_bytes = sum(needs.locked.values())
    if locked_bytes == 0:
        return Check(status=Status.OK, name="memlock", expected="nothing is page-locked for long", found=found)
    is_enough = limit == resource.RLIM_INFINITY or limit >= locked_bytes
    # The CUDA driver locks pages on its own account on most systems, so that a low limit need not matter.
    status = Status.OK if is_enough else Status.WARN
    return Check(status=status, name="memlock", expected=_listed(needs.locked), found=found)


def _listed(parts: Mapping[str, int]) -> str:
    """Add parts up, and name those that take anything."""
    *most, last = [name for name, num_bytes in parts.items() if num_bytes]
    return f"{bytes_text(sum(parts.values()))} for {', '.join(most)}{' and ' if most else ''}{last}"


def _check_kernels(device: str) -> Iterator[Check]:
    if not device.startswith("cuda"):
        return
    for module, purpose in KERNELS:
        is_there = importlib.util.find_spec(module) is not None
        found = "installed" if is_there else "not installed: the plain path is used unless the configuration names it"
        status = Status.OK if is_there else Status.WARN
        yield Check(status=status, name=purpose, expected=f"module {module}", found=found)


if __name__ == "__main__":
    raise SystemExit(main())
