"""A stand-in for CUDA graphs on a CPU: a tape of operations that is replayed over the same memory.

Like a graph it repeats what was launched, with the addresses, shapes and numbers of the recording; Python code between
the operations does not run again. What would read a value on the host stops the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worldmodel.wan.captured import Recording
from worldmodel.wan.fixed_value import tensors_of

OutT = TypeVar("OutT")

BYTES_OF_A_TAPE = 1000
"""What a tape says that it holds."""

READS_ON_THE_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Tape(TorchDispatchMode):
    """Operations in order, and every tensor that was there before the first one, by the address of its memory."""

    steps: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    from_outside: dict[int, torch.Tensor] = field(default_factory=dict)
    made: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS_ON_THE_HOST:
            raise RuntimeError(f"{func} reads on the host, which no graph can")
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if address(tensor) not in self.made:
                self.from_outside[address(tensor)] = tensor
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            if address(tensor) not in self.from_outside:
                self.made[address(tensor)] = tensor
        self.steps.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.steps:
            given = {address(tensor) for tensor in _tensors((args, kwargs))}
            writes = any(each.alias_info and each.alias_info.is_write for each in func._schema.arguments)
            # What shares memory with what it was made from is a view. Schemas do not say: a reshape may copy.
            is_view = all(address(tensor) in given for tensor in _tensors(out))
            if is_view and not writes:
                continue
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if address(old) not in given:
                    old.copy_(new)


class TapeRecorder:
    """Records on tapes. `times_ms` are what `time_ms` says, the last one again and again."""

    def __init__(self, *times_ms: float) -> None:
        self.tapes: list[Tape] = []
        self.num_alive = 0
        self._times_ms = list(times_ms or (10.0, 1.0))
        self.num_timed = 0

    def record(self, call: Callable[[], OutT]) -> Recording[OutT]:
        call()
        tape = Tape()
        with tape:
            out = call()
        self.tapes.append(tape)
        self.num_alive += 1
        return Recording(replay=tape.replay, out=out, num_bytes=BYTES_OF_A_TAPE)

    def forget(self) -> None:
        self.num_alive = 0

    def time_ms(self, call: Callable[[], object]) -> float:
        call()
        self.num_timed += 1
        return self._times_ms[(self.num_timed - 1) % len(self._times_ms)]


class NotCaptured:
    """Runs a call over the same fixed places, operation by operation: what a graph must repeat bit by bit."""

    def record(self, call: Callable[[], OutT]) -> Recording[OutT]:
        out = call()

        def replay() -> None:
            for old, new in zip(tensors_of(out), tensors_of(call()), strict=True):
                old.copy_(new)

        return Recording(replay=replay, out=out, num_bytes=0)

    def forget(self) -> None:
        """Hold nothing."""

    def time_ms(self, call: Callable[[], object]) -> float:
        call()
        return 1.0


def no_capture(*_: object, **__: object) -> NoReturn:
    """Stand in for `torch.cuda.graph` once nothing may be captured any more."""
    raise AssertionError("a graph is captured in the middle of a session")
