"""The table of errors is complete and consistent, and worker errors find their place in it."""

from __future__ import annotations

import pytest

from server.errors import KINDS, BadInput, ErrorCode, ServerError, SessionFailed, Unavailable, from_worker
from worldmodel.errors import (
    LoadFailed,
    OutcomeUnknown,
    RequestRefused,
    TickRolledBack,
    WorkerUnavailable,
    WorldModelError,
)


def test_every_code_has_a_row() -> None:
    assert set(KINDS) == set(ErrorCode)


@pytest.mark.parametrize("code", ErrorCode)
def test_a_closed_socket_means_a_fatal_error_and_the_other_way_round(code: ErrorCode) -> None:
    assert (KINDS[code].close_code is not None) == KINDS[code].fatal


@pytest.mark.parametrize("code", ErrorCode)
def test_http_statuses_are_errors(code: ErrorCode) -> None:
    assert 400 <= KINDS[code].http_status <= 599


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (RequestRefused("no", code="bad_control", field="x"), BadInput, ErrorCode.BAD_CONTROL),
        (RequestRefused("no", code="something_new"), BadInput, ErrorCode.TICK_FAILED),
        (TickRolledBack("no"), SessionFailed, ErrorCode.TICK_FAILED),
        (OutcomeUnknown("no"), SessionFailed, ErrorCode.TICK_FAILED),
        (WorkerUnavailable("no"), Unavailable, ErrorCode.WORKER_UNAVAILABLE),
        (LoadFailed("no"), Unavailable, ErrorCode.WORKER_UNAVAILABLE),
    ],
)
def test_worker_errors_are_translated(error: WorldModelError, kind: type[ServerError], code: ErrorCode) -> None:
    translated = from_worker(error, fallback=ErrorCode.TICK_FAILED, request_id="r-1")
    assert type(translated) is kind
    assert (translated.code, translated.message, translated.request_id) == (code, "no", "r-1")
    assert translated.field == error.field
