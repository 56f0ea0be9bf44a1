"""The HTTP interface against its own OpenAPI document: generated requests, good and bad, never break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.support.server_process import ANSWER_TIMEOUT_S, ServerProcess, server_process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("rest")) as process:
        yield process


def test_generated_requests_get_documented_answers(server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}openapi.json", timeout=ANSWER_TIMEOUT_S)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 8

    for operation in operations:

        @settings(
            max_examples=20,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        @given(case=operation.as_strategy())
        def answers_as_documented(case: Case) -> None:
            # A schema cannot say which names and tokens exist, so valid requests may be refused.
            case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=ANSWER_TIMEOUT_S)

        answers_as_documented()


def test_nothing_was_left_behind(server: ServerProcess) -> None:
    """Runs last in this file: what the requests created can be closed, and the server is ready."""
    server.end_all_sessions()
    server.until_ready()
