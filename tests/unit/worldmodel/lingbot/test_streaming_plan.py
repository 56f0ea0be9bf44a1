"""What is decided of streamed layers before one is loaded: numbers only, no device is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcache.spec import KVSpec
from offload.errors import PlanRefused
from offload.host_plan import HostKind
from offload.host_registration import PAGE_BYTES
from offload.residency import plan_residency
from offload.streamed_model import Transfer
from tests.support.lingbot_streaming import HEIGHT, NUM_LAYERS, WIDTH, config
from tests.support.weight_cache import open_folder
from worldmodel.checkpoint.inspection import CONTEXT_BYTES
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.streamed_layers import LayerForm
from worldmodel.lingbot.streaming_plan import (
    WORKING_BYTES,
    DeviceNumbers,
    StreamPlan,
    buffers_bytes,
    locked_bytes,
    plan_layers,
    plan_stream,
)
from worldmodel.lingbot.transformer import kv_geometry
from worldmodel.offload_settings import OffloadSettings
from worldmodel.wan.precision import precision_plan

RESIDENT_BYTES = 600_000
FP32 = precision_plan("fp32")
FORM = LayerForm(config(), FP32, None)


def plan(device: str = "cuda", **settings: object) -> StreamPlan:
    wish = OffloadSettings(weights="streamed", resident_bytes=RESIDENT_BYTES, **settings)  # type: ignore[arg-type]
    numbers = DeviceNumbers(loaded_bytes=0, free_bytes=None)
    return plan_stream(FORM, {}, wish, FP32, kv(), numbers, torch.device(device))


def kv() -> KVSpec:
    return kv_geometry(config(), FP32, latent_height=HEIGHT, latent_width=WIDTH)


def least_locked_bytes(host: HostKind) -> int:
    wish = OffloadSettings(weights="streamed", resident_bytes=RESIDENT_BYTES)
    residency = plan_layers(FORM.layouts, NUM_LAYERS, wish, kv(), DeviceNumbers(loaded_bytes=0, free_bytes=None))
    return locked_bytes(FORM.layouts, residency, host)


@pytest.mark.parametrize(
    ("host", "least"), [(HostKind.ORDINARY, ""), (HostKind.RUNTIME_CACHE, " at least")], ids=["ordinary", "cache"]
)
def test_a_bound_of_locked_memory_that_is_too_small_is_found_before_loading(
    host: HostKind, least: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worldmodel.lingbot.streaming_plan.CacheFolder", open_folder)
    needed = least_locked_bytes(host)
    settings = {"host": host.value, "cache_folder": str(tmp_path) if host is HostKind.RUNTIME_CACHE else ""}

    enough = plan(**settings, registered_bytes=needed)
    with pytest.raises(PlanRefused, match=rf"registered_bytes is {needed - 1}, .* lock {needed} bytes{least}$"):
        plan(**settings, registered_bytes=needed - 1)
    replaced = plan(**settings, registered_bytes=needed - 1, on_unavailable="ordinary")

    assert (enough.transfer, enough.transfer_reason, enough.locked_bytes) == (Transfer.REGISTERED, None, needed)
    shown = (
        f"registered, {least.lstrip()}{' ' if least else ''}{needed / 1e9:.1f} GB page-locked, not counting a stream"
    )
    assert shown in enough.describe()
    assert (replaced.transfer, replaced.locked_bytes) == (Transfer.STAGED, 0)
    assert f"staged; registered_bytes is {needed - 1}" in replaced.describe()


def test_a_cache_that_cannot_be_where_it_is_wished_is_found_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.cache_folder.file_system", lambda path, mounts: "tmpfs")
    wish = {"host": "runtime_cache", "cache_folder": str(tmp_path / "cache")}

    with pytest.raises(PlanRefused, match=r"host weights 'runtime_cache' can't be used: .*cache: is on tmpfs"):
        plan(**wish)
    replaced = plan(**wish, on_unavailable="ordinary")

    assert replaced.host.kind is HostKind.ORDINARY
    assert "from ordinary memory; " in replaced.describe()
    assert "is on tmpfs" in replaced.describe()
    assert not (tmp_path / "cache").exists()


def test_what_page_locking_takes_is_of_streamed_layers_in_whole_pages() -> None:
    parts = [part.part for part in plan().residency.parts.values()]
    all_streamed = plan_residency(parts, NUM_LAYERS, sum(2 * part.layer_bytes for part in parts))

    taken = locked_bytes(FORM.layouts, all_streamed, HostKind.ORDINARY)

    assert taken == NUM_LAYERS * sum(-(-part.layer_bytes // PAGE_BYTES) * PAGE_BYTES for part in parts)
    assert locked_bytes(FORM.layouts, plan_residency(parts, NUM_LAYERS, None), HostKind.ORDINARY) == 0


def test_staged_weights_lock_nothing_that_counts() -> None:
    assert plan("cpu", transfer="staged").transfer_reason is None


def test_without_a_cuda_device_weights_are_staged_where_they_may_be() -> None:
    found = plan("cpu", on_unavailable="ordinary")
    assert (found.transfer, found.transfer_reason) == (Transfer.STAGED, "cpu is no CUDA device")


@pytest.mark.parametrize("bound", ["device_bytes", "free_bytes"])
def test_a_bound_of_the_device_leaves_to_layers_what_nothing_else_takes(bound: str) -> None:
    """To the byte: with one less than the buffers take, nothing starts."""
    sessions_bytes = kv().required_bytes(1)
    least = buffers_bytes(FORM.layouts, NUM_LAYERS)

    def left(num_bytes: int) -> StreamPlan:
        device_bytes = num_bytes + sessions_bytes + WORKING_BYTES
        wish, numbers = OffloadSettings(weights="streamed"), DeviceNumbers(loaded_bytes=1000, free_bytes=device_bytes)
        if bound == "device_bytes":
            wish = OffloadSettings(weights="streamed", device_bytes=device_bytes + 1000 + CONTEXT_BYTES)
            numbers = DeviceNumbers(loaded_bytes=1000, free_bytes=device_bytes + 1)
        return plan_stream(FORM, {}, wish, FP32, kv(), numbers, torch.device("cuda"))

    enough = left(least)
    assert enough.residency.device_bytes == least
    assert f"layers may take 0.00 GiB: {'device_bytes is' if bound == 'device_bytes' else ''}" in enough.describe()
    assert ("GiB of CUDA context, 0.00 GiB of other weights" in enough.describe()) == (bound == "device_bytes")
    assert "for one session and 1.50 GiB of working memory" in enough.describe()
    with pytest.raises(LoadFailed, match=rf"streamed weights do not fit: {least} bytes .* {least - 1} .* are left"):
        left(least - 1)


@pytest.mark.parametrize(("sessions", "fraction"), [(1, 0.5), (2, 1.0), (2, 0.5)])
def test_layers_leave_several_sessions_so_much_that_their_fraction_of_it_holds_them(
    sessions: int, fraction: float
) -> None:
    """One session is served whatever the fraction."""
    spec = replace(kv(), requested_sessions=sessions)
    sessions_bytes = spec.required_bytes(sessions)
    least = buffers_bytes(FORM.layouts, NUM_LAYERS)
    needed = least + WORKING_BYTES + (2 * sessions_bytes if (sessions, fraction) == (2, 0.5) else sessions_bytes)

    def left(free_bytes: int) -> StreamPlan:
        numbers = DeviceNumbers(loaded_bytes=0, free_bytes=free_bytes, gpu_memory_fraction=fraction)
        return plan_stream(FORM, {}, OffloadSettings(weights="streamed"), FP32, spec, numbers, torch.device("cuda"))

    assert left(needed).residency.device_bytes == least
    with pytest.raises(LoadFailed, match="streamed weights do not fit"):
        left(needed - 1)
    with pytest.raises(LoadFailed, match=r"and 1073741824 bytes \(1\.00 GiB\) are missing already before them: "):
        left(needed - least - 2**30)
