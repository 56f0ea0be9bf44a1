"""Who may do what: tokens, origins and host names. Knows headers, not sessions.

A token comes as `Authorization: Bearer TOKEN`, as `Authorization: Api-Key TOKEN` from robot clients, or, because
browsers can't set headers on a WebSocket, as the subprotocol `worldserve.token.TOKEN`, offered next to `worldserve.v1`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from server.config import ServerSection
from server.errors import ErrorCode, NotAllowed

HEADER_SCHEMES = ("bearer", "api-key")

SUBPROTOCOL = "worldserve.v1"
TOKEN_SUBPROTOCOL = "worldserve.token."

_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Authenticator:
    """Check tokens, origins and host names. Without tokens everybody is the same anonymous owner."""

    def __init__(self, section: ServerSection) -> None:
        self._tokens = section.tokens
        self._allowed_origins = frozenset(origin.rstrip("/").lower() for origin in section.allowed_origins)
        self._allowed_hosts = _allowed_hosts(section)

    def authenticate(self, headers: Mapping[str, str], subprotocols: Sequence[str] = ()) -> str | None:
        """Return the owner that a request acts for: a digest of its token, None if no token is needed.

        Raises `NotAllowed`.
        """
        if not self._tokens:
            return None
        token = _token(headers, subprotocols)
        if token is None:
            text = "a token is needed: Authorization: Bearer TOKEN, or Authorization: Api-Key TOKEN"
            raise NotAllowed(ErrorCode.UNAUTHORIZED, text)
        matches = [hmac.compare_digest(token.encode(), known.encode()) for known in self._tokens]
        if not any(matches):
            raise NotAllowed(ErrorCode.UNAUTHORIZED, "the token is not known")
        return hashlib.sha256(token.encode()).hexdigest()[:16]

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Refuse a request for a foreign host name, on a server without tokens that only this machine reaches.

        Its own names pass, and the hosts of `server.allowed_origins`: a proxy may hand on the name that it was asked
        for. Raises `NotAllowed`.
        """
        host = headers.get("host")
        if self._allowed_hosts is None or host is None or _host_name(f"//{host}") in self._allowed_hosts:
            return
        raise NotAllowed(
            ErrorCode.ORIGIN_NOT_ALLOWED,
            f"host: {host[:200]!r} is no name of this server (server.allowed_origins)",
            field="host",
        )

    def check_origin(self, headers: Mapping[str, str], *, scheme: str) -> None:
        """Refuse a page of another origin unless it is listed. Programs send no `Origin` and pass."""
        origin = headers.get("origin")
        if origin is None or origin.rstrip("/").lower() in self._allowed_origins or "*" in self._allowed_origins:
            return
        if not _is_same_origin(origin, headers.get("host", ""), scheme):
            raise NotAllowed(
                ErrorCode.ORIGIN_NOT_ALLOWED, f"origin {origin[:200]!r} is not allowed (server.allowed_origins)"
            )


def _allowed_hosts(section: ServerSection) -> frozenset[str] | None:
    """Return the names that requests may have, None where any will do."""
    if section.tokens or "*" in section.allowed_origins or not _is_loopback(section.host):
        return None
    listed = {name for name in map(_host_name, section.allowed_origins) if name}
    return frozenset({*_LOOPBACK_NAMES, section.host.lower(), *listed})


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def accepted_subprotocol(subprotocols: Sequence[str]) -> str | None:
    """Return the subprotocol to answer with; browsers give up if they offered some and none is chosen."""
    if SUBPROTOCOL in subprotocols:
        return SUBPROTOCOL
    return next((name for name in subprotocols if name.startswith(TOKEN_SUBPROTOCOL)), None)


def _token(headers: Mapping[str, str], subprotocols: Sequence[str]) -> str | None:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() in HEADER_SCHEMES and credentials.strip():
        return credentials.strip()
    for name in subprotocols:
        if name.startswith(TOKEN_SUBPROTOCOL):
            return name.removeprefix(TOKEN_SUBPROTOCOL)
    return None


def _is_same_origin(origin: str, host: str, scheme: str) -> bool:
    """Compare host and port. The scheme may differ: a proxy in front may have ended TLS."""
    try:
        page = urlsplit(origin)
        here = urlsplit(f"{scheme}://{host}")
        page_port = page.port or _DEFAULT_PORTS.get(page.scheme)
        here_ports = {here.port} if here.port else {_DEFAULT_PORTS.get(scheme), _DEFAULT_PORTS.get(page.scheme)}
        return page.hostname is not None and page.hostname == here.hostname and page_port in here_ports
    except ValueError:
        return False
