"""The one source of time of the server: a callable, so that tests pass their own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds from an arbitrary start; never goes back."""

monotonic: Clock = time.monotonic
