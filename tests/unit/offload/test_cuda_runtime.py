"""The CUDA runtime library of this process, as its mappings name it."""

from __future__ import annotations

import pytest
import torch

from offload import cuda_runtime
from offload.cuda_runtime import LoadedCudaRuntime, find_runtime
from offload.errors import RegistrationFailed

OTHERS = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 12   /usr/bin/python3.12
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
7f0000002000-7f0000003000 r-xp 00000000 08:01 13   /opt/libcudart.so.12/other.so
7ffd00000000-7ffd00001000 rw-p 00000000 00:00 0    [stack]
"""


@pytest.mark.parametrize(
    "path", ["/usr/lib/libcudart.so", "/home/me/my venv/lib/nvidia/libcudart-9335f6a2.so.12", "/lib 64/libcudart.so.13"]
)
def test_the_library_is_found_whatever_its_folder_is_called(path: str) -> None:
    assert find_runtime(f"{OTHERS}7f0100000000-7f0100001000 r-xp 00000000 08:01 14   {path}\n{OTHERS}") == path


def test_without_a_library_nothing_can_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RegistrationFailed, match="no CUDA runtime library"):
        find_runtime(OTHERS)
    monkeypatch.setattr(cuda_runtime, "_loaded_library", lambda: "/nowhere/libcudart.so.12")
    with pytest.raises(RegistrationFailed, match=r"^/nowhere/libcudart\.so\.12: can't be opened again"):
        LoadedCudaRuntime(torch.device("cuda")).is_locked(4096)
