"""The attention kernels that may be there, and the choice among them: by name, or by timing them at the real shape.

`torch_sdpa` is the reference and always there. The others need CUDA; `flash3` needs the package `fa3-fwd`, `triton` and
`triton_paged` need Triton. A name that can't be had is an error, never another kernel.

Shapes: N query tokens, S key tokens, H heads, D head size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcache.attention import Attention, TorchAttention
from kvcache.errors import AttentionUnavailable

FLASH3_MODULE = "fa3_fwd_interface"
TIMED_CALLS = 5
FP8 = torch.float8_e4m3fn
HALF = (torch.bfloat16, torch.float16)


class AttentionBackend(StrEnum):
    """Which kernel computes attention. AUTO times those that are available and takes the fastest.

    TRITON_PAGED is taken by name only: it differs from TRITON by reading history in pages where they lie, which saves
    the gathered copy that an unlimited window costs and is not among what is timed. TORCH_SDPA and both of Triton take
    a bias per key, the others refuse one.
    """

    AUTO = "auto"
    TORCH_SDPA = "torch_sdpa"
    SDPA_FLASH = "sdpa_flash"
    SDPA_CUDNN = "sdpa_cudnn"
    FLASH3 = "flash3"
    TRITON = "triton"
    TRITON_PAGED = "triton_paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What attention is asked for in the steady state; kernels are timed at it."""

    num_queries: int
    num_keys: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    register_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAttention:
    """The attention to use. `timings_ms` has one median per backend that was timed, and is empty if none was."""

    attention: Attention
    timings_ms: tuple[tuple[str, float], ...] = ()

    def describe(self) -> str:
        """Return the backend's name, with the timings it was chosen by."""
        if not self.timings_ms:
            return self.attention.name
        shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.timings_ms)
        return f"{self.attention.name} ({shown})"


class SdpaAttention:
    """One named kernel of torch's `scaled_dot_product_attention`; it fails where that kernel can't run."""

    def __init__(self, backend: AttentionBackend) -> None:
        kernels = {
            AttentionBackend.SDPA_FLASH: SDPBackend.FLASH_ATTENTION,
            AttentionBackend.SDPA_CUDNN: SDPBackend.CUDNN_ATTENTION,
        }
        self.name = backend.value
        self._kernel = kernels[backend]

    def __call__(self, q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, logit_bias_S: Tensor | None = None) -> Tensor:
        _refuse_bias(self.name, logit_bias_S)
        q_1HND, k_1HSD, v_1HSD = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHD, k_SHD, v_SHD))
        with sdpa_kernel(self._kernel):
            out_1HND = F.scaled_dot_product_attention(q_1HND, k_1HSD, v_1HSD)
        return out_1HND.squeeze(0).transpose(0, 1)


class Flash3Attention:
    """FlashAttention-3 for Hopper GPUs, from the package `fa3-fwd`."""

    name = AttentionBackend.FLASH3.value

    def __init__(self) -> None:
        self._forward: Callable[..., Any] = importlib.import_module(FLASH3_MODULE).flash_attn_func

    def __call__(self, q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, logit_bias_S: Tensor | None = None) -> Tensor:
        _refuse_bias(self.name, logit_bias_S)
        if k_SHD.dtype == FP8 and q_NHD.dtype != FP8:
            raise ValueError(f"q: float8 keys need float8 queries, got {q_NHD.dtype}")
        out = self._forward(q_NHD[None], k_SHD[None], v_SHD[None])
        out_1NHD: Tensor = out[0] if isinstance(out, tuple) else out
        return out_1NHD[0]


def choose_attention(
    backend: AttentionBackend, shape: AttentionShape, *, time_ms: Callable[[Callable[[], object]], float] | None = None
) -> ChosenAttention:
    """Return the attention of a backend; AUTO times every available one at `shape` and takes the fastest.

    `time_ms` runs a call and says how long it takes; None times on the device. Raises AttentionUnavailable with the
    reason for a named backend that can't run here.
    """
    if backend is not AttentionBackend.AUTO:
        return ChosenAttention(attention=_create(backend, shape))
    names = available_backends(shape)
    if len(names) == 1:
        return ChosenAttention(attention=_create(names[0], shape))
    timings = _time_all(names, shape, time_ms or _device_ms)
    fastest = min(timings, key=lambda item: item[1])[0]
    return ChosenAttention(attention=_create(AttentionBackend(fastest), shape), timings_ms=timings)


def available_backends(shape: AttentionShape) -> tuple[AttentionBackend, ...]:
    """Return the backends that can run at a shape, the reference first, without what is taken by name only."""
    others = [backend for backend in AttentionBackend if backend not in (*_ALWAYS, AttentionBackend.TRITON_PAGED)]
    found = [backend for backend in others if _why_not(backend, shape) is None]
    return (AttentionBackend.TORCH_SDPA, *found)


_ALWAYS = (AttentionBackend.AUTO, AttentionBackend.TORCH_SDPA)


def _create(backend: AttentionBackend, shape: AttentionShape) -> Attention:
    reason = _why_not(backend, shape)
    if reason is not None:
        raise AttentionUnavailable(backend.value, reason=reason)
    match backend:
        case AttentionBackend.SDPA_FLASH | AttentionBackend.SDPA_CUDNN:
            return SdpaAttention(backend)
        case AttentionBackend.FLASH3:
            return Flash3Attention()
        case AttentionBackend.TRITON:
            rows: Attention = importlib.import_module("kvcache.attention_triton").TritonAttention()
            return rows
        case AttentionBackend.TRITON_PAGED:
            paged: Attention = importlib.import_module("kvcache.attention_triton").TritonPagedAttention()
            return paged
        case _:
            return TorchAttention()


def _why_not(backend: AttentionBackend, shape: AttentionShape) -> str | None:
    """Return why a backend can't run at a shape, or None."""
    if backend in _ALWAYS:
        return None
    if shape.device.type != "cuda":
        return f"it needs a CUDA device, the model is on {shape.device.type!r}"
    if backend in (AttentionBackend.TRITON, AttentionBackend.TRITON_PAGED):
        if importlib.util.find_spec("triton") is None:
            return "the package 'triton' is not installed"
        if backend is AttentionBackend.TRITON_PAGED and shape.register_tokens:
            return f"it reads whole pages, the model has {shape.register_tokens} register tokens beside them"
        return None
    fits = (*HALF, FP8) if backend is AttentionBackend.FLASH3 else HALF
    if shape.dtype not in fits:
        return f"it needs K/V in {' or '.join(str(dtype) for dtype in fits)}, the model has {shape.dtype}"
    if shape.head_dim % 8:
        return f"it needs a head size divisible by 8, the model has {shape.head_dim}"
    if backend is AttentionBackend.FLASH3:
        return _why_not_flash3(shape)
    return None


def _why_not_flash3(shape: AttentionShape) -> str | None:
    if torch.cuda.get_device_capability(shape.device)[0] != 9:
        return "it needs a Hopper GPU"
    if shape.head_dim != 128:
        return f"it is built for a head size of 128, the model has {shape.head_dim}"
    if importlib.util.find_spec(FLASH3_MODULE) is None:
        return "the package 'fa3-fwd' is not installed"
    return None


def _refuse_bias(name: str, logit_bias_S: Tensor | None) -> None:
    if logit_bias_S is not None:
        raise ValueError(f"logit_bias_S: the attention backend {name!r} takes none")


def _time_all(
    names: Sequence[AttentionBackend], shape: AttentionShape, time_ms: Callable[[Callable[[], object]], float]
) -> tuple[tuple[str, float], ...]:
    q_NHD = _random(shape, shape.num_queries)
    k_SHD, v_SHD = (_random(shape, shape.num_keys) for _ in range(2))
    timings = []
    for name in names:
        timings.append((name.value, time_ms(functools.partial(_create(name, shape), q_NHD, k_SHD, v_SHD))))
    return tuple(timings)


def _random(shape: AttentionShape, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, shape.num_heads, shape.head_dim, device=shape.device).to(shape.dtype)


def _device_ms(call: Callable[[], object]) -> float:
    """Return the median time of a call on the current CUDA device, after one that warms it up."""
    call()
    times_ms = []
    for _ in range(TIMED_CALLS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        after.synchronize()
        times_ms.append(float(before.elapsed_time(after)))
    return sorted(times_ms)[TIMED_CALLS // 2]
