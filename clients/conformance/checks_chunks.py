"""Rules about chunks: their order, formats and pacing. Most are checked at every frame, see `stream.py`."""

from __future__ import annotations

from clients.conformance.check import Check, Context
from clients.conformance.errors import NotApplicable, require
from clients.conformance.socket import Media, Socket

PACING = "Pacing"


async def _chunks(socket: Socket, count: int) -> list[Media]:
    return [await socket.media() for _ in range(count)]


async def chunks_are_a_stream(context: Context) -> None:
    model = context.info["model"]
    async with await Socket.open(context.target) as socket:
        started = await socket.start()
        chunks = await _chunks(socket, 6)
        found = [chunk.header.num_frames for chunk in chunks]
        expected = [model["first_chunk_media_frames"]] + 5 * [model["chunk_media_frames"]]
        require(found == expected, f"media frames of the first chunks are {found}, /v1/info says {expected}")
        require(started["fps"] == model["fps"], f"fps is {started['fps']}, /v1/info says {model['fps']}")
        require(
            all(chunk.header.timings_ms is not None for chunk in chunks),
            "a media chunk of format fmp4 has no timings_ms",
        )


async def _format(context: Context, name: str) -> None:
    async with await Socket.open(context.target) as socket:
        await socket.send("session.start", **socket.start_fields(format=name))
        frame = await socket.receive()
        while isinstance(frame, Media) or frame["type"] not in ("session.started", "error"):
            frame = await socket.receive()
        if frame["type"] == "error":
            require(frame["code"] == "format_not_allowed", f"format {name}: {frame['code']}: {frame['message']}")
            raise NotApplicable(f"the server does not offer the format {name}")
        require(frame["format"] == name, f"session.started: format {frame['format']!r}, expected {name!r}")
        require(name == "h264" or frame["mime"] is None or "avc1" not in frame["mime"], f"{name}: mime {frame['mime']}")
        await _chunks(socket, 3)


async def format_h264(context: Context) -> None:
    await _format(context, "h264")


async def format_jpeg(context: Context) -> None:
    await _format(context, "jpeg")


async def format_rgb24(context: Context) -> None:
    await _format(context, "rgb24")


async def format_latent(context: Context) -> None:
    await _format(context, "latent")


async def playback_lets_chunks_start(context: Context) -> None:
    async with await Socket.open(context.target, viewer=False) as socket:
        lead = (await socket.start())["limits"]["lead_chunks"]
        first, *_, last = (await _chunks(socket, lead + 1)) * 2
        require(last.chunk_index == lead, f"chunk {last.chunk_index} came, expected chunk {lead}")
        await socket.no_media(why=f"without a report, and lead_chunks is {lead}")
        await socket.report(first.header)
        following = await socket.media()
        require(following.chunk_index == lead + 1, f"after the report of chunk 0 came chunk {following.chunk_index}")
        await socket.no_media(why="after a report of chunk 0 only")


async def wrong_reports(context: Context) -> None:
    async with await Socket.open(context.target, viewer=False) as socket:
        started = await socket.start()
        lead = started["limits"]["lead_chunks"]
        await _chunks(socket, lead + 1)
        report = {"epoch": started["epoch"], "run": 0, "chunk_index": lead, "buffered_ms": 0}
        await socket.send("playback", **{**report, "chunk_index": 10_000})
        await socket.expect_error("bad_playback", fatal=False)
        await socket.send("playback", **{**report, "buffered_ms": -1})
        await socket.expect_error("bad_message", fatal=False, field="buffered_ms")
        await socket.send("playback", **{**report, "chunk_index": -1})
        await socket.send("playback", **{**report, "epoch": started["epoch"] - 1})
        await socket.alive()
        await socket.no_media(why="after a report of another epoch")
        await socket.send("playback", **report)
        await _chunks(socket, lead + 1)


async def clock_pacing(context: Context) -> None:
    async with await Socket.open(context.target, viewer=False) as socket:
        lead = (await socket.start(pacing="clock"))["limits"]["lead_chunks"]
        await _chunks(socket, lead + 3)


async def free_pacing(context: Context) -> None:
    async with await Socket.open(context.target, viewer=False) as socket:
        lead = (await socket.start(pacing="free"))["limits"]["lead_chunks"]
        await _chunks(socket, lead + 4)


async def pause_stops_chunks(context: Context) -> None:
    async with await Socket.open(context.target) as socket:
        lead = (await socket.start())["limits"]["lead_chunks"]
        await _chunks(socket, lead + 2)
        await socket.send("session.pause")
        await socket.expect("session.state", state="paused")
        await socket.alive()
        # What was being made may still come.
        await socket.no_media(why="while the session is paused", num_late=lead + 1)
        await socket.send("session.unpause")
        await socket.expect("session.state", state="active")
        await socket.media()


CHECKS = (
    Check(
        name="chunks",
        section="Chunks",
        rule="in order, without gaps, whole, with pts and keyframes",
        run=chunks_are_a_stream,
    ),
    Check(name="format.h264", section="Formats", rule="Annex B cut by sizes", run=format_h264),
    Check(name="format.jpeg", section="Formats", rule="one JPEG a frame, cut by sizes", run=format_jpeg),
    Check(name="format.rgb24", section="Formats", rule="uint8 frames of the shape", run=format_rgb24),
    Check(name="format.latent", section="Formats", rule="float32 of the shape, where allowed", run=format_latent),
    Check(name="pacing.playback", section=PACING, rule="k <= shown + 1 + lead_chunks", run=playback_lets_chunks_start),
    Check(name="pacing.reports", section=PACING, rule="wrong and old reports", run=wrong_reports),
    Check(name="pacing.clock", section=PACING, rule="clock needs no reports", run=clock_pacing),
    Check(name="pacing.free", section=PACING, rule="free waits for nobody", run=free_pacing),
    Check(name="pause", section="session.pause", rule="no chunks until session.unpause", run=pause_stops_chunks),
)
