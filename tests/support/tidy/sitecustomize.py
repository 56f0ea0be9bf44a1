"""Loaded at the start of every Python process that has this folder in PYTHONPATH: SIGUSR2 makes it tidy up.

What a process holds is then what it uses, and not what the collector and malloc have not yet got round to.
"""

import ctypes
import gc
import signal


def _tidy_up(*_: object) -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


signal.signal(signal.SIGUSR2, _tidy_up)
