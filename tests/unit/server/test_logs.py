"""Log lines for machines and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from server.config import ServerSection
from server.config_values import ConfigError
from server.console import LoadLog
from server.logs import about, configure_logging, configured_logging
from worldmodel.messages import LoadProgress, LoadStage


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Put the loggers back as pytest made them."""
    root, ours = logging.getLogger(), logging.getLogger("server")
    handlers, level, our_level = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def configured(**section: str) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(ServerSection(**section), stream)  # type: ignore[arg-type]
    return stream


def test_a_json_line_has_the_ids_that_apply() -> None:
    stream = configured(log_format="json")
    extra = about(session_id="s-1", request_id="s-1-7", event_ids=(3, 4))
    logging.getLogger("server.actor").warning("session %s failed", "s-1", extra=extra)
    logging.getLogger("server.actor").info("started", extra=about(session_id="s-2"))
    first, second = lines(stream)
    assert datetime.fromisoformat(first.pop("time")).utcoffset() is not None
    assert first == {
        "level": "warning",
        "logger": "server.actor",
        "message": "session s-1 failed",
        "session_id": "s-1",
        "request_id": "s-1-7",
        "event_ids": [3, 4],
    }
    assert second.keys() == {"time", "level", "logger", "message", "session_id"}


def test_a_traceback_stays_in_its_line() -> None:
    stream = configured(log_format="json")
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("server").exception("broke")
    (line,) = lines(stream)
    assert line["message"] == "broke"
    assert "ValueError: a\nb" in line["traceback"]


def test_text_is_for_people() -> None:
    stream = configured()
    logging.getLogger("server.actor").info("session %s started", "s-1", extra=about(session_id="s-1"))
    assert stream.getvalue().endswith("INFO server.actor: session s-1 started\n")


@pytest.mark.parametrize(("level", "expected"), [("debug", ["debug", "library info"]), ("info", []), ("error", [])])
def test_libraries_are_quieter_than_we_are(level: str, expected: list[str]) -> None:
    stream = configured(log_format="json", log_level=level)
    logging.getLogger("server.x").debug("debug")
    logging.getLogger("a_library").info("library info")
    assert [line["message"] for line in lines(stream)] == expected


def test_a_second_call_replaces_the_first() -> None:
    configured(log_format="json")
    stream = configured(log_format="json")
    logging.getLogger("server").error("once")
    assert len(lines(stream)) == 1


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.log_format: expected one of text, json, got 'xml'"):
        ServerSection(log_format="xml")


def test_each_load_stage_is_one_line() -> None:
    stream = configured(log_format="json")
    shown = LoadLog()
    for stage, fraction in (
        (LoadStage.SPAWN, 0.0),
        (LoadStage.TRANSFORMER, 0.1),
        (LoadStage.TRANSFORMER, 0.9),
        (LoadStage.READY, 1.0),
    ):
        shown.show(LoadProgress(stage=stage, fraction=fraction))
    assert [line["message"] for line in lines(stream)] == ["starting the worker", "loading the transformer", "ready"]


def test_logging_is_as_it_was_once_the_server_has_ended() -> None:
    root, ours = logging.getLogger(), logging.getLogger("server")
    before = (list(root.handlers), root.level, ours.level)
    with configured_logging(ServerSection(log_level="debug")):
        assert len(root.handlers) == 1
        assert root.handlers[0] not in before[0]
        assert ours.level == logging.DEBUG
    assert (list(root.handlers), root.level, ours.level) == before
