"""The `omni` dialect over real sockets: the message sequences of vLLM-Omni's realtime video interface."""

from __future__ import annotations

import random

from server.config import SessionSection
from tests.support.omni_client import OmniSocket
from tests.support.omni_server import connect, session_of
from tests.support.server_client import png
from tests.support.server_scripted import Server, serving
from tests.support.server_worker import ScriptedWorker, model_info

# ---------------------------------------------------------------- the plain sequences


async def test_start_chunks_done(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start(num_frames=33, seed=7, model="robbyant/lingbot-world-v2-14b-causal-fast-diffusers")
    assert started["format"] == "m4s"
    assert started["config"] == {
        "model": "robbyant/lingbot-world-v2-14b-causal-fast-diffusers",
        "prompt": "a town",
        "width": 32,
        "height": 32,
        "fps": 12,
        "num_frames": 33,
        "seed": 7,
    }
    done = await socket.expect("session.done")
    request_id = started["request_id"]
    assert done == {
        "type": "session.done",
        "request_id": request_id,
        "chunks": 3,
        "stopped": False,
        "dropped_event_ids": [],
    }
    assert await socket.closed() == 1000
    metadata = [chunk.metadata for chunk in socket.chunks]
    assert [it["transport_chunk_index"] for it in metadata] == [0, 1, 2]
    assert [it["generation_chunk_index"] for it in metadata] == [0, 1, 2]
    assert [it["num_frames"] for it in metadata] == [9, 12, 12]
    assert {(it["kind"], it["request_id"]) for it in metadata} == {("media", request_id)}
    assert socket.decode() == 33
    await server.until(lambda: not server.worker.sessions)
    assert len(server.worker.served) == 3, "a chunk was made that nobody sees"


async def test_every_prefix_plays_and_the_init_segment_comes_first(server: Server) -> None:
    socket = await connect(server)
    await socket.start(num_frames=33)
    for num_frames in (9, 21, 33):
        await socket.media()
        assert socket.decode() == num_frames
    assert socket.chunks[0].payload[4:8] == b"ftyp"
    assert socket.chunks[1].payload[4:8] == b"moof"


async def test_ping_is_answered_before_and_after_the_start(server: Server) -> None:
    socket = await connect(server)
    await socket.send("session.ping")
    await socket.expect("session.pong")
    await socket.start()
    await socket.send("session.ping")
    await socket.expect("session.pong")


async def test_stop_ends_a_video_without_length(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start()
    assert "num_frames" not in started["config"]
    await socket.media()
    await socket.send("session.stop")
    done = await socket.expect("session.done", stopped=True)
    assert done["chunks"] == len(socket.chunks) >= 1
    assert await socket.closed() == 1000
    await server.until(lambda: not server.worker.sessions)


async def test_a_lost_socket_ends_its_session() -> None:
    async with serving(session=SessionSection(resume_s=60.0)) as server:
        socket = await connect(server)
        await socket.start()
        socket.connection.transport.abort()
        await server.until(lambda: server.context.table.num_resident == 0)
        assert not server.worker.sessions


async def test_seconds_are_rounded_up_to_whole_chunks(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start(seconds="2")
    assert started["config"]["num_frames"] == 33
    assert (await socket.expect("session.done"))["chunks"] == 3


async def test_parameters_in_sampling_params_count(server: Server) -> None:
    socket = await connect(server)
    sampling = {"num_frames": 9, "seed": 5, "pyramid": [1, 1, 1], "flow_shift": 5.0}
    config = (await socket.start(sampling_params=sampling))["config"]
    assert (config["num_frames"], config["seed"]) == (9, 5)
    assert (await socket.expect("session.done"))["chunks"] == 1


async def test_an_upload_is_a_file_id(server: Server) -> None:
    upload = server.context.uploads.add(png(), owner=None)
    socket = await connect(server)
    await socket.start(image_reference={"file_id": upload}, num_frames=9)
    await socket.expect("session.done")


# ---------------------------------------------------------------- pacing


async def test_playback_positions_let_chunks_start(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start(streaming_buffer_seconds=1.25)
    assert started["config"]["streaming_buffer_seconds"] == 1.25
    session = session_of(server, started)
    await socket.media()
    await socket.media()
    await socket.send("session.ping")
    await socket.expect("session.pong")
    assert len(session.ticks) == 2
    await socket.send("session.playback", position_seconds=0)
    await socket.media()
    await socket.send("session.playback", position_seconds=0.74)
    await socket.send("session.ping")
    await socket.expect("session.pong")
    assert len(session.ticks) == 3, "chunk 1 begins at 0.75 s"
    await socket.send("session.playback", position_seconds=0.75)
    await socket.media()
    await socket.send("session.ping")
    await socket.expect("session.pong")
    # Beyond what was sent counts as the last chunk sent; backwards counts as where the playhead was.
    await socket.send("session.playback", position_seconds=1e9)
    for _ in range(2):
        await socket.media()
    await socket.send("session.playback", position_seconds=0.1)
    await socket.send("session.ping")
    await socket.expect("session.pong")
    assert len(session.ticks) == 6


async def test_a_pace_of_media_time_is_the_servers_clock(server: Server) -> None:
    socket = await connect(server)
    started = await socket.start(num_frames=45, extra_params={"pace_to_media_time": True})
    session = session_of(server, started)
    await socket.media()
    await socket.media()
    await socket.media()
    assert len(session.ticks) == 3
    server.clock.now += 2
    server.context.table.scheduler.wake()
    await socket.expect("session.done")


async def test_clients_that_vanish_at_any_moment_leave_nothing() -> None:
    rng = random.Random(7)
    async with serving(ScriptedWorker(model_info(capacity_sessions=2))) as server:
        for _ in range(8):
            crowd = [await OmniSocket.open(server.url) for _ in range(3)]
            for socket in crowd:
                await socket.send_start(**rng.choice([{}, {"num_frames": 21}, {"streaming_buffer_seconds": 1.25}]))
                await socket.interact({"prompt": "rain"}, "e")
            for socket in crowd[: rng.randrange(3)]:
                await socket.receive()
            rng.shuffle(crowd)
            for socket in crowd:
                if rng.random() < 0.3:
                    await socket.send("session.stop")
                socket.connection.transport.abort()
            for socket in crowd:
                await socket.connection.wait_closed()
        table = server.context.table
        await server.until(lambda: not (table.all() or table.num_resident or table.num_waiting))
        assert not server.worker.sessions
        last = await connect(server)
        await last.start(num_frames=21)
        assert (await last.expect("session.done"))["chunks"] == 2
