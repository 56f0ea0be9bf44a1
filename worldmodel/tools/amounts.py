"""Numbers for people: bytes and parameters in the unit that shows them. Torch-free."""

from __future__ import annotations

_LARGE = 0.1
"""From a tenth of the larger unit on it is used."""


def bytes_text(num_bytes: int, digits: int = 1) -> str:
    """Return bytes as GB, or as MB where GB would show nothing."""
    if num_bytes >= _LARGE * 1e9:
        return f"{num_bytes / 1e9:.{digits}f} GB"
    return f"{num_bytes / 1e6:.{digits}f} MB"


def parameters_text(num_parameters: int) -> str:
    """Return a number of parameters in billions, or in millions where billions would show little."""
    if num_parameters >= _LARGE * 1e9:
        return f"{num_parameters / 1e9:.2f} billion parameters"
    return f"{num_parameters / 1e6:.2f} million parameters"
