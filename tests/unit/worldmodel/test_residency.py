"""How many sessions a worker takes on, and what it says about that."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from kvcache.spec import KVSpec
from tests.support.kv_geometry import tiny_spec
from worldmodel.errors import LoadFailed
from worldmodel.messages import StartWorker
from worldmodel.residency import allocate_cache, plan_capacity


def start(*, sessions: int, memory_bytes: int | None = None, device: str = "cpu", fraction: float = 0.9) -> StartWorker:
    return StartWorker(
        model="fake",
        checkpoint="",
        width=16,
        height=16,
        fps=1,
        device=device,
        requested_sessions=sessions,
        memory_bytes=memory_bytes,
        gpu_memory_fraction=fraction,
    )


def on_cuda(monkeypatch: pytest.MonkeyPatch, free_bytes: int, *, sessions: int = 8) -> StartWorker:
    """Return a start message for a device with this much memory free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 2 * free_bytes))
    return start(sessions=sessions, device="cuda:0")


@pytest.fixture
def spec() -> KVSpec:
    return tiny_spec()


def test_a_device_serves_what_its_fraction_holds(
    spec: KVSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_bytes = int(spec.required_bytes(3) / 0.9) + 1
    with caplog.at_level(logging.INFO):
        assert plan_capacity(spec, on_cuda(monkeypatch, free_bytes)) == 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    more = spec.required_bytes(2) - spec.required_bytes(1)
    assert record.getMessage() == (
        f"3 of the 8 sessions requested fit: the first takes {spec.required_bytes(1)} bytes, each other {more}, and "
        f"{int(free_bytes * 0.9)} of {free_bytes} free bytes may be used (fraction 0.9)"
    )


def test_one_session_is_served_if_only_the_fraction_is_too_small(
    spec: KVSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = spec.required_bytes(1)
    assert plan_capacity(spec, on_cuda(monkeypatch, one)) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "capacity raised to one session although the budget holds none" in record.getMessage()
    assert f"the first takes {one} bytes" in record.getMessage()
    assert f"{int(one * 0.9)} of {one} free bytes" in record.getMessage()


def test_less_than_one_session_does_not_load_and_says_all_numbers(
    spec: KVSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = spec.required_bytes(1)
    with pytest.raises(LoadFailed) as caught:
        plan_capacity(spec, on_cuda(monkeypatch, need - 1))
    assert caught.value.code == "out_of_memory"
    numbers = [int(number) for number in re.findall(r"\d{3,}(?!\.)\b", caught.value.message)]
    assert numbers == [
        need,
        spec.storage_bytes(1),
        spec.cross_attention_bytes,
        spec.staging_bytes,
        need - 1,
    ]


def test_what_was_asked_for_is_no_warning(
    spec: KVSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert plan_capacity(spec, on_cuda(monkeypatch, spec.required_bytes(9), sessions=2)) == 2
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("all sessions requested fit (2): ")


def test_a_cpu_takes_what_was_asked_for_within_its_budget(spec: KVSpec) -> None:
    assert plan_capacity(spec, start(sessions=7)) == 7
    assert plan_capacity(spec, start(sessions=7, memory_bytes=spec.required_bytes(4))) == 4
    cache = allocate_cache(spec, start(sessions=7, memory_bytes=spec.required_bytes(4)))
    assert cache.capacity == 4
    with pytest.raises(LoadFailed, match=r"are free \(on a CPU these are kvcache\.cpu_memory_bytes\)$"):
        plan_capacity(spec, start(sessions=7, memory_bytes=spec.required_bytes(1) - 1))


def test_storage_that_can_not_be_allocated_is_said_with_its_size(spec: KVSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(LoadFailed, match=f"{spec.storage_bytes(3)} bytes for 3 sessions") as caught:
        allocate_cache(spec, start(sessions=3))
    assert caught.value.code == "out_of_memory"
