"""Amounts for people."""

from __future__ import annotations

import pytest

from worldmodel.tools.amounts import bytes_text, parameters_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MB"), (8 * 2**20, "8.4 MB"), (99_000_000, "99.0 MB"), (10**8, "0.1 GB"), (47 * 10**9, "47.0 GB")],
)
def test_bytes_are_never_shown_as_nothing(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


def test_digits_and_parameters() -> None:
    assert bytes_text(12_345_678_901, 2) == "12.35 GB"
    assert parameters_text(576_159) == "0.58 million parameters"
    assert parameters_text(24_352_135_731) == "24.35 billion parameters"
