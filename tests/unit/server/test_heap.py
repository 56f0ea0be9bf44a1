"""What the settings of a server's memory do, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PREAMBLE = """
import ctypes, gc, threading
from server.heap import bound_malloc, set_apart_what_stays

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = libc.fclose.argtypes = (ctypes.c_void_p,)
libc.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)
fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
Info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields]})
libc.mallinfo2.restype = Info
"""


def run(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PREAMBLE + script], capture_output=True, text=True, check=True)
    return done.stdout.split()


MAPPED = """
def mapped_by(num_bytes):
    before = libc.mallinfo2().hblks
    pointer = libc.malloc(num_bytes)
    mapped = libc.mallinfo2().hblks - before
    libc.free(pointer)
    return mapped

# glibc's own threshold rises to the size of the first large block that is freed.
print(mapped_by(20 << 20), mapped_by(1 << 20), mapped_by(64 << 10))
"""


def test_large_blocks_stay_mappings_of_their_own() -> None:
    assert run("assert bound_malloc()" + MAPPED) == ["1", "1", "0"]
    assert run(MAPPED) == ["1", "0", "0"], "otherwise this test says nothing"


HEAPS = """
import sys, tempfile
def allocate():
    libc.free(libc.malloc(1000))
threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with tempfile.NamedTemporaryFile() as file:
    stream = libc.fopen(file.name.encode(), b"w")
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap"))
"""


def test_threads_share_one_heap() -> None:
    assert run("assert bound_malloc()" + HEAPS) == ["1"]
    (without,) = run(HEAPS)
    assert int(without) > 1, "otherwise this test says nothing"


def test_what_was_there_at_the_start_is_not_looked_through_again() -> None:
    known, found = run("""
import fastapi
set_apart_what_stays()
known = len(gc.get_objects())
class Node: pass
node = Node(); node.itself = node; del node
print(known, gc.collect())
""")
    assert int(known) < 1000
    assert int(found) >= 1, "new garbage is found as before"
