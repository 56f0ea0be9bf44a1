"""What all connections together may take, and how long a body may; without sockets, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from server.auth import Authenticator
from server.config import LimitsSection, ServerSection
from server.context import ServerContext
from server.errors import ErrorCode, Unavailable
from server.metrics import Metrics
from server.shared_bounds import SharedBounds
from tests.support.virtual_time import now, run_virtual, settle

LIMITS = LimitsSection(max_bodies_bytes=100, body_timeout_s=20.0, max_connections=4, max_connections_per_token=2)


class Desk:
    """The bounds in front of an application that reads bodies, and answers once `may_answer` is set."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.may_answer, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.bodies: list[bytes] = []
        auth = Authenticator(ServerSection(tokens=("one", "other")))
        self.table = SimpleNamespace(is_stopping=False)
        context = SimpleNamespace(
            config=SimpleNamespace(limits=LIMITS), metrics=self.metrics, auth=auth, table=self.table
        )
        self.bounds = SharedBounds(self._app, cast("ServerContext", context))

    @property
    def num_bytes(self) -> float | None:
        return self.metrics.registry.get_sample_value("worldserve_body_bytes")

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.bodies.append(await Request(scope, receive).body())
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.may_end.wait()

    def post(self) -> Post:
        return Post(self)


class Post:
    """A request whose body comes part by part."""

    def __init__(self, desk: Desk) -> None:
        self._parts: deque[dict[str, Any]] = deque()
        self._came = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        scope = {"type": "http", "method": "POST", "path": "/v1/uploads", "headers": []}
        self.answer = asyncio.create_task(desk.bounds(scope, self._receive, self._send))

    async def add(self, num_bytes: int, *, is_last: bool = False) -> None:
        await self._put({"type": "http.request", "body": bytes(num_bytes), "more_body": not is_last})

    async def leave(self) -> None:
        await self._put({"type": "http.disconnect"})

    async def _put(self, message: dict[str, Any]) -> None:
        self._parts.append(message)
        self._came.set()
        await settle()

    async def _receive(self) -> Any:
        while not self._parts:
            self._came.clear()
            await self._came.wait()
        return self._parts.popleft()

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


def test_bodies_together_are_bounded_until_they_are_answered() -> None:
    async def main() -> None:
        desk = Desk()
        first, second = desk.post(), desk.post()
        await first.add(50)
        await second.add(40)
        await first.add(10, is_last=True)
        assert (desk.num_bytes, len(desk.bodies)) == (100, 1)
        await second.add(1)
        with pytest.raises(Unavailable, match=r"100 bytes .* \(limits\.max_bodies_bytes\)") as refused:
            await second.answer
        assert (refused.value.code, refused.value.kind.http_status) == (ErrorCode.TOO_MANY_BODIES, 503)
        assert refused.value.kind.retryable
        assert desk.num_bytes == 60
        desk.may_answer.set()
        await first.answer
        assert desk.num_bytes == 0

    run_virtual(main())


def test_one_body_alone_is_bounded_by_its_own_limit_only() -> None:
    async def main() -> None:
        desk = Desk()
        desk.may_answer.set()
        alone = desk.post()
        for _ in range(5):
            await alone.add(100)
        await alone.add(0, is_last=True)
        await alone.answer
        assert (len(desk.bodies[0]), desk.num_bytes) == (500, 0)

    run_virtual(main())


def test_a_body_that_takes_too_long_is_refused() -> None:
    async def main() -> None:
        desk = Desk()
        slow, began_at = desk.post(), now()

        async def trickle() -> None:
            while True:
                await slow.add(1)
                await asyncio.sleep(1)

        trickling = asyncio.create_task(trickle())
        with pytest.raises(Unavailable, match=r"within 20 s \(limits\.body_timeout_s\)") as refused:
            await slow.answer
        trickling.cancel()
        assert (refused.value.code, refused.value.kind.http_status) == (ErrorCode.BODY_TIMEOUT, 408)
        assert now() - began_at == pytest.approx(LIMITS.body_timeout_s)
        assert desk.num_bytes == 0

    run_virtual(main())


def test_an_answer_may_take_longer_than_a_body() -> None:
    async def main() -> None:
        desk = Desk()
        post = desk.post()
        await post.add(1, is_last=True)
        await asyncio.sleep(10 * LIMITS.body_timeout_s)
        desk.may_answer.set()
        await post.answer

    run_virtual(main())


def test_who_leaves_in_mid_body_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        desk = Desk()
        post = desk.post()
        await post.add(50)
        await post.leave()
        await post.answer
        assert desk.num_bytes == 0

    caplog.set_level(logging.INFO, "server")
    run_virtual(main())
    (line,) = caplog.records
    assert (line.levelname, line.exc_info) == ("INFO", None)
    assert line.getMessage() == "a client left in the middle of its request: POST '/v1/uploads'"


@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_request_that_is_cut_at_the_end_is_answered(is_stopping: bool) -> None:
    async def main() -> None:
        desk = Desk()
        cut = desk.post()
        await cut.add(50)
        desk.table.is_stopping = is_stopping
        cut.answer.cancel()
        await asyncio.wait({cut.answer})
        assert cut.answer.cancelled() is not is_stopping
        assert [message["status"] for message in cut.sent if "status" in message] == [503] * is_stopping
        assert desk.num_bytes == 0

    run_virtual(main())


def test_a_request_that_is_cut_in_its_answer_is_not_answered_twice() -> None:
    async def main() -> None:
        desk = Desk()
        desk.table.is_stopping = True
        cut = desk.post()
        desk.may_answer.set()
        desk.may_end.clear()
        await cut.add(5, is_last=True)
        cut.answer.cancel()
        await asyncio.wait({cut.answer})
        assert cut.answer.cancelled()
        assert [message["status"] for message in cut.sent] == [200]

    run_virtual(main())


async def connect(desk: Desk, sent: list[Any], *, token: str | None = None) -> None:
    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    scope = {"type": "websocket", "extensions": {"websocket.http.response": {}}, "headers": headers}
    await desk.bounds(scope, receive, send)


def test_sockets_are_bounded_and_told_when_to_come_back() -> None:
    async def main() -> None:
        desk = Desk()
        sockets = [asyncio.create_task(connect(desk, [])) for _ in range(LIMITS.max_connections)]
        await settle()
        sent: list[Any] = []
        await connect(desk, sent)
        assert sent[0]["status"] == 503
        assert (b"retry-after", b"1") in sent[0]["headers"]
        assert b"(limits.max_connections)" in sent[1]["body"]
        desk.may_answer.set()
        await asyncio.gather(*sockets)
        sent.clear()
        await connect(desk, sent)
        assert sent[0]["status"] == 200

    run_virtual(main())


def test_one_token_has_so_many_sockets_and_leaves_the_others_to_others() -> None:
    async def main() -> None:
        desk = Desk()
        sockets = [asyncio.create_task(connect(desk, [], token="one")) for _ in range(2)]
        await settle()
        refused: list[Any] = []
        await connect(desk, refused, token="one")
        assert refused[0]["status"] == 503
        assert b"this token has 2 WebSockets (limits.max_connections_per_token)" in refused[1]["body"]
        other: list[Any] = []
        sockets.append(asyncio.create_task(connect(desk, other, token="other")))
        await settle()
        desk.may_answer.set()
        await asyncio.gather(*sockets)
        assert other[0]["status"] == 200
        again: list[Any] = []
        await connect(desk, again, token="one")
        assert again[0]["status"] == 200

    run_virtual(main())
