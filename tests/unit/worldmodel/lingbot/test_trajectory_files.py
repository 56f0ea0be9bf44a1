"""Camera folders made to do harm, or changed meanwhile: all is refused at once, or read as it was opened."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from worldmodel.errors import RequestRefused
from worldmodel.lingbot import trajectory
from worldmodel.lingbot.trajectory import load_clip

FILES = ("poses.npy", "intrinsics.npy")
GOOD_HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4, 4), }"


def write(folder: Path, *, step: float = 1.0) -> Path:
    """Write a path of four poses that moves by `step`."""
    folder.mkdir(parents=True, exist_ok=True)
    poses = np.tile(np.eye(4), (4, 1, 1))
    poses[:, 0, 3] = step * np.arange(4)
    np.save(folder / "poses.npy", poses)
    np.save(folder / "intrinsics.npy", np.array([[500.0, 500.0, 416.0, 240.0]]))
    return folder


def step_of(folder: Path, *below: str) -> float:
    return float(load_clip(folder, below).poses_n44[1, 0, 3])


def refused(folder: Path, *below: str) -> str:
    with pytest.raises(RequestRefused) as caught:
        load_clip(folder, below)
    assert caught.value.code == "bad_trajectory"
    assert str(folder.parent) not in caught.value.message
    return caught.value.message


def npy(header: str | bytes, data: bytes = b"", version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else header.encode("latin1")
    length = len(text) if length is None else length
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", length) + text + data


# ---------------------------------------------------------------- what is no file


def make_link(path: Path) -> None:
    path.symlink_to(path.with_name("other"))


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as it:
        it.bind(os.path.relpath(path))


@pytest.mark.parametrize("make", [make_link, make_device_link, os.mkfifo, make_socket, Path.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[[Path], None]
) -> None:
    """The test's own time-out would end a read that waits for the other end of a pipe."""
    folder = write(tmp_path / "clip")
    (folder / name).rename(folder / "other")
    # The name of a socket is limited to some hundred characters.
    monkeypatch.chdir(folder)
    make(folder / name)
    assert refused(folder).startswith(name)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_that_somebody_writes_into_is_refused_too(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "clip")
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    reader = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(folder / name, os.O_WRONLY)
    try:
        os.write(writer, data)
        assert "regular file" in refused(folder)
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, make_device_link])
def test_what_is_no_folder_is_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "clip")
    assert "'clip' cannot be opened" in refused(tmp_path / "clip")
    write(tmp_path / "root")
    make(tmp_path / "root" / "clip")
    assert "'clip' cannot be opened" in refused(tmp_path / "root", "clip")


@pytest.mark.parametrize("below", [("..",), (".",), ("",), ("a", ".."), ("a/b",), ("/etc",)])
def test_a_way_below_a_folder_cannot_leave_it(tmp_path: Path, below: tuple[str, ...]) -> None:
    write(tmp_path)
    write(tmp_path / "root" / "a" / "b")
    assert "expected a name" in refused(tmp_path / "root", *below)


def test_a_link_on_the_way_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    write(tmp_path / "outside" / "b")
    write(tmp_path / "root" / "a" / "b")
    assert step_of(tmp_path / "root", "a", "b") == 1.0
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    assert "'link' cannot be opened" in refused(tmp_path / "root", "link", "b")
    (tmp_path / "root" / "a" / "link").symlink_to("b")
    assert "'link' cannot be opened" in refused(tmp_path / "root", "a", "link")


# ---------------------------------------------------------------- what changes while it is read


@pytest.mark.parametrize("opened", ["root", "a", "b", "poses.npy", "intrinsics.npy"])
def test_folders_swapped_while_they_are_opened_lead_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: str
) -> None:
    """As soon as one step is open, everything it was reached by is replaced; only the opened ones are read."""
    write(tmp_path / "root" / "a" / "b")
    secret = write(tmp_path / "secret" / "a" / "b", step=7.0)
    real_open = os.open

    def swap_behind(path: str | Path, flags: int, **options: int) -> int:
        descriptor = real_open(path, flags, **options)
        if Path(path).name == opened:
            (tmp_path / "root").rename(tmp_path / "moved")
            (tmp_path / "root").symlink_to(secret.parents[1])
            if opened in ("root", "a"):
                return descriptor
            (tmp_path / "moved" / "a").rename(tmp_path / "moved" / "was a")
            (tmp_path / "moved" / "a").symlink_to(secret.parent)
        return descriptor

    monkeypatch.setattr(os, "open", swap_behind)
    assert step_of(tmp_path / "root", "a", "b") == 1.0


@pytest.mark.parametrize("name", FILES)
def test_a_file_swapped_for_a_link_before_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, secret = write(tmp_path / "clip"), write(tmp_path / "secret", step=7.0)
    real_open = os.open

    def swap_before(path: str | Path, flags: int, **options: int) -> int:
        if path == name:
            (folder / name).unlink()
            (folder / name).symlink_to(secret / name)
        return real_open(path, flags, **options)

    monkeypatch.setattr(os, "open", swap_before)
    assert refused(folder).startswith(f"{name}: cannot be opened")


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "clip")
    real_fstat = os.fstat

    def grow_behind(descriptor: int) -> os.stat_result:
        info = real_fstat(descriptor)
        with (folder / "poses.npy").open("ab") as file:
            file.write(bytes(2_000_000))
        return info

    monkeypatch.setattr(os, "fstat", grow_behind)
    assert "the file is growing" in refused(folder)


def test_a_file_cut_short_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "clip")
    real_fstat = os.fstat

    def cut_behind(descriptor: int) -> os.stat_result:
        info = real_fstat(descriptor)
        os.truncate(folder / "poses.npy", 200)
        return info

    monkeypatch.setattr(os, "fstat", cut_behind)
    assert "bytes of data, got" in refused(folder)


def test_folders_swapped_by_another_thread_all_the_time_give_one_of_two_answers(tmp_path: Path) -> None:
    good, secret, root = write(tmp_path / "good"), write(tmp_path / "secret", step=7.0), tmp_path / "root"
    link = tmp_path / "link"
    link.symlink_to(secret)
    good.rename(root)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(root, good)
            os.rename(link, root)
            os.rename(root, link)
            os.rename(good, root)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(400):
            with suppress(RequestRefused):
                assert step_of(root) == 1.0, "the folder behind the link was read"
    finally:
        stop.set()
        thread.join()
    assert step_of(root) == 1.0


# ---------------------------------------------------------------- what is in the files


@pytest.mark.parametrize(("name", "sides"), [("poses.npy", "[N, 4, 4]"), ("intrinsics.npy", "[N, 4]")])
def test_another_shape_is_told_with_the_right_one(tmp_path: Path, name: str, sides: str) -> None:
    folder = write(tmp_path / "clip")
    np.save(folder / name, np.load(folder / name)[0])
    assert refused(folder).startswith(f"{name}: expected the shape {sides}, got [4")


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "clip")
    whole = (folder / name).read_bytes()
    for length in [*range(140), *range(140, len(whole), 7)]:
        if length < len(whole):
            (folder / name).write_bytes(whole[:length])
            assert refused(folder).startswith(name)
    (folder / name).write_bytes(whole)
    assert step_of(folder) == 1.0


@pytest.mark.parametrize(
    "content",
    [
        b"\x93NUMPY",
        b"\x93NUMPY\x01",
        npy("(" * 3000),
        npy("[" * 3000),
        npy("-" * 3000 + "1"),
        npy("9" * 4000),
        npy(GOOD_HEADER, length=65535),
        npy(GOOD_HEADER, version=(2, 0), length=2**32 - 1),
        npy(GOOD_HEADER + " " * 5000, bytes(256)),
        npy("{[]: 1}"),
        npy("{'shape': (4, 4, 4), 'shape': (4, 4, 4), 'shape': (4, 4, 4), }", bytes(256)),
        npy(GOOD_HEADER.replace("4, 4, 4", "9" * 75), bytes(256)),
        npy(GOOD_HEADER.replace("4, 4, 4", "-4, 4, 4"), bytes(256)),
        npy(GOOD_HEADER.replace("4, 4, 4", "4, 4, 4L"), bytes(256)),
        npy(GOOD_HEADER.replace("4, 4, 4", "4, 4,, 4 4"), bytes(256)),
        npy(GOOD_HEADER.replace("'<f4'", "[('a', '<f4')]"), bytes(256)),
        npy(GOOD_HEADER.replace("<f4", "|O"), b"cos\nsystem\n(S'true'\ntR."),
        npy(GOOD_HEADER.replace("<f4", "<f99999999"), bytes(256)),
        npy(GOOD_HEADER.replace("False", "__import__('os')"), bytes(256)),
    ],
    ids=lambda content: repr(content[10:40]),
)
def test_headers_made_to_hurt_are_refused(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path / "clip")
    (folder / "poses.npy").write_bytes(content)
    assert refused(folder).startswith("poses.npy")


def test_random_headers_are_read_as_numpy_reads_them_or_refused(tmp_path: Path) -> None:
    """What is accepted must be what numpy finds in the same file; nothing may end in another error."""
    folder, rng = write(tmp_path / "clip"), random.Random(3)
    data = np.tile(np.eye(4, dtype=np.float32), (4, 1, 1)).tobytes()
    num_read = 0
    for _ in range(1500):
        header = list(GOOD_HEADER)
        for _ in range(rng.randrange(3)):
            header[rng.randrange(len(header))] = rng.choice("(){}[]'\"\\,:-+# \nLj0123456789<>=|fFTrue")
        (folder / "poses.npy").write_bytes(npy("".join(header), data, version=rng.choice([(1, 0), (2, 0)])))
        try:
            clip = load_clip(folder)
        except RequestRefused:
            continue
        num_read += 1
        assert np.array_equal(clip.poses_n44, np.load(folder / "poses.npy"))
    assert num_read > 300


@pytest.mark.parametrize("order", ["'fortran_order': False, 'shape': (4, 4, 4), 'descr': '<f4'", GOOD_HEADER[1:-3]])
def test_the_order_of_a_headers_items_does_not_matter(tmp_path: Path, order: str) -> None:
    folder = write(tmp_path / "clip")
    data = np.tile(np.eye(4, dtype=np.float32), (4, 1, 1)).tobytes()
    (folder / "poses.npy").write_bytes(npy("{" + order + "}\n", data))
    assert np.array_equal(load_clip(folder).poses_n44, np.load(folder / "poses.npy"))


def test_nothing_is_left_open(tmp_path: Path) -> None:
    folder = write(tmp_path / "clip")
    (tmp_path / "bad").mkdir()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        step_of(folder)
        refused(tmp_path / "bad")
        refused(tmp_path, "clip", "..")
        refused(tmp_path, "clip", "poses.npy")
    assert (len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0) == before
    assert trajectory.MAX_NPY_HEADER_BYTES < 65535
