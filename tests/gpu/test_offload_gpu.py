"""Streamed weights on a CUDA device: the real driver locks mapped files, and the bits are those of resident weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.copy_queue import CudaQueue
from offload.cuda_runtime import SUCCESS, LoadedCudaRuntime
from offload.errors import RegistrationFailed
from offload.host_registration import PAGE_BYTES, RegistrationLimits, register_pages
from offload.host_weights import HostPart, HostPiece, own_part
from offload.layout import TensorSpec, flat_layout
from offload.mapped_memory import MappedMemory
from offload.parked_module import ParkedModule
from offload.streamer import LayerStreamer
from offload.transports import DirectCopies, StagedCopies
from tests.support.lingbot_streaming import resident, rollout, streamed, write_checkpoint
from worldmodel.checkpoint.stored_component import StoredComponent
from worldmodel.lingbot.streaming import use_growing_segments
from worldmodel.offload_settings import OffloadSettings

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
NUM_BYTES = 64 * 1024 * 1024


@pytest.fixture
def runtime() -> LoadedCudaRuntime:
    return LoadedCudaRuntime(DEVICE)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MappedMemory]:
    file = tmp_path / "weights"
    file.write_bytes(torch.arange(NUM_BYTES // 4, dtype=torch.int32).numpy().tobytes())
    mapped = MappedMemory.of_file(file)
    yield mapped
    mapped.close()


def whole(memory: MappedMemory) -> HostPart:
    return HostPart(pieces=(HostPiece(memory=memory, start_byte=0, num_bytes=memory.num_bytes, buffer_start_byte=0),))


def test_a_mapped_file_is_locked_copied_and_unlocked(runtime: LoadedCudaRuntime, memory: MappedMemory) -> None:
    part = whole(memory)
    assert not runtime.is_locked(memory.address)

    registration = register_pages(runtime, part.pieces, RegistrationLimits())
    assert runtime.is_locked(memory.address)
    buffer = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=DEVICE)
    DirectCopies().copy(part, buffer)
    torch.cuda.synchronize()
    registration.close()

    assert torch.equal(buffer.cpu(), memory.bytes)
    assert not runtime.is_locked(memory.address)


def test_an_error_of_the_driver_is_not_left_to_torch(runtime: LoadedCudaRuntime, memory: MappedMemory) -> None:
    assert runtime.register(memory.address, PAGE_BYTES, is_read_only=True) == SUCCESS
    assert runtime.register(memory.address, PAGE_BYTES, is_read_only=True) != SUCCESS
    assert torch.ones(4, device=DEVICE).sum().item() == 4
    assert runtime.unregister(memory.address) == SUCCESS
    code = runtime.unregister(memory.address)
    assert code != SUCCESS
    assert "CUDA error" in runtime.error_text(code)
    assert torch.ones(4, device=DEVICE).sum().item() == 4


def test_a_range_that_is_locked_already_rolls_the_others_back(runtime: LoadedCudaRuntime, memory: MappedMemory) -> None:
    second = memory.address + 8 * PAGE_BYTES
    assert runtime.register(second, PAGE_BYTES, is_read_only=True) == SUCCESS
    pieces = [
        HostPiece(memory=memory, start_byte=start * PAGE_BYTES, num_bytes=10, buffer_start_byte=0) for start in (0, 8)
    ]

    with pytest.raises(RegistrationFailed):
        register_pages(runtime, pieces, RegistrationLimits())

    assert not runtime.is_locked(memory.address)
    assert runtime.unregister(second) == SUCCESS


@pytest.mark.parametrize("is_direct", [True, False])
def test_no_layer_is_seen_before_it_is_copied_or_after_it_is_overwritten(
    runtime: LoadedCudaRuntime, is_direct: bool
) -> None:
    layout = flat_layout([TensorSpec(name="weight", dtype=torch.float32, shape=(1024, 4096))])
    layers = [torch.full((1024, 4096), float(index)) for index in range(7)]
    host = {index: own_part(layout, {"weight": layer}) for index, layer in enumerate(layers) if index != 3}
    registration = register_pages(runtime, [p for part in host.values() for p in part.pieces], RegistrationLimits())
    transport = DirectCopies() if is_direct else StagedCopies(DEVICE, staging_bytes=2**20)
    streamer = LayerStreamer(layout, host, transport, CudaQueue(torch.cuda.Stream(DEVICE), 2), DEVICE)
    product = torch.ones(4096, 4096, device=DEVICE) / 4096
    results = []
    for _ in range(20):
        for index in range(7):
            with streamer.layer(index):
                if index != 3:
                    # Long enough that the host is ahead by whole layers.
                    results.append((index, (streamer.tensors(index)["weight"] @ product).mean()))
    assert all(result.item() == pytest.approx(index) for index, result in results)
    streamer.close()
    registration.close()


@pytest.fixture(scope="module")
def component(tmp_path_factory: pytest.TempPathFactory) -> StoredComponent:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), torch.bfloat16)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        OffloadSettings(weights="streamed", resident_bytes=600_000),
        OffloadSettings(weights="streamed", resident_bytes=400_000, transfer="staged"),
        OffloadSettings(weights="streamed", resident_bytes=400_000, host="checkpoint_mmap"),
    ],
)
def test_streamed_bits_are_those_of_resident_weights(
    component: StoredComponent, settings: OffloadSettings, is_fused: bool
) -> None:
    expected = rollout(*resident(component, "bf16", is_fused=is_fused, device=DEVICE))

    model, forward, weights, _ = streamed(component, "bf16", settings, is_fused=is_fused, device=DEVICE)
    found = rollout(model, forward)

    assert weights.residency.copied_bytes_per_chunk > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    weights.close()
    assert weights.locked_bytes == 0


def test_memory_of_a_worker_that_streams_grows_in_place(caplog: pytest.LogCaptureFixture) -> None:
    try:
        use_growing_segments(DEVICE)
        # More than earlier tests can have left in pieces of fixed size.
        torch.cuda.empty_cache()
        taken = torch.ones(2**29, dtype=torch.uint8, device=DEVICE)
        [segment] = [
            each
            for each in torch.cuda.memory_snapshot()
            if each["address"] <= taken.data_ptr() < each["address"] + each["total_size"]
        ]
        assert segment["is_expandable"]
        assert caplog.text == ""
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_a_parked_module_computes_the_same(tmp_path: Path) -> None:
    module = torch.nn.Conv2d(8, 8, 3).to(DEVICE, memory_format=torch.channels_last).requires_grad_(False)
    image = torch.randn(1, 8, 32, 32, device=DEVICE)
    expected = module(image)
    parked = ParkedModule(module, DEVICE)
    for _ in range(3):
        with parked.on_device():
            assert torch.equal(module(image), expected)
