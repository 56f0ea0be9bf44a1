"""What is remembered of sessions that have ended: that closing twice succeeds, and why a resume comes too late."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from server.errors import ErrorCode, UnknownId
from server.ids import ResumeToken
from worldmodel.messages import SessionId

NUM_REMEMBERED = 1024

EVICTED = "evicted"
LOST = "lost"
"""Reasons of an end that its client had no part in, and is told of when it comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a session ended. `lost_reason`: why its world went before it did, None if the world was there to the end."""

    owner: str | None
    reason: str
    lost_reason: str | None
    resume_token: ResumeToken


class Endings:
    """The last sessions that ended; older ones are forgotten."""

    def __init__(self) -> None:
        self._endings: OrderedDict[SessionId, Ending] = OrderedDict()

    def remember(self, session_id: SessionId, ending: Ending) -> None:
        self._endings[session_id] = ending
        while len(self._endings) > NUM_REMEMBERED:
            self._endings.popitem(last=False)

    def holds(self, session_id: str, owner: str | None) -> bool:
        """Return whether the owner had such a session and it was closed."""
        ending = self._endings.get(SessionId(session_id))
        return ending is not None and ending.owner == owner

    def refusal(self, token: str, owner: str | None) -> UnknownId:
        """Return what a resume with this token is told, given that no session has it."""
        for ending in self._endings.values():
            if ending.resume_token == token and ending.owner == owner:
                return over(ending.reason, ending.lost_reason)
        return over(None, None)


def over(reason: str | None, lost_reason: str | None) -> UnknownId:
    """Return what a resume of a session is told that ends or has ended; `reason` None: nobody knows of one."""
    if lost_reason is not None:
        return lost(lost_reason)
    if reason == EVICTED:
        text = "the session was given up for another client while it had no socket"
        return _too_late(ErrorCode.SESSION_EVICTED, text)
    return _too_late(ErrorCode.BAD_RESUME_TOKEN, "there is no session with this resume token, or no longer")


def lost(reason: str) -> UnknownId:
    """Return what a resume of a session is told whose world died with its worker."""
    return _too_late(ErrorCode.SESSION_LOST, f"this session's world is gone: {reason}; start a new session")


def _too_late(code: ErrorCode, message: str) -> UnknownId:
    return UnknownId(code, message, field="resume_token")
