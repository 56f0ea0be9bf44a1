"""The choice of an attention backend: by name, by timing, and refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcache import attention_backends
from kvcache.attention import TorchAttention
from kvcache.attention_backends import (
    AttentionBackend,
    AttentionShape,
    ChosenAttention,
    SdpaAttention,
    available_backends,
    choose_attention,
)
from kvcache.errors import AttentionUnavailable

SHAPE = AttentionShape(
    num_queries=6, num_keys=9, num_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
)
ON_CUDA = replace(SHAPE, device=torch.device("cuda"))


def test_a_cpu_has_the_reference_only_and_times_nothing() -> None:
    assert available_backends(SHAPE) == (AttentionBackend.TORCH_SDPA,)
    chosen = choose_attention(AttentionBackend.AUTO, SHAPE)
    assert isinstance(chosen.attention, TorchAttention)
    assert chosen.describe() == "torch_sdpa"


@pytest.mark.parametrize(
    ("backend", "shape", "reason"),
    [
        (AttentionBackend.FLASH3, SHAPE, r"it needs a CUDA device, the model is on 'cpu'"),
        (AttentionBackend.SDPA_CUDNN, ON_CUDA, r"it needs K/V in .*bfloat16.*, the model has torch.float32"),
        (AttentionBackend.TRITON_PAGED, SHAPE, r"it needs a CUDA device, the model is on 'cpu'"),
        (
            AttentionBackend.SDPA_FLASH,
            replace(ON_CUDA, dtype=torch.bfloat16, head_dim=12),
            r"it needs a head size divisible by 8, the model has 12",
        ),
    ],
)
def test_a_named_backend_that_cannot_run_is_refused(
    backend: AttentionBackend, shape: AttentionShape, reason: str
) -> None:
    with pytest.raises(AttentionUnavailable, match=rf"attention '{backend.value}' can't be used: {reason}"):
        choose_attention(backend, shape)


def test_pages_are_read_in_place_only_if_that_is_asked_for_and_nothing_lies_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_backends, "_why_not_flash3", lambda shape: "as ordered")
    monkeypatch.setattr(attention_backends.importlib.util, "find_spec", lambda name: object())
    shape = replace(ON_CUDA, dtype=torch.bfloat16)
    assert AttentionBackend.TRITON in available_backends(shape)
    assert AttentionBackend.TRITON_PAGED not in available_backends(shape)
    reason = "it reads whole pages, the model has 25 register tokens beside them"
    with pytest.raises(AttentionUnavailable, match=reason):
        choose_attention(AttentionBackend.TRITON_PAGED, replace(shape, register_tokens=25))
    monkeypatch.setattr(attention_backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AttentionUnavailable, match="the package 'triton' is not installed"):
        choose_attention(AttentionBackend.TRITON_PAGED, shape)


def test_auto_takes_the_fastest_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {backend: TorchAttention() for backend in AttentionBackend}
    candidates = (AttentionBackend.TORCH_SDPA, AttentionBackend.SDPA_CUDNN, AttentionBackend.TRITON)
    monkeypatch.setattr(attention_backends, "available_backends", lambda shape: candidates)
    monkeypatch.setattr(attention_backends, "_create", lambda backend, shape: made[backend])
    times = iter([3.0, 1.0, 2.0])

    def time_ms(call: Callable[[], object]) -> float:
        result = call()
        assert isinstance(result, torch.Tensor)
        assert result.shape == (6, 2, 8)
        return next(times)

    chosen = choose_attention(AttentionBackend.AUTO, SHAPE, time_ms=time_ms)
    assert chosen.attention is made[AttentionBackend.SDPA_CUDNN]
    assert chosen.timings_ms == (("torch_sdpa", 3.0), ("sdpa_cudnn", 1.0), ("triton", 2.0))
    described = ChosenAttention(attention=TorchAttention(), timings_ms=chosen.timings_ms).describe()
    assert described == "torch_sdpa (torch_sdpa 3.00 ms, sdpa_cudnn 1.00 ms, triton 2.00 ms)"


def test_a_kernel_without_bias_never_drops_one() -> None:
    q, k, v = (torch.randn(n, 2, 8) for n in (4, 5, 5))
    bias = torch.randn(5)
    with pytest.raises(ValueError, match=r"the attention backend 'sdpa_flash' takes none"):
        SdpaAttention(AttentionBackend.SDPA_FLASH)(q, k, v, logit_bias_S=bias)


def test_float8_keys_are_widened_by_the_reference() -> None:
    q, k, v = (torch.randn(n, 2, 8).to(torch.float8_e4m3fn) for n in (4, 5, 5))
    got = TorchAttention()(q, k, v)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), TorchAttention()(q.float(), k.float(), v.float()), atol=2e-2, rtol=2e-2)
