"""What the log says about the worker: that it was lost and why, and that another one has taken its place."""

from __future__ import annotations

import logging

from server.worker import Worker, WorkerStatus

log = logging.getLogger(__name__)


class WorkerLog:
    """Logs each failure once, and once that it is over; progress of the next process comes with the same failure."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._logged_failure: str | None = None

    def note(self) -> None:
        """Log what is new; called after every change of the worker."""
        failure = self._worker.failure
        if failure is not None and failure != self._logged_failure:
            log.warning("the worker is %s: %s", self._worker.status, failure)
        if self._logged_failure is not None and self._worker.status is WorkerStatus.READY:
            log.info("the worker is ready again (generation %d)", self._worker.generation)
        self._logged_failure = failure
