"""Tokens by header and by subprotocol; origins that are the same, listed, or neither."""

from __future__ import annotations

import pytest

from server.auth import Authenticator, accepted_subprotocol
from server.config import ServerSection
from server.errors import ErrorCode, NotAllowed

PROTECTED = Authenticator(ServerSection(tokens=("alpha", "beta")))


def test_without_tokens_everybody_is_the_same_nobody() -> None:
    auth = Authenticator(ServerSection())
    assert auth.authenticate({}) is None
    assert auth.authenticate({"authorization": "Bearer anything"}) is None


def test_a_token_is_an_owner_that_does_not_show_the_token() -> None:
    by_header = PROTECTED.authenticate({"authorization": "Bearer alpha"})
    by_protocol = PROTECTED.authenticate({}, ["worldserve.v1", "worldserve.token.alpha"])
    assert PROTECTED.authenticate({"authorization": "Api-Key alpha"}) == by_header
    other = PROTECTED.authenticate({"authorization": "bearer beta"})
    assert by_header == by_protocol
    assert by_header is not None
    assert "alpha" not in by_header
    assert other not in (None, by_header)


@pytest.mark.parametrize(
    ("headers", "subprotocols"),
    [
        ({}, []),
        ({"authorization": "Bearer"}, []),
        ({"authorization": "Bearer gamma"}, []),
        ({"authorization": "Api-Key gamma"}, []),
        ({"authorization": "Basic alpha"}, []),
        ({"authorization": "Bearer gämma"}, []),
        ({}, ["worldserve.v1"]),
        ({}, ["worldserve.token."]),
        ({}, ["worldserve.token.gamma"]),
    ],
)
def test_no_token_or_a_wrong_one_is_refused(headers: dict[str, str], subprotocols: list[str]) -> None:
    with pytest.raises(NotAllowed) as caught:
        PROTECTED.authenticate(headers, subprotocols)
    assert caught.value.code is ErrorCode.UNAUTHORIZED
    assert "gamma" not in caught.value.message


def test_who_gave_no_token_is_told_both_headers() -> None:
    with pytest.raises(NotAllowed, match=r"Authorization: Bearer TOKEN, or Authorization: Api-Key TOKEN"):
        PROTECTED.authenticate({})


@pytest.mark.parametrize(
    ("offered", "accepted"),
    [
        ([], None),
        (["other"], None),
        (["worldserve.v1"], "worldserve.v1"),
        (["worldserve.token.x", "worldserve.v1"], "worldserve.v1"),
        (["worldserve.token.x"], "worldserve.token.x"),
    ],
)
def test_one_offered_subprotocol_is_chosen(offered: list[str], accepted: str | None) -> None:
    assert accepted_subprotocol(offered) == accepted


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        (None, True),
        ("localhost:8000", True),
        ("LocalHost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("127.0.0.2", True),
        ("listed.org", True),
        ("listed.org:9000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("listed.org.evil.example", False),
        ("evil.example@localhost.evil.example", False),
        ("10.0.0.1", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_on_this_machine_alone_a_foreign_host_name_is_refused(host: str | None, allowed: bool) -> None:
    auth = Authenticator(ServerSection(host="127.0.0.2", allowed_origins=("https://Listed.org",)))
    headers = {} if host is None else {"host": host}
    if allowed:
        auth.check_host(headers)
        return
    with pytest.raises(NotAllowed, match=r"server\.allowed_origins") as caught:
        auth.check_host(headers)
    assert (caught.value.code, caught.value.field) == (ErrorCode.ORIGIN_NOT_ALLOWED, "host")


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.1"])
def test_every_loopback_address_counts(host: str) -> None:
    with pytest.raises(NotAllowed):
        Authenticator(ServerSection(host=host)).check_host({"host": "evil.example"})


@pytest.mark.parametrize(
    "section",
    [
        ServerSection(host="0.0.0.0"),
        ServerSection(host="::"),
        ServerSection(host="world.example"),
        ServerSection(tokens=("alpha",)),
        ServerSection(allowed_origins=("*",)),
    ],
    ids=["all addresses", "all addresses, IPv6", "a name", "tokens", "all origins"],
)
def test_any_host_name_will_do_where_others_are_served_or_tokens_protect(section: ServerSection) -> None:
    Authenticator(section).check_host({"host": "evil.example"})


@pytest.mark.parametrize(
    ("origin", "host", "scheme", "allowed"),
    [
        (None, "example.org", "http", True),
        ("http://example.org", "example.org", "http", True),
        ("http://example.org:80", "example.org", "ws", True),
        ("https://example.org", "example.org", "http", True),  # TLS ended by a proxy
        ("http://EXAMPLE.org", "example.org", "http", True),
        ("http://localhost:8000", "localhost:8000", "ws", True),
        ("http://[::1]:8000", "[::1]:8000", "http", True),
        ("http://localhost:8001", "localhost:8000", "http", False),
        ("http://evil.org", "example.org", "http", False),
        ("http://example.org.evil.org", "example.org", "http", False),
        ("null", "example.org", "http", False),
        ("", "", "http", False),
        ("http://example.org:port", "example.org", "http", False),
        ("https://listed.org", "example.org", "http", True),
        ("https://Listed.org/", "example.org", "http", True),
    ],
)
def test_origins(origin: str | None, host: str, scheme: str, allowed: bool) -> None:
    auth = Authenticator(ServerSection(allowed_origins=("https://listed.org",)))
    headers = {"host": host} if origin is None else {"host": host, "origin": origin}
    if allowed:
        auth.check_origin(headers, scheme=scheme)
        return
    with pytest.raises(NotAllowed) as caught:
        auth.check_origin(headers, scheme=scheme)
    assert caught.value.code is ErrorCode.ORIGIN_NOT_ALLOWED
