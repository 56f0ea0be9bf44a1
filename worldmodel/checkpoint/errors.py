"""Errors of checkpoint reading. They are load failures already, so they cross the worker's border as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from worldmodel.checkpoint.problems import Problem
from worldmodel.errors import LoadFailed, WorldModelError

logger = logging.getLogger(__name__)


class CheckpointError(LoadFailed):
    """Report a checkpoint that can't be read or doesn't fit the model, with all findings about `subject`."""

    code = "bad_checkpoint"

    def __init__(self, subject: str, *problems: str | Problem, field: str | None = None) -> None:
        super().__init__(f"{subject}: {'; '.join(map(str, problems))}", field=field)
        self.subject = subject
        self.problems = tuple(Problem(text=each) if isinstance(each, str) else each for each in problems)

    @property
    def findings(self) -> tuple[Problem, ...]:
        """The problems as findings about the subject."""
        return tuple(problem.of(self.subject) for problem in self.problems)


def findings_of(error: WorldModelError) -> tuple[Problem, ...]:
    """Return what an error has found."""
    return error.findings if isinstance(error, CheckpointError) else (Problem(text=error.message),)


def log_whole(problems: Iterable[Problem]) -> None:
    """Log the findings whose names do not fit into an error's text."""
    for problem in problems:
        if problem.is_cut:
            logger.error("%s", problem.whole)


@contextmanager
def naming(path: Path, done: str) -> Iterator[None]:
    """Turn what the operating system refuses into one sentence. `done` is what could not be done: read, written.

    Raises `CheckpointError`.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be {done} ({error.strerror or error})") from error
