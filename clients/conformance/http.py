"""Plain HTTP requests for checks: no redirects followed by hand, no proxy, errors are answers."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from clients.conformance.errors import CheckFailed, ConformanceError
from clients.conformance.socket import Target

MAX_BODY_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status and body of an answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Raises `CheckFailed` if the body is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise CheckFailed(f"an HTTP body is not JSON: {self.body[:80]!r}") from error


async def request(
    target: Target, method: str, path: str, *, body: bytes | None = None, content_type: str = "application/json"
) -> Answer:
    """Send one request. Raises `ConformanceError` if nobody answers."""
    return await asyncio.to_thread(_request, target, method, path, body, content_type)


def _request(target: Target, method: str, path: str, body: bytes | None, content_type: str) -> Answer:
    headers = {} if target.token is None else {"Authorization": f"Bearer {target.token}"}
    if body is not None:
        headers["Content-Type"] = content_type
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        prepared = urllib.request.Request(target.http + path, data=body, headers=headers, method=method)
        with opener.open(prepared, timeout=target.answer_s) as answer:
            return Answer(status=answer.status, body=answer.read(MAX_BODY_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(status=error.code, body=error.read(MAX_BODY_BYTES))
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConformanceError(f"no server answers at {target.http}{path}: {cause}") from error
