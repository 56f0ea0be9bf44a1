"""How many bytes of tensors that a computation makes are alive at once, on any device, the meta device included."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside `with`: follows every storage that an operation makes until it is gone; `peak_bytes` is the most seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What was there before is not counted, nor are views of it.
        self._follow((args, kwargs), is_new=False)
        out = func(*args, **(kwargs or {}))
        self._follow(out, is_new=True)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return out

    def _follow(self, values: Any, *, is_new: bool) -> None:
        for value in tree_leaves(values):
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            if storage._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes() if is_new else 0
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
