"""What is decided before a layer of a streamed LingBot model is loaded; a worker carries it out, `doctor` tells it.

Which layers stay, the memory of the others, how they travel. Nothing is loaded, written or changed for it.

device   | outside the layers, VAE, text | K/V, sessions, activations | working memory | resident layers, buffers |
           `loaded_bytes`                  `kv`                          WORKING_BYTES    the rest, or less
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcache.spec import KVSpec
from offload.cache_folder import CacheFolder
from offload.errors import BudgetTooSmall, CacheRootRefused, OffloadError, PlanRefused
from offload.host_plan import HostKind, HostPlan, StoredTensor, plan_host_weights
from offload.host_registration import PAGE_BYTES
from offload.layout import FlatLayout
from offload.legality import Combination, check_combination
from offload.residency import NUM_SLOTS, LayerPart, ResidencyPlan, plan_residency
from offload.streamed_model import Transfer
from worldmodel.checkpoint.inspection import CONTEXT_BYTES
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.layer_parts import CAMERA, USES_PER_CHUNK
from worldmodel.lingbot.streamed_layers import LayerForm
from worldmodel.offload_settings import OffloadSettings
from worldmodel.wan.precision import PrecisionPlan

WORKING_BYTES = 3 * 2**30 // 2
"""Workspaces of the libraries and what the allocator can't use; an estimate: what a device kept
unused was 1.2 GiB before its memory could grow in place. Activations are among the sessions' bytes,
see `memory.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNumbers:
    """What is known of a device before the layers' weights are placed. `free_bytes` of None: nobody measured it.

    `free_bytes` is what is free beside what is loaded; `loaded_bytes` counts weights outside of the layers.
    """

    loaded_bytes: int
    free_bytes: int | None
    gpu_memory_fraction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """All that is decided before a layer is loaded: which layers stay, what memory the others are in, how they travel.

    `transfer_reason` says why weights are staged though something else was wished for, None if nothing was.
    `locked_bytes` is what page-locking the streamed layers takes, see `locked_bytes()`; `budget` says what layers may
    take of the device, and what the rest is for.
    """

    residency: ResidencyPlan
    host: HostPlan
    transfer: Transfer
    transfer_reason: str | None
    locked_bytes: int
    budget: str

    def describe(self) -> str:
        """Say the plan for people, with what its bounds do not count."""
        host = "; ".join([f"from {self.host.kind.value} memory", *self.host.reasons])
        return "; ".join(text for text in (self.residency.describe(), host, self._transfer_text(), self.budget) if text)

    def _transfer_text(self) -> str:
        if self.transfer is Transfer.STAGED:
            return "staged" if self.transfer_reason is None else f"staged; {self.transfer_reason}"
        least = "" if self.host.kind is HostKind.ORDINARY else "at least "
        locked = f"{least}{self.locked_bytes / 1e9:.1f} GB page-locked"
        return f"registered, {locked}, not counting a streamed text encoder and a parked VAE"


def plan_stream(
    form: LayerForm,
    stored: Mapping[str, Sequence[StoredTensor]],
    settings: OffloadSettings,
    plan: PrecisionPlan,
    kv: KVSpec,
    numbers: DeviceNumbers,
    device: torch.device,
) -> StreamPlan:
    """Decide everything. Loads, reads and changes nothing; `stored` is what the checkpoint has of the layers.

    Raises `LoadFailed` for a budget that is too small, `PlanRefused` for what can't be had and may not be replaced.
    """
    residency = plan_layers(form.layouts, form.num_layers, settings, kv, numbers)
    check_settings(settings, plan, device)
    host = _plan_host(form, stored, settings)
    reason = _registration_problem(form.layouts, residency, host.kind, settings, device)
    if reason is not None and not settings.falls_back:
        raise PlanRefused(f"transfer {settings.transfer!r}", reason)
    transfer = Transfer(settings.transfer) if reason is None else Transfer.STAGED
    budget_bytes, explanation = weights_budget(settings, kv, numbers)
    return StreamPlan(
        residency=residency,
        host=host,
        transfer=transfer,
        transfer_reason=reason,
        locked_bytes=locked_bytes(form.layouts, residency, host.kind) if transfer is Transfer.REGISTERED else 0,
        budget="" if budget_bytes is None else f"layers may take {_gib(budget_bytes)}: {explanation}",
    )


def _plan_host(form: LayerForm, stored: Mapping[str, Sequence[StoredTensor]], settings: OffloadSettings) -> HostPlan:
    """Decide what memory the layers are in; of a cache only its place is looked at. Raises `PlanRefused`."""
    host = plan_host_weights(
        HostKind(settings.host),
        form.all_recipes(),
        stored,
        cache_folder=Path(settings.cache_folder) if settings.cache_folder else None,
        falls_back=settings.falls_back,
    )
    if host.kind is HostKind.RUNTIME_CACHE:
        try:
            CacheFolder(Path(settings.cache_folder))
        except CacheRootRefused as error:
            return without_host(error, settings)
    return host


def without_host(error: OffloadError, settings: OffloadSettings) -> HostPlan:
    """Return the plan that takes the place of host memory that can't be had. Raises `PlanRefused` if none may."""
    if not settings.falls_back:
        raise PlanRefused(f"host weights {settings.host!r}", str(error)) from error
    return HostPlan(kind=HostKind.ORDINARY, bindings={}, reasons=(str(error),))


def buffers_bytes(layouts: Mapping[str, FlatLayout], num_layers: int) -> int:
    """Return the least that streamed layers take of the device: the buffers of all parts."""
    return min(NUM_SLOTS, num_layers) * sum(layout.num_bytes for layout in layouts.values())


def locked_bytes(layouts: Mapping[str, FlatLayout], residency: ResidencyPlan, host: HostKind) -> int:
    """Return what page-locking the streamed layers takes: of mapped files at least, of other memory exactly.

    How tensors share pages in a file is known when it is mapped.
    """
    total_bytes = 0
    for name, part in residency.parts.items():
        if host is HostKind.ORDINARY:
            layer_bytes = -(-layouts[name].num_bytes // PAGE_BYTES) * PAGE_BYTES
        else:
            layer_bytes = sum(place.tensor.num_bytes for place in layouts[name].places)
        total_bytes += len(part.streamed) * layer_bytes
    return total_bytes


def _registration_problem(
    layouts: Mapping[str, FlatLayout],
    residency: ResidencyPlan,
    host: HostKind,
    settings: OffloadSettings,
    device: torch.device,
) -> str | None:
    """Return why weights can't travel from page-locked memory as wished, None if they may or need not."""
    if settings.transfer != Transfer.REGISTERED:
        return None
    if device.type != "cuda":
        return f"{device} is no CUDA device"
    needed_bytes = locked_bytes(layouts, residency, host)
    if settings.registered_bytes is not None and needed_bytes > settings.registered_bytes:
        least = "" if host is HostKind.ORDINARY else " at least"
        return (
            f"registered_bytes is {settings.registered_bytes}, the streamed layers would lock {needed_bytes} "
            f"bytes{least}"
        )
    return None


def plan_layers(
    layouts: Mapping[str, FlatLayout],
    num_layers: int,
    settings: OffloadSettings,
    kv: KVSpec,
    numbers: DeviceNumbers,
) -> ResidencyPlan:
    """Decide which layers stay. Raises `LoadFailed` with all numbers if not even the buffers fit."""
    parts = [
        LayerPart(name=name, layer_bytes=layout.num_bytes, uses_per_chunk=_uses(name, settings))
        for name, layout in layouts.items()
    ]
    budget_bytes, explanation = weights_budget(settings, kv, numbers)
    try:
        return plan_residency(parts, num_layers, budget_bytes)
    except BudgetTooSmall as error:
        raise LoadFailed(
            f"streamed weights do not fit: {error.required_bytes} bytes ({_gib(error.required_bytes)}) of buffers are "
            f"needed, {_left_text(error.budget_bytes)}: {explanation}",
            code="out_of_memory",
            field="offload",
        ) from error


def _uses(part: str, settings: OffloadSettings) -> float:
    is_repeated = part == CAMERA and settings.camera_modulation == "per_layer"
    return math.ceil(max(USES_PER_CHUNK.values())) if is_repeated else USES_PER_CHUNK[part]


def check_settings(settings: OffloadSettings, plan: PrecisionPlan, device: torch.device) -> None:
    """Refuse settings that exclude each other, unless they may be replaced. Raises `IllegalCombination`."""
    if settings.falls_back:
        return
    check_combination(
        Combination(
            host=HostKind(settings.host),
            transfer=Transfer(settings.transfer),
            is_cuda=device.type == "cuda",
            quantizes=plan.quantizes_linears,
        )
    )


def weights_budget(settings: OffloadSettings, kv: KVSpec, numbers: DeviceNumbers) -> tuple[int | None, str]:
    """Return the bytes that weights may take, None for any, and where they come from."""
    limits: list[tuple[int, str]] = []
    sessions_bytes = kv.required_bytes(kv.requested_sessions)
    if kv.requested_sessions > 1:
        # One session is served whatever the fraction.
        sessions_bytes = int(sessions_bytes / numbers.gpu_memory_fraction)
    reserved_bytes = sessions_bytes + WORKING_BYTES
    sessions = "one session" if kv.requested_sessions == 1 else f"{kv.requested_sessions} sessions"
    reserved = f"{_gib(sessions_bytes)} for {sessions} and {_gib(WORKING_BYTES)} of working memory"
    if settings.resident_bytes is not None:
        limits.append((settings.resident_bytes, f"resident_bytes is {_gib(settings.resident_bytes)}"))
    if numbers.free_bytes is not None:
        left = numbers.free_bytes - reserved_bytes
        limits.append((left, f"{_gib(numbers.free_bytes)} are free, less {reserved}"))
    if settings.device_bytes is not None:
        left = settings.device_bytes - CONTEXT_BYTES - numbers.loaded_bytes - reserved_bytes
        taken = f"{_gib(CONTEXT_BYTES)} of CUDA context, {_gib(numbers.loaded_bytes)} of other weights"
        limits.append((left, f"device_bytes is {_gib(settings.device_bytes)}, less {taken}, {reserved}"))
    return min(limits) if limits else (None, "")


def _left_text(num_bytes: int) -> str:
    if num_bytes >= 0:
        return f"{num_bytes} ({_gib(num_bytes)}) are left"
    return f"and {-num_bytes} bytes ({_gib(-num_bytes)}) are missing already before them"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
