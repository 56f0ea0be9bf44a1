"""Errors of checkpoint reading. They are load failures already, so they cross the worker's border as they are."""

from __future__ import annotations

from worldmodel.errors import LoadFailed


class CheckpointError(LoadFailed):
    """Report a checkpoint that can't be read or doesn't fit the model. `problems` has one sentence per finding."""

    code = "bad_checkpoint"

    def __init__(self, subject: str, *problems: str) -> None:
        super().__init__(f"{subject}: {'; '.join(problems)}")
        self.subject = subject
        self.problems = problems
