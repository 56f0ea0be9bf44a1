"""Tensors in one flat piece of memory."""

from __future__ import annotations

import pytest
import torch

from offload.layout import ALIGNMENT, TensorSpec, flat_layout

SPECS = (
    TensorSpec(name="weight", dtype=torch.bfloat16, shape=(3, 5)),
    TensorSpec(name="scale", dtype=torch.float32, shape=(1, 3)),
    TensorSpec(name="values", dtype=torch.float8_e4m3fn, shape=(300,)),
)


def test_tensors_start_at_aligned_bytes_and_do_not_overlap() -> None:
    layout = flat_layout(SPECS)

    assert [place.start_byte for place in layout.places] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert layout.num_bytes == 4 * ALIGNMENT


def test_what_is_filled_in_is_viewed_unchanged() -> None:
    layout = flat_layout(SPECS)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    tensors = {spec.name: torch.randn(spec.shape).to(spec.dtype) for spec in SPECS}

    layout.fill(flat, tensors)

    views = layout.views(flat)
    for name, tensor in tensors.items():
        assert views[name].dtype == tensor.dtype
        assert views[name].data_ptr() % 16 == flat.data_ptr() % 16
        assert torch.equal(views[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("specs", [(), (SPECS[0], SPECS[0])])
def test_no_tensors_and_equal_names_are_refused(specs: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(ValueError, match="names of their own"):
        flat_layout(specs)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({}, "got nothing"),
        ({"weight": torch.zeros(5, 3, dtype=torch.bfloat16)}, r"got torch\.bfloat16 \[5, 3\]"),
        ({"weight": torch.zeros(3, 5)}, r"got torch\.float32"),
    ],
)
def test_a_wrong_tensor_is_named(wrong: dict[str, torch.Tensor], found: str) -> None:
    layout = flat_layout(SPECS[:1])

    with pytest.raises(ValueError, match=rf"weight: expected torch\.bfloat16 \[3, 5\], {found}"):
        layout.fill(torch.zeros(layout.num_bytes, dtype=torch.uint8), wrong)


def test_flat_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 256 bytes, got 255"):
        flat_layout(SPECS[:1]).views(torch.zeros(255, dtype=torch.uint8))
