"""What is kept of a client that talks before its session has started, and how long it may take to start one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from server.app import create_app
from server.config import LimitsSection, SessionSection
from server.context import ServerContext
from server.dialects.omni import OmniDialog
from server.dialects.opening import HeldMessages
from server.dialects.world import WorldDialog
from server.endpoint import CloseFrame, Outbox, TextFrame
from server.errors import ErrorCode, ServerError, Unavailable
from tests.support.server_client import fake_config
from tests.support.virtual_time import now, run_virtual, settle

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


WORLD_START = {"type": "session.start", "protocol": 1, "prompt": "", "image": {"name": "day"}}
OMNI_START = {"type": "session.start", "prompt": "", "image": "x"}
Create = Callable[[ServerContext, Outbox], WorldDialog | OmniDialog]


async def closed_after(create: Create, *messages: dict[str, object]) -> float:
    """Send one message every 20 s and return when the socket is closed for want of a start, in seconds."""
    outbox = Outbox()
    context = create_app(fake_config(session=SessionSection(start_timeout_s=30.0))).state.context
    dialog = create(context, outbox)
    begun_s = now()
    dialog.start_timer.start()
    for message in messages:
        await asyncio.sleep(20)
        try:
            await dialog.on_text(json.dumps(message))
        except ServerError as error:
            dialog.send_error(error)
        await settle()
    last = ""
    while not isinstance(frame := await outbox.get(), CloseFrame):
        assert isinstance(frame, TextFrame)
        last = frame.text
    assert json.loads(last)["code"] == "start_timeout"
    return now() - begun_s


@pytest.mark.parametrize(
    ("create", "refused"),
    [
        (WorldDialog, {**WORLD_START, "protocol": "one"}),
        (WorldDialog, {**WORLD_START, "model": "another"}),
        (WorldDialog, {"type": "session.start", "protocol": 1, "resume_token": "none", "last_chunk_index": 0}),
        (WorldDialog, {"type": "session.watch", "protocol": 1, "watch_token": "none"}),
        (OmniDialog, {**OMNI_START, "prompt": 1}),
        (OmniDialog, {**OMNI_START, "model": "another"}),
    ],
)
def test_a_refused_start_begins_the_time_anew(create: Create, refused: dict[str, object]) -> None:
    assert run_virtual(closed_after(create, refused)) == pytest.approx(50.0, abs=1.0)
    assert run_virtual(closed_after(create, refused, refused)) == pytest.approx(70.0, abs=1.0)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (WorldDialog, {"type": "session.pause"}),
        (WorldDialog, {"type": "session.nonsense"}),
        (WorldDialog, {"type": "ping", "t": 1}),
        (OmniDialog, {"type": "session.playback", "position_seconds": 1}),
        (OmniDialog, {"type": "session.ping"}),
    ],
)
def test_what_is_no_start_begins_no_time_anew(create: Create, message: dict[str, object]) -> None:
    assert run_virtual(closed_after(create, message)) == pytest.approx(30.0, abs=1.0)
