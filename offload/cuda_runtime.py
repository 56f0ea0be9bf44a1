"""The four calls of the CUDA runtime that page-locking host memory takes, behind a Protocol.

The runtime library is the one that torch has loaded into this process; nothing is searched for on disk.
"""

from __future__ import annotations

import ctypes
import re
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from offload.errors import RegistrationFailed

SUCCESS = 0
REGISTER_READ_ONLY = 0x08
"""cudaHostRegisterReadOnly: the device only reads; what a mapping without write permission needs."""

_HOST_MEMORY = 1
"""cudaMemoryTypeHost: page-locked memory of the host."""


class CudaHostRuntime(Protocol):
    """Page-locking by address. Calls return CUDA error codes, 0 for success, and leave no error behind for torch."""

    def register(self, address: int, num_bytes: int, *, is_read_only: bool) -> int: ...

    def unregister(self, address: int) -> int: ...

    def is_locked(self, address: int) -> bool:
        """Tell whether the runtime knows an address as page-locked."""
        ...

    def error_text(self, code: int) -> str: ...


class _PointerAttributes(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        # Later versions of the runtime append fields.
        ("reserved", ctypes.c_long * 16),
    )


class LoadedCudaRuntime:
    """The runtime of this process. Calls raise `RegistrationFailed` where torch has loaded none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _library(self) -> ctypes.CDLL:
        path = _loaded_library()
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise RegistrationFailed(f"{path}: can't be opened again ({error})") from error
        library.cudaGetErrorString.restype = ctypes.c_char_p
        return library

    def register(self, address: int, num_bytes: int, *, is_read_only: bool) -> int:
        flags = REGISTER_READ_ONLY if is_read_only else 0
        with torch.cuda.device(self._device):
            code = self._library.cudaHostRegister(
                ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(flags)
            )
        return self._cleared(code)

    def unregister(self, address: int) -> int:
        with torch.cuda.device(self._device):
            return self._cleared(self._library.cudaHostUnregister(ctypes.c_void_p(address)))

    def is_locked(self, address: int) -> bool:
        attributes = _PointerAttributes()
        code = self._library.cudaPointerGetAttributes(ctypes.byref(attributes), ctypes.c_void_p(address))
        return self._cleared(code) == SUCCESS and attributes.type == _HOST_MEMORY

    def error_text(self, code: int) -> str:
        text: bytes = self._library.cudaGetErrorString(ctypes.c_int(code))
        return f"CUDA error {code}, {text.decode()}"

    def _cleared(self, code: int) -> int:
        """Take an error that was answered for off the runtime: torch's next kernel would report it as its own."""
        if code != SUCCESS:
            self._library.cudaGetLastError()
        return code


def _loaded_library() -> str:
    torch.cuda.init()
    return find_runtime(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))


def find_runtime(maps: str) -> str:
    """Return the path of the CUDA runtime library among the mappings of a process, in the form of `/proc/PID/maps`.

    Raises `RegistrationFailed` if there is none.
    """
    for line in maps.splitlines():
        # Address, rights, offset, device, inode, then the path, which may have blanks.
        path = line.split(maxsplit=5)[5:]
        if path and re.fullmatch(r"/(.*/)?libcudart[^/]*\.so[^/]*", path[0]):
            return path[0]
    raise RegistrationFailed("torch has loaded no CUDA runtime library into this process")
