"""Make the identifiers of the server: unguessable where they are a right, short where they are a name."""

from __future__ import annotations

import secrets
from typing import NewType

from worldmodel.messages import SessionId

ResumeToken = NewType("ResumeToken", str)
WatchToken = NewType("WatchToken", str)
UploadId = NewType("UploadId", str)

_MAX_SEED = 2**32


def new_session_id() -> SessionId:
    return SessionId(f"s-{secrets.token_hex(8)}")


def new_resume_token() -> ResumeToken:
    """Return 192 random bits; whoever holds them may take the session over."""
    return ResumeToken(secrets.token_urlsafe(24))


def new_watch_token() -> WatchToken:
    """Return 192 random bits; whoever holds them may see the session, and nothing else."""
    return WatchToken(secrets.token_urlsafe(24))


def new_upload_id() -> UploadId:
    return UploadId(f"u-{secrets.token_urlsafe(16)}")


def new_seed() -> int:
    return secrets.randbelow(_MAX_SEED)
