"""What all GPU tests share: the CPU computes their references on few threads, as a worker has them.

With one for each of 32 cores, and other programs on them, a reference takes minutes instead of seconds.
"""

import torch

from server.config import DEFAULT_CPU_THREADS

torch.set_num_threads(min(torch.get_num_threads(), DEFAULT_CPU_THREADS))
