"""Rules about beginning: `session.start`, its refusals, and what may be sent before there is a session."""

from __future__ import annotations

import contextlib
from typing import Any

from clients.conformance.check import Check, Context, queue_event, send_event
from clients.conformance.errors import CheckFailed, NotApplicable, require
from clients.conformance.socket import Media, Socket

SECTION = "session.start"


async def start_is_answered(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        started = await socket.start(seed=42, event_base=5)
        expected = {"protocol": 1, "seed": 42, "prompt": context.target.prompt, "format": "fmp4", "pacing": "playback"}
        for name, value in expected.items():
            require(started[name] == value, f"session.started: {name} is {started[name]!r}, expected {value!r}")
        require(started["epoch"] >= 1, f"session.started: epoch {started['epoch']}, the first is 1")
        require(started["run"] == 0, f"session.started: run {started['run']}, the first is 0")
        for name in ("session_id", "resume_token", "watch_token", "mime"):
            require(bool(started[name]), f"session.started: {name} is empty")
        require(started["resume_token"] != started["watch_token"], "resume_token and watch_token are the same")


async def model_and_size_may_be_named(context: Context) -> None:
    size = f"{context.info['width']}x{context.info['height']}"
    async with await Socket.open(context.target) as socket:
        started = await socket.start(size=size, model=context.info["served_model"])
        require(f"{started['width']}x{started['height']}" == size, f"/v1/info says {size}, session.started differs")


async def a_seed_is_chosen(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        seed = (await socket.start())["seed"]
        require(0 <= seed < 2**53, f"session.started: seed {seed}")


async def init_comes_first(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.start()
        frame = await socket.receive()
        while not isinstance(frame, Media):
            frame = await socket.receive()
        require(frame.header.kind == "init", "the first binary frame of format fmp4 is no init segment")
        media = await socket.media()
        require(media.chunk_index == 0, f"the first chunk is {media.chunk_index}")


_WRONG_STARTS: dict[str, tuple[tuple[str, ...], dict[str, Any], str | None]] = {
    "bad_protocol": (("bad_protocol",), {"protocol": 999}, None),
    "unknown_model": (("unknown_model",), {"model": "no-such-model"}, None),
    "bad_size": (("bad_size",), {"size": "17x19"}, None),
    "unknown_image": (("unknown_image",), {"image": {"name": "no such image"}}, None),
    "unknown_upload": (("unknown_upload",), {"image": {"upload_id": "no-such-upload"}}, None),
    "bad_image, not base64": (("bad_image",), {"image": {"base64": "?"}}, None),
    "bad_image, no picture": (("bad_image",), {"image": {"base64": "bm90IGEgcGljdHVyZQ=="}}, None),
    "bad_image, two references": (("bad_image", "bad_message"), {"image": {"name": "a", "upload_id": "b"}}, None),
    "no prompt": (("bad_message",), {"prompt": None}, "prompt"),
    "no image": (("bad_message", "bad_image"), {"image": None}, "image"),
    "no protocol": (("bad_message", "bad_protocol"), {"protocol": None}, "protocol"),
    "a field nobody knows": (("bad_message",), {"colour": "red"}, "colour"),
    "a prompt that is a number": (("bad_message",), {"prompt": 5}, "prompt"),
    "a seed that is true": (("bad_message",), {"seed": True}, "seed"),
    "a seed below 0": (("bad_message",), {"seed": -1}, "seed"),
    "a seed above 2^53 - 1": (("bad_message",), {"seed": 2**53}, "seed"),
    "an unknown format": (("bad_message",), {"format": "avi"}, "format"),
    "an unknown pacing": (("bad_message",), {"pacing": "fast"}, "pacing"),
    "an event_base below 0": (("bad_message",), {"event_base": -1}, "event_base"),
}


async def wrong_starts_are_refused(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        for what, (codes, fields, field) in _WRONG_STARTS.items():
            await socket.send("session.start", **socket.start_fields(**fields))
            error = await socket.expect_error(*codes, fatal=False, retryable=False)
            require(
                field is None or error["field"] == field, f"{what}: field is {error['field']!r}, expected {field!r}"
            )
            if what == "bad_size":
                size = f"{context.info['width']}x{context.info['height']}"
                require(size in error["message"], f"bad_size does not name the size {size}: {error['message']!r}")
        await socket.start()
        await socket.media()


async def long_prompts_are_refused(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        limit = (await socket.start())["limits"]["max_prompt_chars"]
        await send_event(socket, 0, prompt="x" * (limit + 1))
        await socket.expect_error("prompt_too_long", fatal=False)
        await queue_event(socket, 0, prompt="x" * limit)
    async with await Socket.open(context.target) as socket:
        await socket.send("session.start", **socket.start_fields(prompt="x" * (limit + 1)))
        await socket.expect_error("prompt_too_long", fatal=False)


async def a_second_start_is_refused(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.start()
        await socket.send("session.start", **socket.start_fields())
        await socket.expect_error("already_started", fatal=False)
        await socket.media()


async def nothing_goes_before_the_start(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.alive()
        messages: dict[str, dict[str, Any]] = {
            "session.event": {"event_id": 0, "prompt": "x"},
            "session.reset": {},
            "session.pause": {},
            "session.unpause": {},
            "playback": {"epoch": 1, "run": 0, "chunk_index": -1, "buffered_ms": 0},
        }
        for kind, fields in messages.items():
            await socket.send(kind, **fields)
            await socket.expect_error("not_started", fatal=False)
        await socket.start()


async def a_client_need_not_wait(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.send("session.start", **socket.start_fields())
        await send_event(socket, 0)
        await socket.expect("session.started")
        await socket.expect("event.queued", event_id=0)


async def tokens_are_asked_for(context: Context) -> None:
    if context.target.token is None:
        raise NotApplicable("the server was checked without a token")
    for token in ("", "not-the-token"):
        async with await Socket.open(context.target, token=token) as socket:
            # The server may refuse the socket before it hears what it is for.
            with contextlib.suppress(CheckFailed):
                await socket.send("session.start", **socket.start_fields())
            await socket.expect_error("unauthorized", fatal=True)
            code = await socket.closed()
            require(code == 1008, f"a socket with a wrong token was closed with {code}, expected 1008")


CHECKS = (
    Check(name="start", section=SECTION, rule="session.started answers with what is in force", run=start_is_answered),
    Check(name="start.named", section=SECTION, rule="model and size may be named", run=model_and_size_may_be_named),
    Check(name="start.seed", section=SECTION, rule="a seed left out is chosen", run=a_seed_is_chosen),
    Check(name="start.init", section=SECTION, rule="fmp4 begins with an init segment", run=init_comes_first),
    Check(
        name="start.refusals",
        section=SECTION,
        rule="a wrong start is an error with its code, and the next one works",
        run=wrong_starts_are_refused,
    ),
    Check(name="start.prompt", section=SECTION, rule="max_prompt_chars bounds prompts", run=long_prompts_are_refused),
    Check(name="start.twice", section=SECTION, rule="a second start is already_started", run=a_second_start_is_refused),
    Check(
        name="start.before", section=SECTION, rule="before it only ping is answered", run=nothing_goes_before_the_start
    ),
    Check(name="start.early", section="Life of a session", rule="a client need not wait", run=a_client_need_not_wait),
    Check(name="start.token", section="Close codes", rule="a wrong token is 1008", run=tokens_are_asked_for),
)
