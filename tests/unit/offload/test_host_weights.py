"""Host bytes of a part, from own memory and from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.errors import OffloadError
from offload.host_plan import Binding, StoredTensor
from offload.host_weights import HostPart, HostPiece, check_no_overlap, copy_plainly, mapped_part, own_part
from offload.layout import FlatLayout, TensorSpec, flat_layout
from offload.mapped_memory import MappedMemory

SPECS = (
    TensorSpec(name="qk", dtype=torch.float32, shape=(64, 2)),
    TensorSpec(name="bias", dtype=torch.float32, shape=(3,)),
)


def random_tensors() -> dict[str, torch.Tensor]:
    return {spec.name: torch.randn(spec.shape) for spec in SPECS}


def read_part(layout: FlatLayout, part: HostPart) -> dict[str, torch.Tensor]:
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    copy_plainly(part, flat)
    return layout.views(flat)


def file_of(tensors: dict[str, torch.Tensor], file: Path, *, gap: int = 0) -> dict[str, Binding]:
    """Write the halves of `qk` and the bias into a file, `gap` bytes apart, and return what is stored where."""
    content = b"head"
    bindings = {}
    for spec in SPECS:
        stored = []
        for number, rows in enumerate(tensors[spec.name].chunk(2) if spec.name == "qk" else [tensors[spec.name]]):
            key = f"{spec.name}.{number}"
            start = len(content)
            stored.append(StoredTensor(key=key, file=file, start_byte=start, dtype=rows.dtype, shape=tuple(rows.shape)))
            content += rows.numpy().tobytes() + bytes(gap)
        bindings[spec.name] = Binding(tensor=spec, stored=tuple(stored))
    file.write_bytes(content)
    return bindings


def test_own_memory_holds_the_tensors_in_one_piece() -> None:
    layout, tensors = flat_layout(SPECS), random_tensors()

    part = own_part(layout, tensors)

    assert len(part.pieces) == 1
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_part(layout, part).items())


@pytest.mark.parametrize(("gap", "num_pieces"), [(0, 1), (8, 3)])
def test_mapped_tensors_are_read_and_neighbours_become_one_piece(tmp_path: Path, gap: int, num_pieces: int) -> None:
    layout, tensors = flat_layout(SPECS), random_tensors()
    file = tmp_path / "weights"
    bindings = file_of(tensors, file, gap=gap)

    part = mapped_part(layout, bindings, {str(file): MappedMemory.of_file(file)})

    # The halves of `qk` fill 512 bytes, after which the bias starts in both.
    assert len(part.pieces) == num_pieces
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_part(layout, part).items())


@pytest.mark.parametrize("num_files", [1, 2])
def test_neighbours_on_one_side_only_stay_apart(tmp_path: Path, num_files: int) -> None:
    """Without a gap on the host there is one in the buffer, and bytes that follow by number are in another file."""
    first = TensorSpec(name="bias", dtype=torch.uint8, shape=(300 if num_files == 1 else 256,))
    second = TensorSpec(name="weight", dtype=torch.uint8, shape=(100,))
    layout = flat_layout((first, second))
    tensors = {spec.name: torch.randint(0, 256, spec.shape, dtype=torch.uint8) for spec in (first, second)}
    data = [tensors[spec.name].numpy().tobytes() for spec in (first, second)]
    files = [tmp_path / f"weights-{number}" for number in range(num_files)]
    files[0].write_bytes(data[0] + (data[1] if num_files == 1 else b""))
    if num_files == 2:
        files[1].write_bytes(bytes(len(data[0])) + data[1])
    bindings = {
        spec.name: Binding(
            tensor=spec,
            stored=(StoredTensor(key=spec.name, file=file, start_byte=start, dtype=spec.dtype, shape=spec.shape),),
        )
        for spec, file, start in ((first, files[0], 0), (second, files[-1], first.num_bytes))
    }

    part = mapped_part(layout, bindings, {str(file): MappedMemory.of_file(file) for file in files})

    assert len(part.pieces) == 2
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_part(layout, part).items())


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_shares_add_up_to_the_whole(tmp_path: Path, num_shares: int) -> None:
    layout, tensors = flat_layout(SPECS), random_tensors()
    file = tmp_path / "weights"
    part = mapped_part(layout, file_of(tensors, file, gap=4), {str(file): MappedMemory.of_file(file)})
    size = -(-layout.num_bytes // num_shares)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)

    shares = [part.share(number * size, (number + 1) * size) for number in range(num_shares)]
    for share in shares:
        copy_plainly(share, flat)

    assert sum(share.num_bytes for share in shares) == part.num_bytes
    assert all(torch.equal(view, tensors[name]) for name, view in layout.views(flat).items())


def test_pieces_that_overlap_are_found() -> None:
    memory = MappedMemory.own(100)
    pieces = [HostPiece(memory=memory, start_byte=0, num_bytes=10, buffer_start_byte=start) for start in (0, 9)]

    with pytest.raises(ValueError, match="two pieces write byte 9"):
        check_no_overlap(HostPart(pieces=tuple(pieces)))


def test_a_mapping_is_not_closed_while_it_is_viewed(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"12345")
    memory = MappedMemory.of_file(file)
    view = memory.bytes[1:3]

    with pytest.raises(OffloadError, match="still in use"):
        memory.close()
    assert view.tolist() == [50, 51]
    assert memory.num_bytes == 5

    del view
    memory.close()
    memory.close()
    with pytest.raises(OffloadError, match="is closed"):
        _ = memory.bytes


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "weights"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(OffloadError, match=r"weights: cannot be mapped"):
        MappedMemory.of_file(file)
