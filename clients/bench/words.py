"""Numbers as people read them. Shared by the table and the plot."""

from __future__ import annotations

from clients.bench.statistics import Summary

NOTHING = "-"


def median_ms(summary: Summary | None) -> str:
    return milliseconds(None if summary is None else summary.median)


def milliseconds(value: float | None) -> str:
    """From 10 seconds on in seconds."""
    if value is None:
        return NOTHING
    if abs(value) >= 9999.5:
        return f"{value / 1000:.1f} s"
    return f"{value:.1f} ms" if abs(value) < 9.95 else f"{value:.0f} ms"


def seconds(value_s: float | None) -> str:
    return NOTHING if value_s is None else f"{value_s:.1f} s"


def share(value: float | None) -> str:
    """A share of 1 as per cent; what is neither all nor nothing never looks like it."""
    if value is None:
        return NOTHING
    shown = f"{100 * value:.1f} %"
    if shown == "100.0 %" and value < 1:
        return "> 99.9 %"
    if shown == "0.0 %" and value > 0:
        return "< 0.1 %"
    return {"100.0 %": "100 %", "0.0 %": "0 %"}.get(shown, shown)


def factor(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}x"


def rate(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f} fps"


def count(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def size(num_bytes: float | None) -> str:
    """Decimal units: 1 kB is 1000 bytes."""
    if num_bytes is None:
        return NOTHING
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if num_bytes >= 10**power:
            value = num_bytes / 10**power
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
