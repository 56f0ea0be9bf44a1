"""When sessions end by themselves: parked too long, idle, or as old as they may be."""

from __future__ import annotations

import math
from collections.abc import Iterable

from server.actor import SessionActor
from server.config import SessionSection
from server.session import Phase

RESET_RECHECK_S = 1.0
"""A session in mid-reset is not closed for its age; it is looked at again after this time."""


def close_what_is_over(actors: Iterable[SessionActor], section: SessionSection, now: float) -> float | None:
    """Begin to close what is over and return when to look again, None if nothing will expire."""
    next_at = math.inf
    for actor in actors:
        if actor.session.phase is Phase.RESETTING:
            next_at = min(next_at, now + RESET_RECHECK_S)
        if actor.session.phase not in (Phase.ACTIVE, Phase.FAILED):
            continue
        for at, reason in _expiries(actor, section):
            if at <= now:
                actor.begin_close(reason)
                break
            next_at = min(next_at, at)
    return None if next_at == math.inf else next_at


def _expiries(actor: SessionActor, section: SessionSection) -> list[tuple[float, str]]:
    expiries: list[tuple[float, str]] = []
    if actor.parked_at is not None:
        expiries.append((actor.parked_at + section.resume_s, "expired"))
    if section.idle_s is not None:
        expiries.append((actor.active_at + section.idle_s, "idle"))
    if section.max_session_s is not None:
        expiries.append((actor.created_at + section.max_session_s, "lifetime"))
    return expiries
