"""Where a weight cache may be: on a disk of this machine, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.cache_folder import CacheFolder, file_system, read_address
from offload.cache_manifest import Validation
from offload.errors import CacheRootRefused
from offload.weight_cache import WeightCache
from tests.support.weight_cache import (
    open_entry,
    request,
)


def mount_table(tmp_path: Path, *lines: tuple[str, str]) -> Path:
    file = tmp_path / "mountinfo"
    file.write_bytes(b"".join(os.fsencode(f"1 0 8:1 / {point} rw - {kind} dev rw\n") for point, kind in lines))
    return file


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "proc", "nfs4", "cifs", "fuse.sshfs", "fuseblk", "9p"])
def test_memory_and_network_are_refused(tmp_path: Path, kind: str) -> None:
    mounts = mount_table(tmp_path, ("/", "ext4"), (str(tmp_path), kind))

    with pytest.raises(CacheRootRefused, match=rf"is on {kind}, .*expected a disk of this machine"):
        CacheFolder(tmp_path / "cache", mounts=mounts)
    assert not (tmp_path / "cache").exists()


def test_a_link_to_memory_is_refused(tmp_path: Path) -> None:
    mounts = mount_table(tmp_path, ("/", "ext4"), (str(tmp_path.resolve() / "memory"), "tmpfs"))
    (tmp_path / "memory").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "memory")

    with pytest.raises(CacheRootRefused, match="is on tmpfs"):
        CacheFolder(tmp_path / "cache", mounts=mounts)


def test_parts_on_several_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def elsewhere(path: Path, **flags: bool) -> os.stat_result:
        mode, inode, device, *rest = stat(path, **flags)
        return os.stat_result((mode, inode, device + (Path(path).name == "temporary"), *rest))

    monkeypatch.setattr("os.stat", elsewhere)
    with pytest.raises(CacheRootRefused, match="on several file systems, so that nothing can be renamed"):
        CacheFolder(tmp_path / "cache", mounts=mount_table(tmp_path, ("/", "ext4"))).make()
    with pytest.raises(CacheRootRefused, match="on several file systems"):
        CacheFolder(tmp_path / "cache", mounts=mount_table(tmp_path, ("/", "ext4")))


def test_the_nearest_and_latest_mount_decides(tmp_path: Path) -> None:
    mounts = mount_table(tmp_path, ("/", "ext4"), ("/a", "nfs"), ("/a/b", "xfs"), ("/a/b", "tmpfs"))

    found = {path: file_system(Path(path), mounts) for path in ("/x", "/a/c", "/a/b/c", "/ab")}
    spaced = mount_table(tmp_path, ("/", "ext4"), ("/with\\040space\\134", "nfs"))
    assert file_system(Path("/with space\\/c"), spaced) == "nfs"

    assert found == {"/x": "ext4", "/a/c": "nfs", "/a/b/c": "tmpfs", "/ab": "ext4"}


@pytest.mark.parametrize("name", ["no-break\u00a0space", "line\u2028separator", "unit\x1fseparator", "latin-1-\udce9"])
def test_mounts_are_told_apart_whatever_their_names_are(tmp_path: Path, name: str) -> None:
    """Only a blank ends a name, and only a line feed a line; in names the system writes both as octal numbers."""
    mounts = mount_table(tmp_path, ("/", "ext4"), (f"/{name}", "nfs4"), ("/after", "xfs"))

    found = [file_system(Path(path), mounts) for path in (f"/{name}/cache", "/x", "/after")]

    assert found == ["nfs4", "ext4", "xfs"]


def test_a_file_system_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheRootRefused, match="its file system is unknown"):
        file_system(tmp_path, tmp_path / "missing")


@pytest.mark.parametrize("name", ["file/cache", "a\0b", "x" * 300])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheRootRefused, match="cannot be made"):
        CacheFolder(tmp_path / name, mounts=mount_table(tmp_path, ("/", "ext4")))


def test_a_folder_in_which_nothing_may_be_made_is_refused_and_a_cache_in_it_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This user may be the system's, who may write anywhere."""
    mounts = mount_table(tmp_path, ("/", "ext4"))
    monkeypatch.setattr("offload.cache_folder.os.access", lambda path, mode: False)
    with pytest.raises(CacheRootRefused, match=rf"cannot be made \(nothing may be written in {tmp_path}\)"):
        CacheFolder(tmp_path / "cache", mounts=mounts)
    (tmp_path / "cache" / "entries").mkdir(parents=True)
    assert CacheFolder(tmp_path / "cache", mounts=mounts).is_there


def test_looking_at_a_folder_writes_nothing_and_the_first_use_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CacheFolder(tmp_path / "new" / "cache", mounts=mount_table(tmp_path, ("/", "ext4")))
    cache = WeightCache(folder, lock_timeout_s=1.0)
    assert cache.find(request(), Validation.FAST) is None
    assert (folder.is_there, (tmp_path / "new").exists()) == (False, False)
    open_entry(cache).close()
    assert folder.is_there

    def refused(path: Path, **options: bool) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(CacheRootRefused, match=r"cannot be made \(Permission denied\)"):
        folder.make()


def test_a_pipe_with_the_name_of_a_request_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "request.json")
    assert read_address(tmp_path / "request.json") is None
