"""What is kept of a client that talks before its session has started."""

from __future__ import annotations

import pytest

from server.config import LimitsSection, SessionSection
from server.dialects.opening import HeldMessages
from server.errors import ErrorCode, Unavailable
from tests.support.server_client import fake_config

CONFIG = fake_config(session=SessionSection(max_pending_events=2), limits=LimitsSection(max_message_bytes=100))


def test_a_close_is_kept_whatever_waits_and_once_however_often_it_comes() -> None:
    held: HeldMessages[str] = HeldMessages(CONFIG)
    held.add("event", 60)
    held.add("event", 40)
    with pytest.raises(Unavailable, match=r"session\.max_pending_events") as refused:
        held.add("event", 0)
    assert refused.value.code is ErrorCode.QUEUE_FULL
    for _ in range(1000):
        held.put_last("close", 200)
    assert held.take_all() == ["event", "event", "close"]
    held.add("event", 100)
    held.put_last("close", 200)
    assert held.take_all() == ["event", "close"]
