"""Files of torch.save: the same values as torch.load, no code run, and one sentence for what is no file of tensors."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.tensor_stream import stream_tensors
from worldmodel.checkpoint.torch_file import read_torch_index


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.pth"
    base = torch.arange(12.0)
    torch.save(
        {"a": torch.randn(3, 5), "b": torch.ones(7).bfloat16(), "n": torch.arange(4), "part": base[2:8], "whole": base},
        path,
    )
    return path


def test_places_and_values_are_those_of_torch(file: Path) -> None:
    expected = torch.load(file, weights_only=True)
    got = {info.name: tensor for info, tensor in stream_tensors(read_torch_index(file), lambda _: None, "cpu")}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) and got[name].dtype == expected[name].dtype for name in got)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("evil",)


def test_code_in_a_pickle_is_refused_and_not_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, file)
    with pytest.raises(CheckpointError) as caught:
        read_torch_index(file)
    assert str(caught.value) == (
        f"{file}: is no file of plain tensors: it holds objects of posix.mkdir, "
        "expected one dictionary from names to tensors, as torch.save writes a state dict"
    )
    assert not (tmp_path / "evil").exists()


def test_a_whole_module_is_refused_without_advice_to_run_it(file: Path) -> None:
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU()), file)
    with pytest.raises(CheckpointError, match=r"it holds objects of .*torch\.nn\.modules\.linear\.Linear") as caught:
        read_torch_index(file)
    for advice in ("weights_only", "torch.load", "trust", "allowlist"):
        assert advice not in str(caught.value)


@pytest.mark.parametrize(
    ("num_kinds", "rest"), [(5, r"shell\.kind4, expected"), (7, r"shell\.kind4 and 2 more, expected")]
)
def test_kinds_of_foreign_objects_are_named_up_to_a_few(file: Path, num_kinds: int, rest: str) -> None:
    names = b"".join(b"cshell\nkind%d\n" % number for number in range(num_kinds))
    rewrite(file, "/data.pkl", b"\x80\x02](" + names + b"e.")
    with pytest.raises(CheckpointError, match=rest):
        read_torch_index(file)


@pytest.mark.parametrize(
    "content", [[torch.zeros(1)], {"a": {"b": torch.zeros(1)}}, {1: torch.zeros(1)}, torch.ones(2)]
)
def test_other_content_is_refused(file: Path, content: object) -> None:
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="must hold one dictionary from names to tensors"):
        read_torch_index(file)


def test_every_truncation_is_noticed(file: Path) -> None:
    content = file.read_bytes()
    for length in range(0, len(content), 37):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"is truncated, or not written by torch\.save"):
            read_torch_index(file)


def test_the_old_format_is_named(file: Path) -> None:
    torch.save({"a": torch.zeros(2)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"not written by torch\.save of version 1\.6 or later"):
        read_torch_index(file)


@pytest.mark.parametrize(
    "index",
    [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03K\x04K\x05K\x06tR.",
        b"\x80\x02h\x09.",
        b"",
    ],
    ids=["too few arguments", "wrong arguments", "no such memo", "empty"],
)
def test_an_index_that_torch_did_not_write(file: Path, index: bytes) -> None:
    rewrite(file, "/data.pkl", index)
    with pytest.raises(CheckpointError, match=r"m\.pth: is no file of plain tensors"):
        read_torch_index(file)


def test_an_encrypted_entry(file: Path) -> None:
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        [entry] = [entry for entry in archive.infolist() if entry.filename.endswith("/byteorder")]
    # Bit 0 of the flags, in the entry itself and in the directory.
    content[entry.header_offset + 6] |= 1
    content[content.rindex(entry.filename.encode()) - 46 + 8] |= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not written by torch\.save"):
        read_torch_index(file)


def rewrite(file: Path, suffix: str, content: bytes) -> None:
    """Give the entry with this suffix another content."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, old in entries.items():
            archive.writestr(name, content if name.endswith(suffix) else old)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.pth: cannot be read \(No such file"):
        read_torch_index(tmp_path / "none.pth")


def test_a_compressed_archive_is_refused(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(CheckpointError, match=r"is compressed, which torch\.save never does"):
        read_torch_index(file)


def test_an_index_beyond_reason_is_not_unpickled(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive, archive.open("m/data.pkl", "w") as stream:
        for _ in range(101):
            stream.write(bytes(1_000_000))
    with pytest.raises(CheckpointError, match="has an index of 101000000 bytes, at most 100000000 are read"):
        read_torch_index(file)


def test_a_tensor_that_is_not_contiguous_is_refused(file: Path) -> None:
    torch.save({"a": torch.zeros(3, 4).t()}, file)
    with pytest.raises(CheckpointError, match="tensor a is not stored contiguously"):
        read_torch_index(file)
