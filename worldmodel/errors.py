"""Errors of the worker process that the server understands. Torch-free.

WorldModelError
├── RequestRefused        the request was wrong; nothing was touched, the session lives on
├── TickRolledBack        the tick failed and nothing of it is left; `transient` says whether a retry may help
├── OutcomeUnknown        the worker can't say what is left; the session must be released
└── WorkerUnavailable     no worker, or it died, or it did not answer in time
    └── LoadFailed        the model could not be loaded or warmed up
"""

from __future__ import annotations


class WorldModelError(Exception):
    """Base of all errors that cross the worker socket.

    `code` is a stable word for programs, the text is for people, `field` names the offending input field, if any.
    """

    code = "worker_error"

    def __init__(self, message: str, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        if code is not None:
            self.code = code


class RequestRefused(WorldModelError):
    """Refuse a request before anything changed."""

    code = "bad_request"


class TickRolledBack(WorldModelError):
    """Report a failed tick of which nothing is left (design rule 5)."""

    code = "tick_rolled_back"

    def __init__(
        self, message: str, *, transient: bool = False, code: str | None = None, field: str | None = None
    ) -> None:
        super().__init__(message, code=code, field=field)
        self.transient = transient


class OutcomeUnknown(WorldModelError):
    """Report that the state of the session after the failure is not known."""

    code = "outcome_unknown"


class WorkerUnavailable(WorldModelError):
    """Report that the worker is dead, loading, or did not answer in time."""

    code = "worker_unavailable"


class LoadFailed(WorkerUnavailable):
    """Report that the model could not be loaded or warmed up."""

    code = "load_failed"
