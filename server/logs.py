"""Log lines of the server process: text for people, or one JSON object a line for machines.

Who logs about a session passes `extra=about(...)`; the ids become fields of the JSON line. The worker process writes
text to the same standard error, and its lines are not JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from server.config import ServerSection

FIELDS = ("session_id", "request_id", "event_ids")

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

OURS = "server"


def about(
    *, session_id: str, request_id: str | None = None, event_ids: Iterable[int] = ()
) -> dict[str, str | list[int]]:
    """Return the `extra` of a log call that concerns a session, perhaps a request, perhaps events."""
    extra: dict[str, str | list[int]] = {"session_id": session_id}
    if request_id is not None:
        extra["request_id"] = request_id
    if ids := list(event_ids):
        extra["event_ids"] = ids
    return extra


class JsonFormatter(logging.Formatter):
    """One line of JSON a record: `time` (UTC, ISO 8601), `level`, `logger`, `message`, our ids, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: record.__dict__[name] for name in FIELDS if name in record.__dict__})
        if record.exc_info is not None and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(section: ServerSection, stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream` (standard error) in the configured form.

    Libraries speak from `warning` on, or from the configured level if that is stricter or `debug`.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if section.log_format == "json" else logging.Formatter(TEXT_FORMAT))
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(library_level(section))
    logging.getLogger(OURS).setLevel(section.log_level.upper())


@contextmanager
def configured_logging(section: ServerSection) -> Iterator[None]:
    """Have logging configured for a while, and afterwards as it was; a caller in this process goes on with its own."""
    root, ours = logging.getLogger(), logging.getLogger(OURS)
    handlers, levels = tuple(root.handlers), (root.level, ours.level)
    configure_logging(section)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        ours.setLevel(levels[1])


def library_level(section: ServerSection) -> str:
    """Return the level of everything that isn't ours: `info` of a library is not of interest."""
    return "WARNING" if section.log_level == "info" else section.log_level.upper()
