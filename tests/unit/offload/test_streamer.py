"""Layers that visit the device: what a loop sees inside `with`, and in which order copies are asked for."""

from __future__ import annotations

import pytest
import torch

from offload.copy_queue import HostQueue
from offload.errors import CopyFailed
from offload.host_weights import HostPart, own_part
from offload.layout import TensorSpec, flat_layout
from offload.streamer import RESIDENT, LayerStreamer
from offload.transports import DirectCopies, StagedCopies, Transport
from tests.support.offload_cuda import RecordingQueue

LAYOUT = flat_layout([TensorSpec(name="weight", dtype=torch.float32, shape=(8, 9))])
CPU = torch.device("cpu")


def weights(num_layers: int) -> list[torch.Tensor]:
    return [torch.randn(8, 9) for _ in range(num_layers)]


def streamer(layers: list[torch.Tensor], streamed: list[int], transport: Transport, queue=None) -> LayerStreamer:  # type: ignore[no-untyped-def]
    host = {index: own_part(LAYOUT, {"weight": layers[index]}) for index in streamed}
    return LayerStreamer(LAYOUT, host, transport, queue or HostQueue(), CPU)


TRANSPORTS = {
    "direct": DirectCopies,
    "staged": lambda: StagedCopies(CPU, staging_bytes=1000),
    "staged in small runs": lambda: StagedCopies(CPU, staging_bytes=100),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("streamed", [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 3, 4], [4], [0, 1, 2, 3, 4]])
def test_every_loop_sees_every_layer_as_it_is(streamed: list[int], transport: str) -> None:
    layers = weights(5)
    source = streamer(layers, streamed, TRANSPORTS[transport]())
    places = {index: source.tensors(index)["weight"] for index in streamed}

    # Whole steps, a step that ends early (a failed tick), one that leaves the last layer out, and a backward one.
    for order in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3], [4, 3, 2, 1, 0]):
        for index in order:
            with source.layer(index):
                if index in places:
                    assert torch.equal(places[index], layers[index])


def test_the_addresses_of_a_layer_never_change() -> None:
    layers = weights(4)
    source = streamer(layers, [0, 1, 2, 3], DirectCopies())
    before = [source.tensors(index)["weight"].data_ptr() for index in range(4)]

    for index in range(4):
        with source.layer(index):
            pass

    assert [source.tensors(index)["weight"].data_ptr() for index in range(4)] == before
    assert before[0] == before[2] != before[1] == before[3]
    assert source.device_bytes == 2 * LAYOUT.num_bytes


def run(source: LayerStreamer, queue: RecordingQueue, order: list[int]) -> list[str]:
    queue.events.clear()
    for index in order:
        with source.layer(index):
            queue.events.append(f"compute {index}")
    return list(queue.events)


def test_the_next_layers_are_copied_while_one_computes_and_the_end_wraps_to_the_start() -> None:
    queue = RecordingQueue()
    source = streamer(weights(4), [0, 1, 2, 3], DirectCopies(), queue)

    first = run(source, queue, [0, 1, 2, 3])
    second = run(source, queue, [0, 1, 2, 3])

    assert first[:8] == ["copy 0", "wait 0", "compute 0", "used 0", "copy 1", "copy 0", "wait 1", "compute 1"]
    # Layers 0 and 1 were copied while 2 and 3 computed, so that a step begins without a wait for the link.
    assert second[:3] == ["wait 0", "compute 0", "used 0"]
    assert sum(event.startswith("copy") for event in second) == 4


def test_where_the_host_copies_itself_one_layer_is_prepared_at_a_time() -> None:
    queue = RecordingQueue()
    source = streamer(weights(4), [0, 1, 2, 3], StagedCopies(CPU), queue)

    run(source, queue, [0, 1, 2, 3])
    events = run(source, queue, [0, 1, 2, 3])

    assert events[:8] == ["wait 0", "compute 0", "used 0", "copy 1", "wait 1", "compute 1", "used 1", "copy 0"]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6])
def test_a_steady_step_copies_no_layer_twice(num_layers: int) -> None:
    queue = RecordingQueue()
    source = streamer(weights(num_layers), list(range(num_layers)), DirectCopies(), queue)
    order = list(range(num_layers))

    run(source, queue, order)
    copies = [event for event in run(source, queue, order) if event.startswith("copy")]

    # Of three layers the middle one has a buffer to itself.
    assert len(copies) == {1: 0, 2: 0, 3: 2}.get(num_layers, num_layers)


def test_a_buffer_is_never_copied_to_between_wait_and_use() -> None:
    queue = RecordingQueue()
    source = streamer(weights(6), [0, 2, 3, 5], DirectCopies(), queue)

    events = run(source, queue, [0, 1, 2, 3, 4, 5] * 3)

    held = None
    for event in events:
        word, _, number = event.partition(" ")
        if word == "wait":
            held = number
        elif word == "used":
            held = None
        elif word == "copy":
            assert number != held


class BrokenOnce:
    """Fails at the copy with a given number, in the middle of it."""

    num_ahead = 2

    def buffer_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def __init__(self, failing: int) -> None:
        self.failing = failing
        self.copies = 0

    def copy(self, part: HostPart, buffer: torch.Tensor) -> None:
        self.copies += 1
        if self.copies == self.failing:
            buffer.fill_(255)
            raise CopyFailed("the link broke")
        DirectCopies().copy(part, buffer)


@pytest.mark.parametrize("failing", [1, 2, 3, 5])
def test_after_a_copy_that_failed_the_next_step_is_right(failing: int) -> None:
    layers = weights(4)
    source = streamer(layers, [0, 1, 2, 3], BrokenOnce(failing))

    with pytest.raises(CopyFailed):
        run(source, RecordingQueue(), [0, 1, 2, 3])

    for index in range(4):
        with source.layer(index):
            assert torch.equal(source.tensors(index)["weight"], layers[index])


def test_an_error_of_the_loop_passes_and_marks_the_buffer_as_used() -> None:
    queue = RecordingQueue()
    source = streamer(weights(3), [0, 1, 2], DirectCopies(), queue)

    with pytest.raises(RuntimeError, match="out of memory"), source.layer(0):
        raise RuntimeError("out of memory")

    assert queue.events == ["copy 0", "wait 0", "used 0"]


def test_closing_waits_for_copies_under_way() -> None:
    queue = RecordingQueue()
    source = streamer(weights(3), [0, 1, 2], DirectCopies(), queue)

    source.close()

    assert queue.events == ["drain"]


def test_buffers_can_be_copied_to_in_and_outside_of_inference_mode() -> None:
    layers = weights(3)
    with torch.inference_mode():
        source = streamer([layer.clone() for layer in layers], [0, 1, 2], DirectCopies())
        for index in range(3):
            with source.layer(index):
                assert torch.equal(source.tensors(index)["weight"], layers[index])
    for index in range(3):
        with source.layer(index):
            assert torch.equal(source.tensors(index)["weight"], layers[index])


def test_resident_layers_need_nothing() -> None:
    with RESIDENT.layer(7):
        pass
