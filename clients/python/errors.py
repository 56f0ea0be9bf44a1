"""Errors of the Python client.

WorldClientError
├── ConnectFailed       no server answered at the address, or it refused the connection
├── Refused             the server refused a message; correct it, or try again if `retryable`
├── EventDropped        an accepted event will never be applied
├── LinkLost            the link broke before the answer came; the session lives on, ask again
├── SessionFailed       a chunk could not be made; reset or close
├── SessionLost         the session is over and cannot be taken up again
└── BadServerMessage    the server broke the protocol
"""

from __future__ import annotations

from server.wire.messages import DropReason, ErrorMessage


class WorldClientError(Exception):
    """Base of all errors of this client."""


class ConnectFailed(WorldClientError):
    """Report that no connection could be opened."""


class Refused(WorldClientError):
    """Report what the server refused. `code` is a word for programs, `field` the offending field if there is one."""

    def __init__(self, error: ErrorMessage) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.code = error.code
        self.field = error.field
        self.retryable = error.retryable
        self.fatal = error.fatal
        self.event_id = error.event_id


class EventDropped(WorldClientError):
    """Report that an event was accepted and then dropped; `reason` is None if the session was lost with it."""

    def __init__(self, event_id: int, reason: DropReason | None) -> None:
        super().__init__(f"event {event_id} was dropped: {reason or 'the session was lost'}")
        self.event_id = event_id
        self.reason = reason


class LinkLost(WorldClientError):
    """Report that the link broke before a request was answered."""


class SessionFailed(WorldClientError):
    """Report that the session is in the state `failed`."""


class SessionLost(WorldClientError):
    """Report that the session is gone; `close_code` is that of the last connection, None if there was none."""

    def __init__(self, message: str, *, close_code: int | None = None) -> None:
        super().__init__(message)
        self.close_code = close_code


class BadServerMessage(WorldClientError):
    """Report a message that the protocol does not allow."""
