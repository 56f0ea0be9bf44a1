"""Refuse files above the size that belongs in the repository. Called by pre-commit with the staged paths."""

from __future__ import annotations

import sys
from pathlib import Path

MAX_BYTES = 22 * 1024 * 1024


def main() -> int:
    large = [path for path in sys.argv[1:] if Path(path).is_file() and Path(path).stat().st_size > MAX_BYTES]
    for path in large:
        print(f"{path}: {Path(path).stat().st_size} bytes, more than {MAX_BYTES}")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
