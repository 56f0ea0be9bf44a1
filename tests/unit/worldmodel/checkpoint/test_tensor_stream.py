"""Reading in pieces: equal to the safetensors library for any sizes, bounded, and clear when a file lets us down."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from worldmodel.checkpoint import tensor_stream
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.safetensors_header import TensorInfo, read_safetensors_header
from worldmodel.checkpoint.tensor_stream import stream_tensors

STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)


def infos(*files: Path) -> list[TensorInfo]:
    return [info for file in files for info in read_safetensors_header(file).tensors]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 70), st.sampled_from(STORED)), min_size=1, max_size=9),
    piece_bytes=st.sampled_from([8, 16, 64]),
    target=st.sampled_from([None, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_pieces_of_any_size_give_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, torch.dtype]],
    piece_bytes: int,
    target: torch.dtype | None,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"t{index}": (4 * torch.randn(size, generator=generator)).to(dtype) for index, (size, dtype) in enumerate(sizes)
    }
    halves = [dict(list(tensors.items())[part::2]) for part in (0, 1)]
    files = [folder / f"{part}.safetensors" for part in (0, 1)]
    for file, half in zip(files, halves, strict=True):
        save_file(half, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_stream, "PIECE_BYTES", piece_bytes)
        got = {info.name: tensor for info, tensor in stream_tensors(infos(*files), lambda _: target, "cpu")}
    expected = {**load_file(files[0]), **load_file(files[1])}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == (target or tensor.dtype)
        assert torch.equal(got[name], tensor.to(target or tensor.dtype))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save_file({f"t{index}": torch.full((1000,), float(index)) for index in range(20)}, path)
    return path


def test_tensors_come_in_the_order_of_the_file_and_shapes_are_kept(file: Path) -> None:
    save_file({"b": torch.zeros(2, 3), "a": torch.ones(()), "c": torch.zeros(0, 4)}, file)
    found = [
        (info.name, info.start_byte, tuple(t.shape)) for info, t in stream_tensors(infos(file), lambda _: None, "cpu")
    ]
    assert [start for _, start, _ in found] == sorted(start for _, start, _ in found)
    assert {name: shape for name, _, shape in found} == {"a": (), "b": (2, 3), "c": (0, 4)}


def test_a_file_cut_while_it_is_read_is_named(file: Path) -> None:
    found = infos(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"m\.safetensors: cannot be read \(ends before byte"):
        list(stream_tensors(found, lambda _: None, "cpu"))


def test_a_file_that_is_gone_is_named(file: Path) -> None:
    found = infos(file)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"m\.safetensors: cannot be read \(No such file"):
        list(stream_tensors(found, lambda _: None, "cpu"))


def test_a_type_that_torch_has_no_word_for_is_named(file: Path) -> None:
    odd = dataclasses.replace(infos(file)[0], dtype="F4")
    with pytest.raises(CheckpointError, match="has type F4, which is not read"):
        list(stream_tensors([odd], lambda _: None, "cpu"))


def test_no_thread_stays_when_reading_is_given_up(file: Path) -> None:
    stream = stream_tensors(infos(file), lambda _: None, "cpu")
    next(stream)
    stream.close()
    assert [thread.name for thread in threading.enumerate() if "checkpoint reader" in thread.name] == []


def test_reading_is_ahead_of_the_copies_but_not_beyond_the_buffers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    fill = tensor_stream._Buffer.fill

    def counting(self: tensor_stream._Buffer, descriptor: int, piece: tensor_stream._Piece) -> None:
        fill(self, descriptor, piece)
        filled.append(piece.info.start_byte)

    monkeypatch.setattr(tensor_stream._Buffer, "fill", counting)
    monkeypatch.setattr(tensor_stream, "ThreadPoolExecutor", _Immediately)
    stream = stream_tensors(infos(file), lambda _: None, "cpu")
    for taken in range(1, 5):
        next(stream)
        # With a single buffer nothing would be read while a copy is under way.
        assert taken < len(filled) == taken + tensor_stream.NUM_BUFFERS - 1
    stream.close()


class _Immediately:
    """An executor that does everything at once in the caller's thread."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Immediately:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function, *arguments):
        function(*arguments)
        return self

    def result(self) -> None: ...

    def cancel(self) -> None: ...
