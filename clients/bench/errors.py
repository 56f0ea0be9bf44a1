"""The one error of the benchmark."""

from __future__ import annotations


class BenchError(Exception):
    """Report, in one sentence, why there is nothing to measure."""
