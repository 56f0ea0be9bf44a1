"""Forwards captured in CUDA graphs: what a worker captures while it warms up, and replays afterwards.

A call of a forward has arguments (tensors of this call), constants (tensors of the model, one of a few) and K/V of a
chunk. Captured, it reads all three at fixed addresses: a `FixedValue` each, and an `IndexedKV`. The plain call is the
same function on the caller's own objects. Knows no model.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from kvcache.attention_indexed import IndexedAttention, indexed_attention, why_not_indexed
from kvcache.indexed import IndexableKV, IndexedKV
from kvcache.spec import KVSpec, Storage
from worldmodel.errors import LoadFailed
from worldmodel.kernels.names import AttentionChoice, GraphChoice
from worldmodel.wan.fixed_value import FixedValue, map_tensors

logger = logging.getLogger(__name__)

OutT = TypeVar("OutT")

WARM_UP_RUNS = 2
"""Runs before a capture: what a first run allocates or compiles must not be part of the graph."""

TIMED_RUNS = 5

MIN_GAIN = 0.04
"""What a graph must save of a plain call to be kept: it holds memory of its own, and timings vary by 1 to 2 %."""

GRAPH_BASE_BYTES = 128 * 2**20
"""Estimate of what graphs hold whatever they compute, workspaces of matrix products first; for the memory plan only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording(Generic[OutT]):
    """A captured call: `replay` runs it again, and the result is in `out`, until the next replay of any recording."""

    replay: Callable[[], None]
    out: OutT
    num_bytes: int


class Recorder(Protocol):
    """What captures calls."""

    def record(self, call: Callable[[], OutT]) -> Recording[OutT]:
        """Capture a call whose launches depend on nothing but tensors that stay where they are."""
        ...

    def forget(self) -> None:
        """Let go of all recordings; none may be replayed any more."""
        ...

    def time_ms(self, call: Callable[[], object]) -> float:
        """Return how long a call takes, waiting for the device."""
        ...


class CudaRecorder:
    """Captures in CUDA graphs that share one pool of memory: recordings are replayed one after the other.

    All live until `forget`, also those that nobody replays. One stream warms up and captures, since memory of a pool is
    used again on the same stream only. The workspaces of matrix products belong to that stream; versions of torch that
    give them back when one of its graphs ends would leave the others writing to memory that is no longer theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(self, call: Callable[[], OutT]) -> Recording[OutT]:
        before_bytes = self._reserved_bytes()
        here = torch.cuda.current_stream(self._device)
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UP_RUNS):
                call()
        here.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of a worker may talk to the device meanwhile.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local")
        with _without_collection(), capture:
            out = call()
        self._graphs.append(graph)
        return Recording(replay=graph.replay, out=out, num_bytes=self._reserved_bytes() - before_bytes)

    def forget(self) -> None:
        self._graphs.clear()
        torch.cuda.empty_cache()

    def _reserved_bytes(self) -> int:
        """Return what is held once nothing is kept for later."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def time_ms(self, call: Callable[[], object]) -> float:
        call()
        times_ms = []
        for _ in range(TIMED_RUNS):
            torch.cuda.synchronize(self._device)
            started_s = time.perf_counter()
            call()
            torch.cuda.synchronize(self._device)
            times_ms.append(1000.0 * (time.perf_counter() - started_s))
        return sorted(times_ms)[TIMED_RUNS // 2]


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect garbage now and none within: what it frees, events and graphs too, would be freed during a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCall(Generic[OutT]):
    """One call of a forward, which may be captured.

    `name` is the same for calls with the same shapes, and shown to operators. `run` gets arguments, constants and K/V,
    either those given here or others that stand for them.
    """

    name: str
    run: Callable[[Any, Any, Any], OutT]
    arguments: object
    constants: object
    kv: IndexableKV
    num_registers: int = 0
    biased_stores: tuple[str, ...] = ()

    def plain(self) -> OutT:
        """Run it as it is."""
        return self.run(self.arguments, self.constants, self.kv)


class _Captured(Generic[OutT]):
    """A recording, and the places that it reads."""

    def __init__(self, call: ForwardCall[OutT], kv: KVSpec, attention: IndexedAttention, recorder: Recorder) -> None:
        self._arguments = FixedValue(call.arguments)
        self._constants = FixedValue(call.constants)
        self._kv = IndexedKV(kv, attention, call.kv, num_registers=call.num_registers, biased_stores=call.biased_stores)
        self._recording = recorder.record(
            lambda: call.run(self._arguments.value, self._constants.value, self._kv),
        )

    @property
    def recording_bytes(self) -> int:
        return self._recording.num_bytes

    @property
    def num_bytes(self) -> int:
        fixed = (self._arguments, self._constants, self._kv)
        return self._recording.num_bytes + sum(each.num_bytes for each in fixed)

    def __call__(self, call: ForwardCall[OutT]) -> OutT:
        """Run a call of the same name. The result is the caller's."""
        self._arguments.load(call.arguments)
        self._constants.load_constant(call.constants)
        self._kv.show(call.kv)
        self._recording.replay()
        return map_tensors(self._recording.out, torch.clone)


def create_graphs(
    choice: GraphChoice,
    kv: KVSpec,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    refusal: str | None = None,
) -> CapturedForwards | str:
    """Return what captures the forwards of a worker, or why there is nothing to capture them with.

    `attention` names what attends in them, `dtype` is that of K/V, `refusal` is a reason of the model's own. Raises
    `LoadFailed` naming the option if graphs were asked for and can't be had.
    """
    if choice is GraphChoice.OFF:
        return "off"
    reason = refusal or why_no_graphs(kv, device) or why_not_indexed(attention, dtype)
    if reason is None:
        return CapturedForwards(choice, kv, indexed_attention(attention), CudaRecorder(device))
    if choice is GraphChoice.ON:
        raise _graphs_refused(reason)
    return reason


def check_graphs(
    choice: GraphChoice,
    kv: KVSpec,
    attention: AttentionChoice,
    dtype: torch.dtype,
    device: torch.device,
    *,
    refusal: str | None = None,
) -> None:
    """Refuse what `create_graphs` would refuse, before there are weights; what `auto` will attend with is not known."""
    if choice is not GraphChoice.ON:
        return
    reason = refusal or why_no_graphs(kv, device)
    if reason is None and attention is not AttentionChoice.AUTO:
        reason = why_not_indexed(attention.value, dtype)
    if reason is not None:
        raise _graphs_refused(reason)


def may_be_captured(
    choice: GraphChoice, kv: KVSpec, device: torch.device | None, *, refusal: str | None = None
) -> bool:
    """Tell whether a worker counts the memory of graphs before it knows its attention; without a device, any GPU's."""
    reason = refusal or why_no_graphs(kv, device or torch.device("cuda"))
    return choice is not GraphChoice.OFF and reason is None


def _graphs_refused(reason: str) -> LoadFailed:
    """Say that graphs were asked for and can't be had."""
    return LoadFailed(f"graphs 'on' can't be had: {reason}", field="graphs")


def why_no_graphs(kv: KVSpec, device: torch.device) -> str | None:
    """Return why forwards can't be captured whatever attends, or None."""
    if device.type != "cuda":
        return f"they need a CUDA device, the model is on {device.type!r}"
    if kv.effective_storage is not Storage.EXTENTS:
        return "they need a bounded window, whose K/V lies in extents"
    return None


class CapturedForwards:
    """Every captured forward of a worker, by name. One that has a new name is captured until `seal` is called."""

    def __init__(self, choice: GraphChoice, kv: KVSpec, attention: IndexedAttention, recorder: Recorder) -> None:
        if choice is GraphChoice.OFF:
            raise ValueError("graphs: expected 'auto' or 'on', got 'off'")
        self._choice = choice
        self._kv = kv
        self._attention = attention
        self._recorder = recorder
        self._is_sealed = False
        self._captured: dict[str, _Captured[Any] | None] = {}
        self._dropped_bytes = 0
        self._said: list[str] = []

    @property
    def description(self) -> str:
        """What is captured and what that gained, for operators."""
        return f"graphs {', '.join(self._said) or 'none'}"

    @property
    def num_bytes(self) -> int:
        """Bytes that graphs and what they read hold on the device."""
        return self._dropped_bytes + sum(each.num_bytes for each in self._captured.values() if each is not None)

    @property
    def has_any(self) -> bool:
        """Whether a forward is captured and kept."""
        return any(each is not None for each in self._captured.values())

    def seal(self) -> None:
        """Capture no more: calls with another name run plain from now on.

        If no graph is kept nothing is held, but capacity stays as it was planned: graphs hold the addresses of K/V, so
        that its storage is there before the first of them is timed.
        """
        self._is_sealed = True
        if self.has_any:
            return
        self._recorder.forget()
        self._dropped_bytes = 0
        if self._captured:
            logger.info("graphs: none was kept, the memory planned for them stays unused; 'off' plans without it")

    def __call__(self, call: ForwardCall[OutT]) -> OutT:
        """Run a call, captured if its name is."""
        if call.name not in self._captured:
            if self._is_sealed:
                return call.plain()
            self._captured[call.name] = self._capture(call)
        captured = self._captured[call.name]
        return call.plain() if captured is None else captured(call)

    def _capture(self, call: ForwardCall[OutT]) -> _Captured[OutT] | None:
        plain_ms = self._recorder.time_ms(call.plain)
        try:
            captured = _Captured(call, self._kv, self._attention, self._recorder)
        except Exception as error:  # Kernels that compile as they are captured fail with errors of their own.
            raise LoadFailed(
                f"graphs: {call.name} can't be captured, 'off' runs it without ({error})", field="graphs"
            ) from error
        graph_ms = self._recorder.time_ms(lambda: captured(call))
        is_kept = self._choice is GraphChoice.ON or graph_ms <= (1.0 - MIN_GAIN) * plain_ms
        times = f"{plain_ms:.2f} ms plain, {graph_ms:.2f} ms in a graph"
        self._said.append(f"{call.name} ({times})" if is_kept else f"not {call.name} ({times})")
        logger.info("graphs: %s: %s, %d bytes, kept: %s", call.name, times, captured.num_bytes, is_kept)
        if is_kept:
            return captured
        # Its graph lives on beside the others, in memory that later ones use too.
        self._dropped_bytes += captured.recording_bytes
        return None
