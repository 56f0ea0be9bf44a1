"""Headers of safetensors files, whole and damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.safetensors_header import read_safetensors_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path, {"k": "v"})
    return path


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_reads_names_types_shapes_and_places(file: Path) -> None:
    found = {info.name: info for info in read_safetensors_header(file).tensors}
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
    }
    start = found["a"].start_byte
    assert file.read_bytes()[start : start + found["a"].num_bytes] == torch.arange(6.0).numpy().tobytes()


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors: cannot be read \(No such file"):
        read_safetensors_header(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "content", [b"", b"short", b"<html>an error page of a proxy</html>", b"\x08" + bytes(7) + b"notjson!"]
)
def test_a_file_of_another_kind(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        read_safetensors_header(file)


def test_every_truncation_is_noticed(file: Path) -> None:
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"is truncated|is not a safetensors file"):
            read_safetensors_header(file)


def test_truncated_data_says_how_much_is_missing(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=f"is truncated: {len(content)} bytes expected, {len(content) - 5} found"):
        read_safetensors_header(file)


def test_bytes_after_the_last_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="has bytes after its last tensor"):
        read_safetensors_header(file)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
    ],
)
def test_malformed_entry(file: Path, entry: object) -> None:
    write_raw(file, {"t": entry}, bytes(4))
    with pytest.raises(CheckpointError, match="has a malformed header entry for tensor t"):
        read_safetensors_header(file)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
    ],
)
def test_entry_that_contradicts_itself(file: Path, entry: object) -> None:
    write_raw(file, {"t": entry}, bytes(4))
    with pytest.raises(CheckpointError, match=r"tensor t of type .* cannot fill"):
        read_safetensors_header(file)


def test_tensors_that_share_bytes(file: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_raw(file, {"a": entry, "b": {**entry, "data_offsets": [4, 12]}}, bytes(12))
    with pytest.raises(CheckpointError, match="tensor b begins inside tensor a"):
        read_safetensors_header(file)


@pytest.mark.parametrize("places", [((0, 8), (12, 20)), ((4, 12), (12, 20))], ids=["between", "before"])
def test_bytes_of_no_tensor_are_refused_as_the_library_refuses_them(
    file: Path, places: tuple[tuple[int, int], ...]
) -> None:
    entries = zip("ab", places, strict=True)
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in entries}
    write_raw(file, header, bytes(20))
    with pytest.raises(SafetensorError):
        load_file(file)
    with pytest.raises(CheckpointError, match=r"safetensors: has 4 bytes of no tensor before tensor [ab]$"):
        read_safetensors_header(file)


def test_an_empty_tensor_has_its_place_too(file: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    empty = {"dtype": "F32", "shape": [0]}
    write_raw(file, {"a": entry, "b": {**empty, "data_offsets": [8, 8]}}, bytes(8))
    assert [info.num_bytes for info in read_safetensors_header(file).tensors] == [8, 0]
    write_raw(file, {"a": entry, "b": {**empty, "data_offsets": [4, 4]}}, bytes(8))
    with pytest.raises(SafetensorError):
        load_file(file)
    with pytest.raises(CheckpointError, match="tensor b begins inside tensor a"):
        read_safetensors_header(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": 1, "a": 2}', "key 'a' stands there twice"),
        # Found in one pass: comparing every key with every other would take hours.
        (
            json.dumps({f"k{number}": 0 for number in range(300_000)})[:-1].encode() + b', "k299999": 0}',
            "'k299999' stands",
        ),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not valid JSON"),
    ],
    ids=["deep", "repeated", "repeated after many", "digits"],
)
def test_a_header_that_would_cost_too_much_or_mean_two_things(file: Path, text: bytes, reason: str) -> None:
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match=f"is not a safetensors file: its header .*{reason}"):
        read_safetensors_header(file)


def test_a_header_length_beyond_reason_is_not_read(file: Path) -> None:
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 2**40))
        stream.truncate(2**30)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        read_safetensors_header(file)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_escape_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_safetensors_header(path)


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner), max_leaves=6)
)
def test_arbitrary_json_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, header: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz_json.safetensors"
    write_raw(path, header if isinstance(header, dict) else {"t": header}, b"x")
    with pytest.raises(CheckpointError):
        read_safetensors_header(path)
