"""Errors a client can see, and what each means for the socket and for HTTP.

ServerError                 code, message, field; the table below says what follows
├── BadInput                the message is wrong; sending it again can't help
│   └── EventRefused        one event was not queued; carries its `event_id`
├── NotAllowed              token, origin, or something the configuration forbids
├── UnknownId               no such session, token, upload or page
├── Unavailable             right message, wrong moment: full, loading, busy, too fast
└── SessionFailed           the worker could not do it; the session is `failed`

CommitMismatch              the worker answered something else than it was asked (not shown as such to clients)

Every code has one row in `KINDS`. `fatal`: this socket, or the session, is over. `close_code`: the socket is closed
with it after the error was sent; None keeps the socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from worldmodel.errors import RequestRefused, WorkerUnavailable, WorldModelError


class CloseCode:
    """WebSocket close codes in use (RFC 6455 section 7.4.1 and the IANA registry)."""

    DONE = 1000
    GOING_AWAY = 1001
    BAD_DATA = 1007
    POLICY = 1008
    TOO_LARGE = 1009
    INTERNAL = 1011
    RESTART = 1012
    TRY_LATER = 1013


class ErrorCode(StrEnum):
    """The stable word of an error."""

    # the frame
    BAD_JSON = "bad_json"
    BAD_MESSAGE = "bad_message"
    BINARY_NOT_ALLOWED = "binary_not_allowed"
    TOO_LARGE = "too_large"
    # starting
    BAD_PROTOCOL = "bad_protocol"
    UNKNOWN_MODEL = "unknown_model"
    BAD_SIZE = "bad_size"
    BAD_IMAGE = "bad_image"
    UNKNOWN_IMAGE = "unknown_image"
    UNKNOWN_UPLOAD = "unknown_upload"
    PROMPT_TOO_LONG = "prompt_too_long"
    FORMAT_NOT_ALLOWED = "format_not_allowed"
    ALREADY_STARTED = "already_started"
    NOT_STARTED = "not_started"
    START_TIMEOUT = "start_timeout"
    BAD_RESUME_TOKEN = "bad_resume_token"
    SESSION_EVICTED = "session_evicted"
    SESSION_LOST = "session_lost"
    RESUME_GAP = "resume_gap"
    BAD_WATCH_TOKEN = "bad_watch_token"
    # events and reports
    DUPLICATE = "duplicate"
    STALE = "stale"
    QUEUE_FULL = "queue_full"
    EMPTY_EVENT = "empty_event"
    DUPLICATE_TRACK = "duplicate_track"
    BAD_CONTROL = "bad_control"
    BAD_PLAYBACK = "bad_playback"
    RATE_LIMITED = "rate_limited"
    # robots
    BAD_OBSERVATION = "bad_observation"
    SESSION_IN_USE = "session_in_use"
    SUPERSEDED = "superseded"
    IDLE_TIMEOUT = "idle_timeout"
    UNSUPPORTED = "unsupported"
    BAD_STATE = "bad_state"
    # rights
    UNAUTHORIZED = "unauthorized"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    TOO_MANY_SESSIONS = "too_many_sessions"
    TAKEN_OVER = "taken_over"
    READ_ONLY = "read_only"
    TOO_MANY_WATCHERS = "too_many_watchers"
    # resources
    CAPACITY = "capacity"
    WORKER_UNAVAILABLE = "worker_unavailable"
    CLEANUP_FAILED = "cleanup_failed"
    SHUTTING_DOWN = "shutting_down"
    # work
    REQUEST_REFUSED = "request_refused"
    TICK_FAILED = "tick_failed"
    RESET_FAILED = "reset_failed"
    MEDIA_FAILED = "media_failed"
    INTERNAL = "internal"
    NOT_FOUND = "not_found"
    # HTTP only
    BODY_TIMEOUT = "body_timeout"
    TOO_MANY_BODIES = "too_many_bodies"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BAD_CONTENT_TYPE = "bad_content_type"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """What follows from an error."""

    http_status: int
    retryable: bool = False
    fatal: bool = False
    close_code: int | None = None


KINDS: dict[ErrorCode, ErrorKind] = {
    ErrorCode.BAD_JSON: ErrorKind(400),
    ErrorCode.BAD_MESSAGE: ErrorKind(422),
    ErrorCode.BINARY_NOT_ALLOWED: ErrorKind(400),
    ErrorCode.TOO_LARGE: ErrorKind(413, fatal=True, close_code=CloseCode.TOO_LARGE),
    ErrorCode.BAD_PROTOCOL: ErrorKind(422),
    ErrorCode.UNKNOWN_MODEL: ErrorKind(422),
    ErrorCode.BAD_SIZE: ErrorKind(422),
    ErrorCode.BAD_IMAGE: ErrorKind(422),
    ErrorCode.UNKNOWN_IMAGE: ErrorKind(422),
    ErrorCode.UNKNOWN_UPLOAD: ErrorKind(422),
    ErrorCode.PROMPT_TOO_LONG: ErrorKind(422),
    ErrorCode.FORMAT_NOT_ALLOWED: ErrorKind(422),
    ErrorCode.ALREADY_STARTED: ErrorKind(409),
    ErrorCode.NOT_STARTED: ErrorKind(409),
    ErrorCode.START_TIMEOUT: ErrorKind(408, fatal=True, close_code=CloseCode.POLICY),
    ErrorCode.BAD_RESUME_TOKEN: ErrorKind(404),
    ErrorCode.SESSION_EVICTED: ErrorKind(410),
    ErrorCode.SESSION_LOST: ErrorKind(410),
    ErrorCode.RESUME_GAP: ErrorKind(409),
    ErrorCode.BAD_WATCH_TOKEN: ErrorKind(404),
    ErrorCode.DUPLICATE: ErrorKind(409),
    ErrorCode.STALE: ErrorKind(409),
    ErrorCode.QUEUE_FULL: ErrorKind(429, retryable=True),
    ErrorCode.EMPTY_EVENT: ErrorKind(422),
    ErrorCode.DUPLICATE_TRACK: ErrorKind(422),
    ErrorCode.BAD_CONTROL: ErrorKind(422),
    ErrorCode.BAD_PLAYBACK: ErrorKind(422),
    ErrorCode.RATE_LIMITED: ErrorKind(429, retryable=True),
    ErrorCode.BAD_OBSERVATION: ErrorKind(422),
    ErrorCode.SESSION_IN_USE: ErrorKind(409, retryable=True),
    ErrorCode.SUPERSEDED: ErrorKind(409),
    ErrorCode.IDLE_TIMEOUT: ErrorKind(408, fatal=True, close_code=CloseCode.POLICY),
    ErrorCode.UNSUPPORTED: ErrorKind(404, fatal=True, close_code=CloseCode.POLICY),
    ErrorCode.BAD_STATE: ErrorKind(409),
    ErrorCode.UNAUTHORIZED: ErrorKind(401, fatal=True, close_code=CloseCode.POLICY),
    ErrorCode.ORIGIN_NOT_ALLOWED: ErrorKind(403, fatal=True, close_code=CloseCode.POLICY),
    ErrorCode.TOO_MANY_SESSIONS: ErrorKind(429, retryable=True, fatal=True, close_code=CloseCode.TRY_LATER),
    ErrorCode.TAKEN_OVER: ErrorKind(409, fatal=True, close_code=CloseCode.POLICY),
    ErrorCode.READ_ONLY: ErrorKind(403),
    ErrorCode.TOO_MANY_WATCHERS: ErrorKind(429, retryable=True, fatal=True, close_code=CloseCode.TRY_LATER),
    ErrorCode.CAPACITY: ErrorKind(503, retryable=True, fatal=True, close_code=CloseCode.TRY_LATER),
    ErrorCode.WORKER_UNAVAILABLE: ErrorKind(503, retryable=True, fatal=True, close_code=CloseCode.RESTART),
    ErrorCode.CLEANUP_FAILED: ErrorKind(500, retryable=True),
    ErrorCode.SHUTTING_DOWN: ErrorKind(503, retryable=True, fatal=True, close_code=CloseCode.RESTART),
    ErrorCode.REQUEST_REFUSED: ErrorKind(422),
    ErrorCode.TICK_FAILED: ErrorKind(500, retryable=True),
    ErrorCode.RESET_FAILED: ErrorKind(500, retryable=True),
    ErrorCode.MEDIA_FAILED: ErrorKind(500, retryable=True),
    ErrorCode.INTERNAL: ErrorKind(500, fatal=True, close_code=CloseCode.INTERNAL),
    ErrorCode.BODY_TIMEOUT: ErrorKind(408),
    ErrorCode.TOO_MANY_BODIES: ErrorKind(503, retryable=True),
    ErrorCode.TOO_MANY_CONNECTIONS: ErrorKind(503, retryable=True),
    ErrorCode.NOT_FOUND: ErrorKind(404),
    ErrorCode.METHOD_NOT_ALLOWED: ErrorKind(405),
    ErrorCode.BAD_CONTENT_TYPE: ErrorKind(415),
}


class ServerError(Exception):
    """Base of everything a client is told. The text is for people and holds nothing internal."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        field: str | None = None,
        event_id: int | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.event_id = event_id
        self.request_id = request_id

    @property
    def kind(self) -> ErrorKind:
        return KINDS[self.code]


class BadInput(ServerError):
    """Refuse a message that is wrong by itself."""


class EventRefused(BadInput):
    """Refuse one event; nothing of it was kept."""


class NotAllowed(ServerError):
    """Refuse for lack of a right."""


class UnknownId(ServerError):
    """Report that what was named does not exist, or no longer."""


class Unavailable(ServerError):
    """Refuse for now."""


class SessionFailed(ServerError):
    """Report that the session failed."""


class CommitMismatch(Exception):
    """The worker's answer to a tick differs from the tick; nothing may be committed."""


def from_worker(error: WorldModelError, *, fallback: ErrorCode, request_id: str | None = None) -> ServerError:
    """Translate an error of the worker; its code is kept where clients know it."""
    known = {code.value for code in ErrorCode}
    code = ErrorCode(error.code) if error.code in known else fallback
    if isinstance(error, WorkerUnavailable):
        return Unavailable(ErrorCode.WORKER_UNAVAILABLE, error.message, request_id=request_id)
    if isinstance(error, RequestRefused):
        return BadInput(code, error.message, field=error.field, request_id=request_id)
    return SessionFailed(fallback, error.message, request_id=request_id)


def open_failed(error: WorldModelError) -> ServerError:
    """Translate the error of a session that did not open: only what the worker refused is the client's fault."""
    is_refused = isinstance(error, RequestRefused)
    return from_worker(error, fallback=ErrorCode.REQUEST_REFUSED if is_refused else ErrorCode.WORKER_UNAVAILABLE)
