"""A whole model put in place and closed again, with a driver that only pretends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from offload.errors import OffloadError, PlanRefused, RollbackFailed
from offload.host_plan import Binding, HostKind, HostPlan, Recipe, StoredTensor
from offload.host_registration import RegistrationLimits, end_process
from offload.layout import FlatLayout, TensorSpec, flat_layout
from offload.residency import LayerPart, ResidencyPlan, plan_residency
from offload.sharded import RankGroups, Sharing
from offload.streamed_model import (
    StreamedModel,
    Transfer,
    TransferWish,
    full_name,
    make_ordinary,
    map_files,
    stream_model,
)
from tests.support.offload_cuda import FakeCudaRuntime, hang_in_the_driver

CPU = torch.device("cpu")
NUM_LAYERS = 6
LAYOUT = flat_layout([TensorSpec(name="weight", dtype=torch.float32, shape=(64, 64))])
PARTS = (
    LayerPart(name="forward", layer_bytes=LAYOUT.num_bytes, uses_per_chunk=5),
    LayerPart(name="camera", layer_bytes=LAYOUT.num_bytes, uses_per_chunk=1),
)
REGISTERED = TransferWish(transfer=Transfer.REGISTERED)


class Layers:
    """Implements `ModelLayers`: a weight for each part, whose value is the layer's number."""

    num_layers = NUM_LAYERS
    layouts: Mapping[str, FlatLayout] = {"forward": LAYOUT, "camera": LAYOUT}

    def __init__(self) -> None:
        self.bound: dict[tuple[int, str], Tensor] = {}

    def make(self, index: int) -> dict[str, dict[str, Tensor]]:
        return {part: {"weight": torch.full((64, 64), value(index, part))} for part in self.layouts}

    def bind(self, index: int, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.bound[index, part] = tensors["weight"]

    def recipes(self, index: int, part: str) -> Sequence[Recipe]:
        return ()


def value(index: int, part: str) -> float:
    return index + (0.5 if part == "camera" else 0.0)


def plan(num_resident: int) -> ResidencyPlan:
    return plan_residency(PARTS, NUM_LAYERS, (4 + num_resident) * LAYOUT.num_bytes)


def assert_right(layers: Layers, model: StreamedModel) -> None:
    for _ in range(2):
        for part in layers.layouts:
            for index in range(NUM_LAYERS):
                with model.weights(part).layer(index):
                    assert (layers.bound[index, part] == value(index, part)).all()


def mapped_plan(file: Path) -> HostPlan:
    """Write all tensors into a file and return the plan that binds them to it."""
    layers, bindings, content = Layers(), {}, b""
    for index in range(NUM_LAYERS):
        for part, tensors in layers.make(index).items():
            name = full_name(index, part, "weight")
            place = StoredTensor(key=name, file=file, start_byte=len(content), dtype=torch.float32, shape=(64, 64))
            bindings[name] = Binding(tensor=LAYOUT.places[0].tensor, stored=(place,))
            content += tensors["weight"].numpy().tobytes()
    file.write_bytes(content)
    return HostPlan(kind=HostKind.CHECKPOINT_MMAP, bindings=bindings)


@pytest.mark.parametrize("num_resident", [0, 1, 5, 20])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_every_layer_is_where_the_plan_says_and_right(tmp_path: Path, num_resident: int, is_mapped: bool) -> None:
    layers, residency, runtime = Layers(), plan(num_resident), FakeCudaRuntime()
    if is_mapped:
        host = map_files(layers, residency, mapped_plan(tmp_path / "weights"), CPU)
    else:
        host = make_ordinary(layers, residency)

    model = stream_model(layers, residency, host, REGISTERED, CPU, runtime)

    assert sum(len(parts) for parts in host.parts.values()) == sum(len(p.streamed) for p in residency.parts.values())
    assert model.locked_bytes == sum(runtime.locked.values()) >= residency.host_bytes
    assert all(read_only == is_mapped for read_only in runtime.read_only)
    assert_right(layers, model)
    model.close()
    assert runtime.locked == {}


def test_memory_is_unlocked_after_the_copies_and_before_it_is_unmapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, residency, runtime = Layers(), plan(0), FakeCudaRuntime()
    host = map_files(layers, residency, mapped_plan(tmp_path / "weights"), CPU, on_closed=lambda: order.append("gone"))
    model = stream_model(layers, residency, host, REGISTERED, CPU, runtime)
    order: list[str] = []
    for streamer in model._streamers.values():
        monkeypatch.setattr(streamer._queue, "drain", lambda: order.append("drained"), raising=False)
    unregister = runtime.unregister
    monkeypatch.setattr(runtime, "unregister", lambda address: order.append("unlocked") or unregister(address))
    [memory] = host.files
    close = memory.close
    monkeypatch.setattr(memory, "close", lambda: order.append("unmapped") or close())

    model.close()
    model.close()

    assert order[:5] == ["drained", "drained", "unlocked", "unmapped", "gone"]
    with pytest.raises(OffloadError, match="are closed"):
        _ = model.host


def test_memory_that_cannot_be_unlocked_stays_mapped_and_closing_again_goes_on(tmp_path: Path) -> None:
    layers, residency, runtime = Layers(), plan(0), FakeCudaRuntime()
    host = map_files(layers, residency, mapped_plan(tmp_path / "weights"), CPU)
    model = stream_model(layers, residency, host, REGISTERED, CPU, runtime)
    runtime.refuse_unregister = {0}

    with pytest.raises(RollbackFailed):
        model.close()
    assert host.files[0].num_bytes > 0

    model.close()
    assert runtime.locked == {}
    with pytest.raises(OffloadError, match="is closed"):
        _ = host.files[0].bytes


def test_a_mapping_that_is_viewed_is_not_given_back_and_closing_again_goes_on(tmp_path: Path) -> None:
    layers, residency, closed = Layers(), plan(0), []
    mapped = mapped_plan(tmp_path / "weights")
    host = map_files(layers, residency, mapped, CPU, on_closed=lambda: closed.append("gone"))
    model = stream_model(layers, residency, host, REGISTERED, CPU, FakeCudaRuntime())
    view = host.files[0].bytes[:5]

    with pytest.raises(OffloadError, match="still in use"):
        model.close()
    assert closed == []

    del view
    model.close()
    assert closed == ["gone"]
    with pytest.raises(OffloadError, match="is closed"):
        _ = host.files[0].bytes


def groups_of_one(leave: Callable[[], None] = lambda: None) -> RankGroups:
    """Return the groups of a rank that is alone, which nothing here asks."""
    group = cast("ProcessGroup", None)
    return RankGroups(sharing=Sharing(rank=0, num_ranks=1), device_group=group, host_group=group, leave=leave)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_groups_are_left_when_nothing_is_locked_or_mapped_any_more(tmp_path: Path, is_stuck: bool) -> None:
    layers, residency, runtime = Layers(), plan(0), FakeCudaRuntime()
    left: list[int] = []
    host = map_files(
        layers, residency, mapped_plan(tmp_path / "weights"), CPU, on_closed=lambda: left.append(len(runtime.locked))
    )
    groups = groups_of_one(lambda: left.append(-1))
    model = stream_model(layers, residency, host, REGISTERED, CPU, runtime, groups)
    if is_stuck:
        runtime.refuse_unregister = {0}
        with pytest.raises(RollbackFailed):
            model.close()
        assert left == []

    model.close()
    model.close()

    assert left == [0, -1]


def test_shared_weights_are_not_rearranged() -> None:
    layers, residency = Layers(), plan(0)
    wish = TransferWish(transfer=Transfer.STAGED)
    model = stream_model(layers, residency, make_ordinary(layers, residency), wish, CPU, groups=groups_of_one())

    with pytest.raises(OffloadError, match="shared out among ranks stay as they were planned"):
        model.rearrange(layers, plan(3), CPU)


@pytest.mark.parametrize("trouble", ["blind", "hangs"])
def test_a_driver_that_lies_or_hangs_stops_or_leads_to_staging(trouble: str) -> None:
    layers, residency, runtime = Layers(), plan(0), FakeCudaRuntime()
    host = make_ordinary(layers, residency)
    runtime.is_blind = trouble == "blind"
    if trouble == "hangs":
        runtime.resume.clear()
    limits = RegistrationLimits(timeout_s=0.0 if trouble == "hangs" else 60.0)

    with pytest.raises(PlanRefused, match="is not page-locked" if trouble == "blind" else "has not page-locked"):
        stream_model(layers, residency, host, TransferWish(transfer=Transfer.REGISTERED, limits=limits), CPU, runtime)
    wish = TransferWish(transfer=Transfer.REGISTERED, limits=limits, falls_back=True)
    model = stream_model(layers, residency, host, wish, CPU, runtime)

    assert model.transfer is Transfer.STAGED
    assert_right(layers, model)
    runtime.resume.set()
    for thread in threading.enumerate():
        if thread.name == "page locking":
            thread.join()
    assert runtime.locked == {}


@pytest.mark.parametrize("is_own", [False, True])
def test_page_locking_that_fails_stops_or_stages(tmp_path: Path, is_own: bool) -> None:
    layers, residency, runtime = Layers(), plan(0), FakeCudaRuntime()
    host = make_ordinary(layers, residency)
    runtime.refuse_register = {3}
    limits = RegistrationLimits(max_bytes=10) if is_own else RegistrationLimits()

    with pytest.raises(PlanRefused, match="transfer 'registered' can't be used"):
        stream_model(layers, residency, host, TransferWish(transfer=Transfer.REGISTERED, limits=limits), CPU, runtime)
    runtime.refuse_register = {7}
    wish = TransferWish(transfer=Transfer.REGISTERED, limits=limits, falls_back=True)
    model = stream_model(layers, residency, host, wish, CPU, runtime)

    assert runtime.locked == {}
    assert model.transfer is Transfer.STAGED
    assert model.describe().startswith("staged (")
    assert_right(layers, model)


def test_a_rollback_that_fails_is_never_replaced_by_staging() -> None:
    layers, residency, runtime = Layers(), plan(0), FakeCudaRuntime()
    runtime.refuse_register, runtime.refuse_unregister = {3}, {0}
    wish = TransferWish(transfer=Transfer.REGISTERED, falls_back=True)

    with pytest.raises(RollbackFailed):
        stream_model(layers, residency, make_ordinary(layers, residency), wish, CPU, runtime)


def test_a_late_driver_that_unlocks_nothing_ends_a_worker_that_stages_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, residency, runtime = Layers(), plan(0), FakeCudaRuntime()
    hang_in_the_driver(runtime, monkeypatch)
    runtime.refuse_unregister = {0}
    told: list[RollbackFailed] = []
    limits = RegistrationLimits(timeout_s=0.0)
    wish = TransferWish(transfer=Transfer.REGISTERED, limits=limits, falls_back=True, on_stuck=told.append)
    assert wish.on_stuck is not end_process is TransferWish(transfer=Transfer.REGISTERED).on_stuck

    model = stream_model(layers, residency, make_ordinary(layers, residency), wish, CPU, runtime)
    assert model.transfer is Transfer.STAGED
    runtime.resume.set()
    for thread in threading.enumerate():
        if thread.name == "page locking":
            thread.join()

    assert len(told) == len(runtime.locked) == 1


def test_a_plan_and_a_way_to_travel_can_change() -> None:
    layers, runtime = Layers(), FakeCudaRuntime()
    model = stream_model(layers, plan(0), make_ordinary(layers, plan(0)), REGISTERED, CPU, runtime)

    model.use_transfer(TransferWish(transfer=Transfer.STAGED), CPU)
    for num_resident in (3, 20, 0):
        model.rearrange(layers, plan(num_resident), CPU)
        assert_right(layers, model)

    assert runtime.locked == {}
