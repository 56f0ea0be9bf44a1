"""A transformer whose layers are streamed computes the bits of one whose weights are resident, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload.errors import OffloadError
from tests.support.lingbot_streaming import NUM_LAYERS, resident, rollout, streamed, write_checkpoint
from worldmodel.checkpoint.stored_component import StoredComponent
from worldmodel.errors import LoadFailed
from worldmodel.lingbot.streaming_plan import DeviceNumbers
from worldmodel.offload_settings import OffloadSettings

FORMS = [("fp32", False), ("fp32", True), ("bf16", True), ("official", False), ("fp8", True), ("fp8_kv", True)]
"""Precision plans, and whether their layers are fused."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredComponent]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return {
        "float32": write_checkpoint(folder, torch.float32),
        "bfloat16": write_checkpoint(folder, torch.bfloat16),
    }


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, StoredComponent]) -> dict[tuple[str, str, bool], list[torch.Tensor]]:
    """The flows of resident weights, by stored type, precision and form."""
    made = {("float32", *form): rollout(*resident(checkpoints["float32"], form[0], is_fused=form[1])) for form in FORMS}
    made["bfloat16", "bf16", True] = rollout(*resident(checkpoints["bfloat16"], "bf16", is_fused=True))
    return made


def settings(**values: object) -> OffloadSettings:
    return OffloadSettings(weights="streamed", transfer="staged", **values)  # type: ignore[arg-type]


def assert_equal_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.isfinite(flow).all() for flow in got)


BUDGETS = {"buffers only": 0.0, "a third": 0.33, "most": 0.8, "everything": 2.0}


@pytest.mark.parametrize(
    ("form", "budget"), [(FORMS[0], budget) for budget in BUDGETS] + [(form, "a third") for form in FORMS[1:]]
)
def test_any_budget_gives_the_bits_of_resident_weights(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    form: tuple[str, bool],
    budget: str,
) -> None:
    precision, is_fused = form
    component = checkpoints["float32"]
    _, _, whole, _ = streamed(component, precision, settings(), is_fused=is_fused)
    all_bytes = whole.residency.device_bytes
    # Two buffers of six layers are a third of all.
    resident_bytes = int(all_bytes / 3 + BUDGETS[budget] * all_bytes * 2 / 3) + 1

    model, forward, weights, _ = streamed(
        component, precision, settings(resident_bytes=resident_bytes), is_fused=is_fused
    )

    assert weights.residency.device_bytes <= resident_bytes
    assert (weights.residency.host_bytes == 0) == (budget == "everything")
    num_streamed = len(weights.residency.parts["forward"].streamed)
    assert (num_streamed == NUM_LAYERS) == (budget == "buffers only")
    assert_equal_bits(rollout(model, forward), expected["float32", precision, is_fused])


@pytest.mark.parametrize(
    ("stored", "form"), [("float32", ("fp32", True)), ("float32", ("fp32", False)), ("bfloat16", ("bf16", True))]
)
@pytest.mark.parametrize("resident_share", [0.34, 0.7])
def test_the_checkpoints_own_bytes_can_be_streamed(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    stored: str,
    form: tuple[str, bool],
    resident_share: float,
) -> None:
    precision, is_fused = form
    _, _, whole, _ = streamed(checkpoints[stored], precision, settings(), is_fused=is_fused)
    budget = int(whole.residency.device_bytes * resident_share)

    model, forward, weights, description = streamed(
        checkpoints[stored], precision, settings(host="checkpoint_mmap", resident_bytes=budget), is_fused=is_fused
    )

    assert description.startswith("weights streamed from checkpoint_mmap")
    assert_equal_bits(rollout(model, forward), expected[stored, precision, is_fused])
    weights.close()


@pytest.mark.parametrize(
    ("precision", "reason"),
    [("bf16", r"stored as torch\.float32, computed with as torch\.bfloat16"), ("fp8", "float8 by row")],
)
def test_a_checkpoint_that_cannot_be_mapped_stops_the_start_or_becomes_ordinary(
    checkpoints: dict[str, StoredComponent],
    expected: dict[tuple[str, str, bool], list[torch.Tensor]],
    precision: str,
    reason: str,
) -> None:
    component = checkpoints["float32"]
    with pytest.raises(
        LoadFailed, match=rf"offload: host weights 'checkpoint_mmap' can't be used: .*{reason}"
    ) as failed:
        streamed(component, precision, settings(host="checkpoint_mmap", resident_bytes=10**9), is_fused=True)
    assert failed.value.field == "offload"

    model, forward, _, description = streamed(
        component,
        precision,
        settings(host="checkpoint_mmap", on_unavailable="ordinary", resident_bytes=10**9),
        is_fused=True,
    )
    assert description.startswith("weights streamed from ordinary")
    assert_equal_bits(rollout(model, forward), expected["float32", precision, True])


def test_page_locking_needs_a_cuda_device_or_leave_to_stage(checkpoints: dict[str, StoredComponent]) -> None:
    component = checkpoints["float32"]
    wish = OffloadSettings(weights="streamed", transfer="registered")
    with pytest.raises(LoadFailed, match=r"transfer 'registered' can't be used: cpu is no CUDA device"):
        streamed(component, "fp32", wish, is_fused=False)

    wish = OffloadSettings(weights="streamed", transfer="registered", on_unavailable="ordinary")
    _, _, _, description = streamed(component, "fp32", wish, is_fused=False)
    assert "staged" in description
    assert "cpu is no CUDA device" in description


def test_a_bound_of_device_memory_that_is_too_small_is_refused_with_the_numbers(
    checkpoints: dict[str, StoredComponent],
) -> None:
    with pytest.raises(LoadFailed, match=r"streamed weights do not fit: \d+ bytes .* device_bytes is 2\.00 GiB, less"):
        streamed(checkpoints["float32"], "fp32", settings(device_bytes=2 * 2**30), is_fused=False)


def test_what_sessions_leave_of_the_device_is_used(checkpoints: dict[str, StoredComponent]) -> None:
    numbers = DeviceNumbers(loaded_bytes=0, free_bytes=2**30 + 2**20)

    _, _, weights, _ = streamed(checkpoints["float32"], "fp32", settings(), is_fused=False, numbers=numbers)

    assert 0 < weights.residency.device_bytes <= 2**20


def test_after_a_rolled_back_tick_the_next_one_is_right(
    checkpoints: dict[str, StoredComponent], expected: dict[tuple[str, str, bool], list[torch.Tensor]]
) -> None:
    model, forward, weights, _ = streamed(
        checkpoints["float32"], "fp32", settings(resident_bytes=600_000), is_fused=False
    )
    loop = weights.weights("forward")
    for index in range(3):
        with loop.layer(index):
            pass

    assert_equal_bits(rollout(model, forward), expected["float32", "fp32", False])


def test_closed_weights_are_gone(checkpoints: dict[str, StoredComponent]) -> None:
    _, _, weights, _ = streamed(
        checkpoints["float32"], "fp32", settings(host="checkpoint_mmap", resident_bytes=600_000), is_fused=False
    )
    files = weights._host.files  # type: ignore[union-attr]

    weights.close()
    weights.close()

    for file in files:
        with pytest.raises(OffloadError, match="is closed"):
            _ = file.bytes
