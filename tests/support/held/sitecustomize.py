"""Loaded at the start of every Python process that has this folder in PYTHONPATH: a worker stops at once.

It goes on when it is sent SIGCONT, so that a test says how long the server is without a model.
"""

import os
import signal
import sys

if "--socket-fd" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGSTOP)
