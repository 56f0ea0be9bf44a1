"""What a check is. Each one opens its own sockets and leaves no session behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from clients.conformance.errors import CheckFailed, NotApplicable
from clients.conformance.socket import Message, Socket, Target

ACTIONS_SCHEMA = "lingbot.camera_actions.v1"

MAX_CHUNKS_TO_EFFECT = 12
"""An event that was queued is applied within so many chunks; the protocol says at the next boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The server, and what `/v1/info` says about it."""

    target: Target
    info: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One rule of docs/protocol.md. `section` is its heading there; `rule` says it in one line."""

    name: str
    section: str
    rule: str
    run: Callable[[Context], Awaitable[None]]


def keys(*held: str) -> dict[str, Any]:
    """A control that holds keys."""
    return {"track": "camera", "schema": ACTIONS_SCHEMA, "data": {"mode": "state", "held": list(held)}}


async def send_event(socket: Socket, event_id: int, **fields: Any) -> None:
    """Send an event that any world takes: the prompt in force, unless other fields are given."""
    await socket.send("session.event", event_id=event_id, **(fields or {"prompt": socket.target.prompt}))


async def queue_event(socket: Socket, event_id: int, **fields: Any) -> None:
    """Send an event and wait until it is queued."""
    await send_event(socket, event_id, **fields)
    await socket.expect("event.queued", event_id=event_id)


async def applied_in(socket: Socket, *event_ids: int) -> None:
    """Take chunks until these events were applied, all in the same chunk and in this order."""
    await all_applied(socket, *event_ids[:1])
    for found in socket.applied:
        if event_ids[0] in found and [each for each in found if each in event_ids] != list(event_ids):
            raise CheckFailed(f"expected {list(event_ids)} in applied, in this order, got {found}")


async def all_applied(socket: Socket, *event_ids: int) -> None:
    """Take chunks until each of these events was applied in one of them, or in one that came before."""
    for _ in range(MAX_CHUNKS_TO_EFFECT):
        waiting = set(event_ids).difference(*socket.applied)
        if not waiting:
            return
        await socket.media()
    raise CheckFailed(f"events {sorted(waiting)} were queued and not applied in {MAX_CHUNKS_TO_EFFECT} chunks")


def require_actions(started: Message) -> None:
    """Raise `NotApplicable` if the model has other controls than camera keys."""
    if ACTIONS_SCHEMA not in started["controls"]:
        raise NotApplicable(f"the model has no controls {ACTIONS_SCHEMA}")
