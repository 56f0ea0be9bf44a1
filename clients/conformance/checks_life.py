"""Rules about a session's life: reset, close, resume, take-over, size limit, spectators."""

from __future__ import annotations

import contextlib

from clients.conformance.check import Check, Context, queue_event, send_event
from clients.conformance.errors import CheckFailed, NotApplicable, require
from clients.conformance.socket import Media, Message, Socket

MAX_LARGE_BYTES = 64 * 1024 * 1024


async def reset_begins_a_run(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.start(seed=1)
        await socket.media()
        await socket.send("session.pause")
        await socket.expect("session.state", state="paused")
        await queue_event(socket, 4)
        await socket.send("session.reset", prompt=context.target.prompt, seed=2)
        await socket.expect("event.dropped", event_id=4, reason="reset")
        await socket.expect("session.state", state="resetting")
        await socket.expect("session.state", state="paused", run=1)
        await send_event(socket, 4)
        await socket.expect_error("duplicate", "stale", event_id=4)
        await queue_event(socket, 5)
        await socket.send("session.unpause")
        media = await _first_of_run(socket, 1)
        require(media.chunk_index == 0, f"the first chunk after a reset is {media.chunk_index}")
        await socket.send("session.reset")
        await socket.expect("session.state", state="resetting")
        await socket.expect("session.state", state="active", run=2)
        await _first_of_run(socket, 2)


async def _first_of_run(socket: Socket, run: int) -> Media:
    """Take chunks until one of this run; a late one of the old run may come before."""
    media = await socket.media()
    while media.header.run != run:
        media = await socket.media()
    return media


async def close_ends_the_session(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        started = await socket.start()
        await socket.send("session.pause")
        await socket.expect("session.state", state="paused")
        await queue_event(socket, 0)
        await socket.send("session.close")
        await socket.expect("event.dropped", event_id=0, reason="closed")
        closed = await socket.expect("session.closed")
        require(closed["session_id"] == started["session_id"], "session.closed names another session")
        require(bool(closed["reason"]), "session.closed without a reason")
        code = await socket.closed()
        require(code == 1000, f"a closed session ends with close code {code}, expected 1000")
    async with await Socket.open(context.target) as socket:
        await _resume_message(socket, started["resume_token"], -1)
        await socket.expect_error("bad_resume_token", fatal=False)


async def _resume_message(socket: Socket, token: str, last_chunk_index: int) -> None:
    await socket.send("session.start", protocol=1, resume_token=token, last_chunk_index=last_chunk_index)


async def _dropped_after(context: Context, chunks: int) -> Message:
    """Start a session, take some chunks, lose the socket; returns `session.started`."""
    socket = await Socket.open(context.target)
    started = await socket.start()
    if not started["limits"]["resume_s"]:
        await socket.__aexit__(None, None, None)
        raise NotApplicable("the server keeps no session without a socket (resume_s is 0)")
    for _ in range(chunks):
        await socket.media()
    await socket.drop()
    return started


async def resume_goes_on(context: Context) -> None:
    started = await _dropped_after(context, 3)
    async with await Socket.open(context.target) as socket:
        resumed = await socket.resume(started["resume_token"], 1)
        require(resumed["session_id"] == started["session_id"], "a resumed session has another session_id")
        require(resumed["epoch"] == started["epoch"] + 1, f"epoch {resumed['epoch']} after {started['epoch']}")
        require(resumed["run"] == 0, f"a resumed session is in run {resumed['run']}")
        first = await socket.media()
        require(first.chunk_index == 2, f"after last_chunk_index 1 came chunk {first.chunk_index}")
        for _ in range(3):
            await socket.media()
        await queue_event(socket, 0)


async def resume_needs_its_token(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await _resume_message(socket, "no-such-token", -1)
        await socket.expect_error("bad_resume_token", fatal=False)
        await socket.send("session.start", protocol=1, resume_token="no-such-token")
        await socket.expect_error("bad_message", fatal=False, field="last_chunk_index")
        await socket.start()


async def the_newest_socket_wins(context: Context) -> None:
    first = await Socket.open(context.target)
    started = await first.start()
    await first.media()
    async with await Socket.open(context.target) as second:
        await second.resume(started["resume_token"], 0)
        first.viewer = False
        await first.expect_error("taken_over", fatal=True)
        code = await first.closed()
        require(code == 1008, f"a socket that was taken over is closed with {code}, expected 1008")
        await second.media()


async def large_messages_park_the_session(context: Context) -> None:
    socket = await Socket.open(context.target)
    started = await socket.start()
    limit = started["limits"]["max_message_bytes"]
    if limit > MAX_LARGE_BYTES:
        await socket.__aexit__(None, None, None)
        raise NotApplicable(f"max_message_bytes is {limit}, more than is sent here")
    await socket.media()
    # The server may close while the message is still being sent.
    with contextlib.suppress(CheckFailed):
        await socket.send("session.event", event_id=0, prompt="x" * limit)
    code = await socket.closed()
    require(code == 1009, f"a message above max_message_bytes closed the socket with {code}, expected 1009")
    if not started["limits"]["resume_s"]:
        return
    async with await Socket.open(context.target) as second:
        await second.resume(started["resume_token"], 0)
        await second.media()


async def spectators_watch(context: Context) -> None:
    async with await Socket.open(context.target) as owner:
        started = await owner.start()
        await owner.media()
        async with await Socket.open(context.target, viewer=False) as spectator:
            await _watch(spectator, started["watch_token"])
            require(spectator.started["session_id"] == started["session_id"], "session.watching names another session")
            require(spectator.started["format"] == "fmp4", "a spectator gets another format than the owner's")
            await owner.media()
            await owner.media()
            await spectator.media()
            await spectator.alive()
            await spectator.send("session.event", event_id=0, prompt="x")
            await spectator.expect_error("read_only", fatal=False)
            await spectator.send("session.pause")
            await spectator.expect_error("read_only", fatal=False)
            await spectator.send("session.close")
            await spectator.closed()
        await queue_event(owner, 0)
        await owner.media()


async def spectators_hear_of_the_end(context: Context) -> None:
    async with await Socket.open(context.target) as owner:
        started = await owner.start()
        await owner.media()
        async with await Socket.open(context.target, viewer=False) as spectator:
            await _watch(spectator, started["watch_token"])
            await owner.send("session.pause")
            await spectator.expect("session.state", state="paused")
            await owner.send("session.close")
            await spectator.expect("session.closed")
            code = await spectator.closed()
            require(code == 1000, f"a spectator of an ended session is closed with {code}, expected 1000")


async def _watch(spectator: Socket, token: str) -> None:
    await spectator.send("session.watch", protocol=1, watch_token=token)
    frame = await spectator.receive()
    if not isinstance(frame, Media) and frame["type"] == "error" and frame["code"] == "too_many_watchers":
        raise NotApplicable("the server lets nobody watch")
    kind = "a binary frame" if isinstance(frame, Media) else frame["type"]
    require(kind == "session.watching", f"session.watch was answered by {kind}")


async def watching_needs_its_token(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.send("session.watch", protocol=1, watch_token="no-such-token")
        await socket.expect_error("bad_watch_token", "too_many_watchers")


CHECKS = (
    Check(name="reset", section="session.reset", rule="a new run, events dropped, video on", run=reset_begins_a_run),
    Check(name="close", section="session.close", rule="session.closed, then 1000", run=close_ends_the_session),
    Check(name="resume", section="Resume", rule="next epoch, init, the chunks that were missed", run=resume_goes_on),
    Check(name="resume.token", section="Resume", rule="bad_resume_token", run=resume_needs_its_token),
    Check(name="resume.takeover", section="Resume", rule="the newest socket wins", run=the_newest_socket_wins),
    Check(
        name="limits.message",
        section="Close codes",
        rule="1009 above max_message_bytes, and the session is parked",
        run=large_messages_park_the_session,
    ),
    Check(name="watch", section="Watching", rule="spectators see and do not steer", run=spectators_watch),
    Check(name="watch.end", section="Watching", rule="spectators hear of the end", run=spectators_hear_of_the_end),
    Check(name="watch.token", section="Watching", rule="bad_watch_token", run=watching_needs_its_token),
)
