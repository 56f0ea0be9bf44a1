"""Loaded at the start of every Python process that has this folder in PYTHONPATH: SIGUSR2 makes it tidy up.

What a process holds is then what it uses, and not what the collector and malloc have not yet got round to. How often it
has tidied up is in its name, which others can read.
"""

import ctypes
import gc
import itertools
import signal

PR_SET_NAME = 15

_times = itertools.count(1)
_libc = ctypes.CDLL(None)


def _tidy_up(*_: object) -> None:
    gc.collect()
    _libc.malloc_trim(0)
    # Python's handlers run in the main thread, whose name is that of the process.
    _libc.prctl(PR_SET_NAME, b"tidy %d" % next(_times), 0, 0, 0)


signal.signal(signal.SIGUSR2, _tidy_up)
