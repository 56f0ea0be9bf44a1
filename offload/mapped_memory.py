"""Host memory that begins at a page: a mapped file, read-only and shared, or memory of this process."""

from __future__ import annotations

import mmap
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offload.errors import OffloadError


class MappedMemory:
    """One mapping. Build it with `of_file` or `own`; whoever does closes it, after the last view is gone."""

    def __init__(self, mapping: mmap.mmap, *, name: str, is_read_only: bool) -> None:
        self._mapping = mapping
        self.name = name
        self.is_read_only = is_read_only
        self._bytes: Tensor | None = self._view()

    def _view(self) -> Tensor:
        with warnings.catch_warnings():
            # torch warns that it cannot keep anybody from writing to read-only memory. Nobody here does.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            # Through an array, which tells the mapping that it is viewed; torch's own `frombuffer` does not.
            return torch.from_numpy(np.frombuffer(self._mapping, dtype=np.uint8))

    @classmethod
    def of_file(cls, file: Path) -> MappedMemory:
        """Map a whole file, read-only. Its pages are the system's cache: processes that map it share them.

        Raises `OffloadError` for a file that is missing, empty, or no regular one.
        """
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise OffloadError(f"{file}: cannot be mapped ({error})") from error
        return cls(mapping, name=str(file), is_read_only=True)

    @classmethod
    def own(cls, num_bytes: int) -> MappedMemory:
        """Take memory of this process, zeroed, in whole pages."""
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(mapping, name="own memory", is_read_only=False)

    @property
    def bytes(self) -> Tensor:
        """The memory as uint8 [num_bytes]. Raises `OffloadError` after `close`."""
        if self._bytes is None:
            raise OffloadError(f"{self.name}: the mapping is closed")
        return self._bytes

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.bytes.numel()

    def close(self) -> None:
        """Give the addresses back. Raises `OffloadError`, and stays open, while somebody still has a view.

        Who page-locked the memory must have unlocked it before.
        """
        if self._bytes is None:
            return
        self._bytes = None
        try:
            self._mapping.close()
        except BufferError as error:
            self._bytes = self._view()
            raise OffloadError(f"{self.name}: a view of the mapping is still in use") from error
