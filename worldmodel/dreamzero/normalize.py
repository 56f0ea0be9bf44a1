"""Between a robot's own units and the numbers of the network, by the statistics of the training data. NumPy only.

    mode      forward                                            inverse
    q99       2 (x - q01) / (q99 - q01) - 1, clipped to [-1, 1]  (n + 1) / 2 (q99 - q01) + q01
    min_max   the same with min and max                          the same
    mean_std  (x - mean) / std                                   n std + mean
    scale     x / max(|min|, |max|)                              n max(|min|, |max|)
    binary    x > 0.5                                            n > 0.5

A dimension that never varied keeps its value under q99 and mean_std (q99 clips it too), and becomes 0 under min_max and
scale; the inverse gives the one value it had. Source: DreamZero official code, its state and action transforms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]


class NormalizationMode(StrEnum):
    """How one key is normalised; see the head of this file."""

    Q99 = "q99"
    MIN_MAX = "min_max"
    MEAN_STD = "mean_std"
    SCALE = "scale"
    BINARY = "binary"


NEEDED: dict[NormalizationMode, tuple[str, ...]] = {
    NormalizationMode.Q99: ("q01", "q99"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.SCALE: ("min", "max"),
    NormalizationMode.BINARY: (),
}
"""Statistics that a mode uses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Normalizer:
    """One key. `low` and `high` are what the mode needs: two quantiles, two extremes, or mean and deviation.

    They are [dims], or [rows, dims] where every row of an action chunk has statistics of its own.
    """

    mode: NormalizationMode
    low: Floats
    high: Floats

    @property
    def is_by_row(self) -> bool:
        """Whether every row of an action chunk has statistics of its own."""
        return self.low.ndim == self.high.ndim == 2

    def forward(self, x: Floats) -> Floats:
        """Normalise values [..., dims], or [..., rows, dims] with statistics by row; keeps the floating type."""
        low, high = self.low.astype(x.dtype), self.high.astype(x.dtype)
        match self.mode:
            case NormalizationMode.Q99:
                return np.clip(np.where(low == high, x, _to_signed(x, low, high)), -1, 1)
            case NormalizationMode.MIN_MAX:
                return np.clip(np.where(low == high, 0, _to_signed(x, low, high)), -1, 1).astype(x.dtype)
            case NormalizationMode.MEAN_STD:
                return np.where(high == 0, x, (x - low) / np.where(high == 0, 1, high))
            case NormalizationMode.SCALE:
                largest = np.maximum(np.abs(low), np.abs(high))
                return np.where(largest == 0, 0, x / np.where(largest == 0, 1, largest)).astype(x.dtype)
            case NormalizationMode.BINARY:
                return (x > 0.5).astype(x.dtype)

    def inverse(self, n: Floats) -> Floats:
        """Bring normalised values back; nothing is clipped."""
        low, high = self.low.astype(n.dtype), self.high.astype(n.dtype)
        match self.mode:
            case NormalizationMode.Q99 | NormalizationMode.MIN_MAX:
                return (n + 1) / 2 * (high - low) + low
            case NormalizationMode.MEAN_STD:
                return n * high + low
            case NormalizationMode.SCALE:
                return n * np.maximum(np.abs(low), np.abs(high))
            case NormalizationMode.BINARY:
                return (n > 0.5).astype(n.dtype)


def _to_signed(x: Floats, low: Floats, high: Floats) -> Floats:
    span = np.where(low == high, 1, high - low)
    return 2 * (x - low) / span - 1


def count_of_numbers(count: int, kind: str = "") -> str:
    """Return "1 number" or "7 numbers", with a word for their kind."""
    return f"{count} {kind}number{'' if count == 1 else 's'}"


def read_normalizer(
    statistics: object,
    mode: NormalizationMode,
    num_dims: int,
    *,
    where: str,
    problems: list[str],
    num_rows: int | None = None,
) -> Normalizer:
    """Take what a mode needs out of one key's statistics. Appends to `problems` what is missing or misshaped.

    `num_rows`: the rows that may have statistics of their own, None where there are no rows.
    """
    shapes = ((num_dims,),) if num_rows is None else ((num_dims,), (num_rows, num_dims))
    rows = "" if num_rows is None else f", or {num_rows} rows of them"
    arrays: list[Floats] = []
    for name in NEEDED[mode]:
        value = statistics.get(name) if isinstance(statistics, Mapping) else None
        if value is None:
            problems.append(f"{where}: {name} is missing, which normalization by {mode} needs")
            continue
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.empty(0)
        if array.dtype.kind not in "iuf" or array.shape not in shapes or not np.isfinite(array).all():
            problems.append(f"{where}: {name} must be {count_of_numbers(num_dims, 'finite ')}{rows}")
            continue
        arrays.append(array.astype(np.float64))
    blank = np.zeros(num_dims)
    low, high = arrays if len(arrays) == 2 else (blank, blank)
    if (low > high).any() and mode is not NormalizationMode.MEAN_STD:
        problems.append(f"{where}: {' must not exceed '.join(NEEDED[mode])}")
    return Normalizer(mode=mode, low=low, high=high)
