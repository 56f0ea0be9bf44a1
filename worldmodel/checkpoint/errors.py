"""Errors of checkpoint reading. They are load failures already, so they cross the worker's border as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldmodel.errors import LoadFailed


class CheckpointError(LoadFailed):
    """Report a checkpoint that can't be read or doesn't fit the model. `problems` has one sentence per finding."""

    code = "bad_checkpoint"

    def __init__(self, subject: str, *problems: str) -> None:
        super().__init__(f"{subject}: {'; '.join(problems)}")
        self.subject = subject
        self.problems = problems


@contextmanager
def naming(path: Path, done: str) -> Iterator[None]:
    """Turn what the operating system refuses into one sentence. `done` is what could not be done: read, written.

    Raises `CheckpointError`.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be {done} ({error.strerror or error})") from error
