"""What all GPU tests share: exact float32 on the device, references on few threads of the CPU, as a worker has them.

With one thread for each of 32 cores, and other programs on them, a reference takes minutes instead of seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from server.config import DEFAULT_CPU_THREADS

torch.set_num_threads(min(torch.get_num_threads(), DEFAULT_CPU_THREADS))


@pytest.fixture(autouse=True, scope="module")
def exact_float32() -> Iterator[None]:
    """Keep products and convolutions from taking their inputs as TF32; before fixtures that compute for a module."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
