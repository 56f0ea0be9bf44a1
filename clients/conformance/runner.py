"""Run all checks against one server and say what came of each."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from clients.conformance import checks_chunks, checks_http, checks_life, checks_messages, checks_start
from clients.conformance.check import Check, Context
from clients.conformance.errors import CheckFailed, ConformanceError, NotApplicable
from clients.conformance.http import request
from clients.conformance.picture import PROMPT, png
from clients.conformance.socket import Target
from clients.python.link import server_url, world_url

ALL_CHECKS: tuple[Check, ...] = (
    *checks_start.CHECKS,
    *checks_messages.CHECKS,
    *checks_chunks.CHECKS,
    *checks_life.CHECKS,
    *checks_http.CHECKS,
)


class Outcome(StrEnum):
    """What came of a check.

    NOT_APPLICABLE: the rule cannot be seen on this server, or with this client's pacing; that is no failure.
    NOT_SEEN: the client did not do what the rule is about; without it nobody can say that it conforms.
    """

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_APPLICABLE = "N/A"
    NOT_SEEN = "NOT SEEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One check and its outcome; `reason` is empty for a pass."""

    name: str
    section: str
    rule: str
    outcome: Outcome
    reason: str
    took_s: float


def addresses(url: str) -> tuple[str, str]:
    """Return the WebSocket and the HTTP address of a server. Raises `ConformanceError` for no URL."""
    try:
        return world_url(url), server_url(url)
    except ValueError as error:
        raise ConformanceError(str(error)) from error


async def find_context(
    *, world: str, http: str, token: str | None, answer_s: float, quiet_s: float, image: dict[str, str] | None = None
) -> Context:
    """Ask the server what it is. Raises `ConformanceError` unless it is ready."""
    target = Target(
        world=world,
        http=http,
        token=token,
        image=image or {"base64": base64.b64encode(png()).decode()},
        prompt=PROMPT,
        answer_s=answer_s,
        quiet_s=quiet_s,
    )
    answer = await request(target, "GET", "/v1/info")
    if answer.status != 200:
        hint = ": it asks for a token (--token)" if answer.status == 401 else ""
        raise ConformanceError(f"GET {http}/v1/info answered {answer.status}{hint}")
    try:
        info = answer.json()
    except CheckFailed as error:
        raise ConformanceError(f"{http}/v1/info: {error}") from error
    if not isinstance(info, dict) or not info.get("ready"):
        reason = info.get("reason") if isinstance(info, dict) else "it is no JSON object"
        raise ConformanceError(f"the server at {http} is not ready: {reason}")
    return Context(target=target, info=info)


def describe(context: Context) -> str:
    """Say in a few words what the server is, as far as it tells."""
    info = context.info
    size = f"{info.get('width', '?')}x{info.get('height', '?')}"
    return (
        f"{info.get('name', 'unknown')} {info.get('version', '')}, {info.get('served_model', 'unknown model')} {size}"
    )


def select(names: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks of these names, or that begin with one of them; all for none. Raises `ConformanceError`."""
    if not names:
        return ALL_CHECKS
    for name in names:
        if not any(check.name.startswith(name) for check in ALL_CHECKS):
            known = ", ".join(check.name for check in ALL_CHECKS)
            raise ConformanceError(f"there is no check {name!r}: {known}")
    return tuple(check for check in ALL_CHECKS if check.name.startswith(tuple(names)))


async def run_checks(context: Context, checks: Sequence[Check], *, on_start: Callable[[Check], None]) -> list[Result]:
    """Run checks one after the other; each gets a result, whatever happened in it."""
    results = []
    for check in checks:
        on_start(check)
        results.append(await run_check(context, check))
    return results


async def run_check(context: Context, check: Check) -> Result:
    began_s = time.monotonic()
    outcome, reason = Outcome.PASS, ""
    try:
        await check.run(context)
    except CheckFailed as error:
        outcome, reason = Outcome.FAIL, str(error)
    except NotApplicable as error:
        outcome, reason = Outcome.NOT_APPLICABLE, str(error)
    except ConformanceError as error:
        outcome, reason = Outcome.FAIL, str(error)
    except (KeyError, TypeError, ValueError) as error:
        # A body or message without what the protocol promises.
        outcome, reason = Outcome.FAIL, f"{type(error).__name__}: {error}"
    return Result(
        name=check.name,
        section=check.section,
        rule=check.rule,
        outcome=outcome,
        reason=reason,
        took_s=time.monotonic() - began_s,
    )
