"""A small weight cache for tests, and a program that uses it in processes of its own: `python -m` this module ROOT.

The program reads one JSON list of cases from standard input and writes one list of results. It forks for every process
of a case, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from offload.cache_folder import CacheFolder
from offload.cache_manifest import CacheRequest, Validation
from offload.errors import CacheError
from offload.layout import TensorSpec
from offload.mapped_memory import MappedMemory
from offload.weight_cache import CacheEntry, WeightCache

FILES = ("layer-00000.safetensors", "layer-00001.safetensors")
MOUNTS = "1 0 8:1 / / rw - ext4 /dev/disk rw\n"


def open_folder(root: Path) -> CacheFolder:
    """Open a cache that takes the file system it is on for a disk, whatever tests run on."""
    root.mkdir(parents=True, exist_ok=True)
    mounts = root / "mountinfo"
    # Processes do this at once, and none may read what another has begun to write.
    whole = root / f"mountinfo.{os.getpid()}"
    whole.write_text(MOUNTS, encoding="utf-8")
    whole.replace(mounts)
    folder = CacheFolder(root, mounts=mounts)
    folder.make()
    return folder


def request(source: str = "checkpoint", **metadata: str) -> CacheRequest:
    """Return a request for two files of two tensors."""
    specs = (
        TensorSpec(name="weight", dtype=torch.bfloat16, shape=(16, 8)),
        TensorSpec(name="scales", dtype=torch.float32, shape=(1, 16)),
    )
    files = {
        file: [TensorSpec(name=f"{number}.{spec.name}", dtype=spec.dtype, shape=spec.shape) for spec in specs]
        for number, file in enumerate(FILES)
    }
    return CacheRequest(source=source, metadata=metadata, files=files)


def make(file: str, seed: int = 0) -> Iterable[torch.Tensor]:
    """Return the tensors of one file."""
    generator = torch.Generator().manual_seed(10 * seed + FILES.index(file))
    return [
        torch.randn(16, 8, generator=generator).bfloat16(),
        torch.randn(1, 16, generator=generator),
    ]


def open_entry(cache: WeightCache, validation: Validation = Validation.FULL) -> CacheEntry:
    return cache.open_or_build(request(), make, validation)


def is_locked_for_others(file: Path) -> bool:
    """Tell whether another process is refused a lock; a process never sees its own."""
    program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    ended = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, check=False)
    return ended.returncode != 0


@contextmanager
def held_by_another(file: Path) -> Iterator[int]:
    """Have a process of its own hold a lock; gives its number."""
    program = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder.pid
        holder.communicate()


def _child(root: Path, case: dict[str, object]) -> int:
    """Use the cache as the case says; the exit code tells what came of it."""
    steps: list[str] = []

    def on_step(step: str) -> None:
        steps.append(step)
        if len(steps) - 1 == case.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(str(case.get("step_s", 0.0))))

    folder = open_folder(root)
    if "damage" in case:
        [entry] = folder.entries.iterdir()
        damaged = entry / FILES[0]
        damaged.chmod(0o644)
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    cache = WeightCache(folder, lock_timeout_s=float(str(case.get("timeout_s", 30.0))), on_step=on_step)
    try:
        entry = open_entry(cache)
    except CacheError:
        return 3
    if "map" in case:
        # Every page is touched, so that it counts as this process's.
        mapped = MappedMemory.of_file(Path(str(case["map"])))
        mapped.bytes.sum()
    if "hold_s" in case:
        Path(f"{case['ready']}.{os.getpid()}").touch()
        time.sleep(float(str(case["hold_s"])))
    return 1 if entry.was_built else 0


def _run(case: dict[str, object]) -> list[int]:
    """Run the processes of a case at the same time; return exit codes, negative for signals."""
    pids = []
    for _ in range(int(str(case.get("processes", 1)))):
        pid = os.fork()
        if pid == 0:
            os._exit(_child(Path(str(case["root"])), case))
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([_run(case) for case in json.load(sys.stdin)]))
