"""Frames survive any cut of the stream, and nothing else passes."""

from __future__ import annotations

import socket
import struct
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldmodel.framing import (
    Frame,
    FrameLimits,
    FrameReader,
    FrameTooLarge,
    FrameTruncated,
    FramingError,
    MalformedMessage,
    Message,
    decode_header,
    encode_frame,
    receive_frame,
    send_frame,
)
from worldmodel.messages import (
    AppliedEvent,
    ArrayPart,
    ChunkMedia,
    Control,
    ControlEvent,
    FailureOutcome,
    ImageSize,
    LoadProgress,
    LoadStage,
    MediaFormat,
    MediaPart,
    MemoryStats,
    OpenSession,
    RequestFailed,
    RequestId,
    SessionId,
    StageTimings,
    StopWorker,
    Tick,
    TickCommitted,
)

SESSION = SessionId("s-1")
REQUEST = RequestId("r-1")
MEMORY = MemoryStats(sessions=1, total_pages=20, free_pages=3)

messages: st.SearchStrategy[Message] = st.one_of(
    st.just(StopWorker()),
    st.builds(LoadProgress, stage=st.sampled_from(LoadStage), fraction=st.floats(0, 1), detail=st.text(max_size=20)),
    st.builds(
        Tick,
        request_id=st.just(REQUEST),
        session_id=st.just(SESSION),
        chunk_index=st.integers(0, 2**40),
        prompt=st.none() | st.text(max_size=40),
        events=st.lists(
            st.builds(
                ControlEvent,
                event_id=st.integers(0, 2**53 - 1),
                controls=st.tuples(st.builds(Control, track=st.text(), schema=st.text(), data=st.binary())),
                age_ms=st.floats(0, 1e6),
            ),
            max_size=3,
        ).map(tuple),
        arrays=st.lists(
            st.builds(
                ArrayPart,
                name=st.text(max_size=20),
                dtype=st.sampled_from(["<f4", "|u1"]),
                shape=st.lists(st.integers(0, 999), max_size=4).map(tuple),
                num_bytes=st.integers(0, 2**40),
            ),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(
        OpenSession,
        request_id=st.just(REQUEST),
        session_id=st.just(SESSION),
        prompt=st.text(max_size=40),
        seed=st.integers(0, 2**53 - 1),
        image=st.none() | st.builds(ImageSize, width=st.integers(1, 9999), height=st.integers(1, 9999)),
        outputs=st.lists(st.sampled_from(MediaFormat), max_size=3).map(tuple),
    ),
)


def feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[Frame]:
    """Give `data` to the reader in pieces of the given sizes (repeated), never more than it asks for."""
    frames: list[Frame] = []
    position = turn = 0
    while position < len(data):
        buffer = reader.buffer()
        count = min(len(buffer), sizes[turn % len(sizes)], len(data) - position)
        buffer[:count] = data[position : position + count]
        frame = reader.advance(count)
        if frame is not None:
            frames.append(frame)
        position += count
        turn += 1
    return frames


def joined(message: Message, *payload: bytes) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(message, payload))


@settings(max_examples=150, deadline=None)
@given(
    sent=st.lists(st.tuples(messages, st.binary(max_size=300)), max_size=5),
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6),
)
def test_frames_survive_any_cut(sent: list[tuple[Message, bytes]], sizes: list[int]) -> None:
    reader = FrameReader()
    frames = feed(reader, b"".join(joined(message, payload) for message, payload in sent), sizes)
    assert [(frame.message, bytes(frame.payload)) for frame in frames] == sent
    reader.end()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_framing_errors(data: bytes) -> None:
    reader = FrameReader(FrameLimits(max_header_bytes=1000, max_payload_bytes=1000))
    try:
        frames = feed(reader, data, [7])
        reader.end()
    except FramingError:
        return
    assert data == b"" or frames


@settings(max_examples=100, deadline=None)
@given(message=messages, position=st.integers(0, 400), value=st.integers(0, 255))
def test_a_flipped_header_byte_is_a_message_or_an_error(message: Message, position: int, value: int) -> None:
    header = bytearray(joined(message)[12:])
    header[position % len(header)] = value
    try:
        decoded = decode_header(header)
    except MalformedMessage:
        return
    assert isinstance(decoded, Message)


@settings(max_examples=60, deadline=None)
@given(message=messages, payload=st.binary(min_size=1, max_size=50), cut=st.integers(1, 10_000))
def test_a_cut_stream_is_truncated(message: Message, payload: bytes, cut: int) -> None:
    data = joined(message, payload)
    reader = FrameReader()
    assert feed(reader, data[: 1 + cut % (len(data) - 1)], [50]) == []
    with pytest.raises(FrameTruncated, match=r"expected .* got"):
        reader.end()


def test_every_field_of_the_answers_comes_back() -> None:
    committed = TickCommitted(
        request_id=REQUEST,
        session_id=SESSION,
        chunk_index=3,
        applied_event_ids=(4, 9),
        applied=(AppliedEvent(event_id=4, latent_frame=0), AppliedEvent(event_id=9, latent_frame=2)),
        num_media_frames=12,
        pose=tuple(float(i) for i in range(16)),
        timings=StageTimings(denoise_ms=1.5, commit_ms=2.0, decode_ms=3.25),
        memory=MEMORY,
    )
    failed = RequestFailed(
        request_id=REQUEST,
        session_id=SESSION,
        outcome=FailureOutcome.ROLLED_BACK,
        code="x",
        message="y",
        memory=MEMORY,
        field="prompt",
        transient=True,
    )
    frames = feed(FrameReader(), joined(committed) + joined(failed), [1000])
    assert [frame.message for frame in frames] == [committed, failed]


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes", "named"), [(2**32 - 1, 0, "4294967295"), (10, 2**63, str(2**63))]
)
def test_a_huge_frame_is_refused_before_memory_is_taken(header_bytes: int, payload_bytes: int, named: str) -> None:
    reader = FrameReader()
    with pytest.raises(FrameTooLarge, match=named):
        feed(reader, struct.pack("!IQ", header_bytes, payload_bytes), [12])


def test_a_message_above_the_limit_is_not_encoded() -> None:
    limits = FrameLimits(max_header_bytes=1000, max_payload_bytes=10)
    with pytest.raises(FrameTooLarge, match="payload of 11 bytes: expected at most 10"):
        encode_frame(StopWorker(), [b"12345", b"678901"], limits)
    with pytest.raises(FrameTooLarge, match="header of"):
        encode_frame(LoadProgress(stage=LoadStage.VAE, fraction=0, detail="x" * 1000), limits=limits)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"\xc1", "expected a header"),
        (msgspec.msgpack.encode(["Popen", {}]), "unknown message type 'Popen'"),
        (msgspec.msgpack.encode(["Tick", {"request_id": "r"}]), "bad Tick message"),
        (msgspec.msgpack.encode(["LoadProgress", {"stage": "lunch", "fraction": 0.0}]), "stage"),
        (msgspec.msgpack.encode({"type": "Tick"}), "expected a header"),
    ],
)
def test_a_bad_header_says_what_is_wrong(header: bytes, text: str) -> None:
    with pytest.raises(MalformedMessage, match=text):
        decode_header(header)


def test_an_empty_header_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="length 0"):
        feed(FrameReader(), struct.pack("!IQ", 0, 0), [12])


def test_payload_parts_are_not_copied() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    buffers = encode_frame(StopWorker(), [array.data, np.zeros((0, 3), np.uint8).data])
    assert len(buffers) == 2
    array[0, 0] = 99.0
    assert np.frombuffer(buffers[1], np.float32)[0] == 99.0


def test_blocking_sockets_carry_frames_both_ways_until_the_end() -> None:
    ours, theirs = socket.socketpair()
    image = np.arange(3_000_000, dtype=np.uint32)
    part = MediaPart(format=MediaFormat.RGB24, shape=image.shape, num_bytes=image.nbytes)
    media = ChunkMedia(
        request_id=REQUEST, session_id=SESSION, chunk_index=0, num_media_frames=1, parts=(part,), transfer_ms=0.0
    )

    def send() -> None:
        with theirs:
            send_frame(theirs, media, [image.data])
            send_frame(theirs, StopWorker())

    thread = threading.Thread(target=send)
    thread.start()
    with ours:
        reader = FrameReader()
        first = receive_frame(ours, reader)
        second = receive_frame(ours, reader)
        assert receive_frame(ours, reader) is None
    thread.join()
    assert first is not None
    assert first.message == media
    np.testing.assert_array_equal(np.frombuffer(first.payload, np.uint32), image)
    assert second is not None
    assert second.message == StopWorker()


def test_a_peer_that_dies_inside_a_frame_is_truncation() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(joined(StopWorker())[:-1])
    with ours, pytest.raises(FrameTruncated, match="header"):
        receive_frame(ours, FrameReader())
