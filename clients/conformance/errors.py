"""How a check ends without passing."""

from __future__ import annotations


class CheckFailed(Exception):
    """Report, in one line, what the server did and what the protocol says."""


class NotApplicable(Exception):
    """Report why a rule cannot be seen on this server, for example because it asks for no token."""


class ConformanceError(Exception):
    """Report, in one sentence, why nothing could be checked at all."""


def require(condition: bool, reason: str) -> None:
    """Raise `CheckFailed` unless the condition holds."""
    if not condition:
        raise CheckFailed(reason)
