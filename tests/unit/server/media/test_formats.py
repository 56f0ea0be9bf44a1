"""Every stream format, from a worker's payload to bytes that PyAV and Pillow decode."""

import gc
import io
import tracemalloc

import av
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from server.config import MediaSection
from server.media.encoder import EncoderFailed
from server.media.formats import EncodedChunk, StreamEncoder, create_stream_encoder
from server.wire.messages import StreamFormat
from tests.support.media_chunks import Frames, decode_video, part_of, psnr_db, yuv_chunk
from tests.support.mp4_boxes import parse_mp4
from worldmodel.messages import MediaFormat, MediaPart

WIDTH, HEIGHT, FPS = 160, 96, 12
CHUNK_FRAMES = (9, 12, 12)


def create(format: StreamFormat, *, width: int = WIDTH, height: int = HEIGHT, fps: int = FPS) -> StreamEncoder:
    return create_stream_encoder(format, width=width, height=height, fps=fps, media=MediaSection())


def encode_yuv(encoder: StreamEncoder, frames: Frames) -> EncodedChunk:
    parts, payload = part_of(frames, MediaFormat.YUV420)
    return encoder.encode(parts, payload, len(frames))


def source_chunks(counts: tuple[int, ...] = CHUNK_FRAMES, *, width: int = WIDTH, height: int = HEIGHT) -> list[Frames]:
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    return [
        yuv_chunk(width=width, height=height, num_frames=count, first_frame=first)
        for count, first in zip(counts, firsts, strict=True)
    ]


def init_payload(encoder: StreamEncoder) -> bytes:
    init = encoder.new_epoch().init_segment()
    assert init is not None
    return init.payload


# ---------------------------------------------------------------- fmp4


@pytest.mark.parametrize(("width", "height", "fps"), [(160, 96, 12), (832, 480, 16), (854, 482, 24)])
def test_after_each_chunk_all_its_frames_decode(width: int, height: int, fps: int) -> None:
    encoder = create(StreamFormat.FMP4, width=width, height=height, fps=fps)
    epoch = encoder.new_epoch()
    stream = init_payload(encoder)
    sent: list[Frames] = []
    for frames in source_chunks(width=width, height=height):
        sent.extend(frames)
        stream += epoch.mux(encode_yuv(encoder, frames)).payload
        decoded = decode_video(stream, container="mp4")
        assert len(decoded) == len(sent)
        worst_db = min(psnr_db(got, want) for got, want in zip(decoded, sent, strict=True))
        assert worst_db > 38


def test_time_starts_at_zero_and_has_no_gap() -> None:
    encoder = create(StreamFormat.FMP4)
    epoch = encoder.new_epoch()
    muxed = [epoch.mux(encode_yuv(encoder, frames)) for frames in source_chunks((9, 12, 7, 1))]
    file = parse_mp4(init_payload(encoder) + b"".join(chunk.payload for chunk in muxed))
    assert [fragment.sequence_number for fragment in file.fragments] == [1, 2, 3, 4]
    assert [fragment.decode_time for fragment in file.fragments] == [0, 9000, 21000, 28000]
    assert [fragment.end_time for fragment in file.fragments] == [9000, 21000, 28000, 29000]
    assert [(chunk.pts, chunk.timescale, chunk.num_frames) for chunk in muxed] == [
        (0, 12000, 9),
        (9000, 12000, 12),
        (21000, 12000, 7),
        (28000, 12000, 1),
    ]
    assert file.init.timescale == 12000
    assert all(chunk.keyframe for chunk in muxed)


def test_a_player_sees_our_durations() -> None:
    encoder = create(StreamFormat.FMP4, fps=16)
    epoch = encoder.new_epoch()
    stream = init_payload(encoder) + b"".join(
        epoch.mux(encode_yuv(encoder, frames)).payload for frames in source_chunks()
    )
    with av.open(io.BytesIO(stream), format="mp4") as source:
        packets = [packet for packet in source.demux(video=0) if packet.size]
        times = [float(packet.pts * packet.time_base) for packet in packets]
        durations = {float(packet.duration * packet.time_base) for packet in packets}
        keyframes = [index for index, packet in enumerate(packets) if packet.is_keyframe]
    assert times == [index / 16 for index in range(33)]
    assert durations == {1 / 16}
    assert keyframes == [0, 9, 21]


def test_each_fragment_can_be_joined_at() -> None:
    encoder = create(StreamFormat.FMP4)
    epoch = encoder.new_epoch()
    for frames in source_chunks():
        fragment = epoch.mux(encode_yuv(encoder, frames)).payload
        decoded = decode_video(init_payload(encoder) + fragment, container="mp4")
        assert len(decoded) == len(frames)
        assert psnr_db(decoded[0], frames[0]) > 38


@pytest.mark.parametrize("preset", ["ultrafast", "veryfast"])
def test_mime_codec_and_decoder_configuration_agree(preset: str) -> None:
    encoder = create_stream_encoder(StreamFormat.FMP4, width=832, height=480, fps=16, media=MediaSection(preset=preset))
    init = encoder.new_epoch().init_segment()
    assert init is not None
    facts = parse_mp4(init.payload).init
    assert facts.codec == init.codec == f"avc1.{facts.sps[1:4].hex()}"
    assert encoder.mime == f'video/mp4; codecs="{init.codec}"'


def test_what_the_decoder_reads_from_the_stream_is_bt709_limited() -> None:
    encoder = create(StreamFormat.FMP4)
    stream = init_payload(encoder) + encoder.new_epoch().mux(encode_yuv(encoder, source_chunks()[0])).payload
    with av.open(io.BytesIO(stream), format="mp4") as source:
        frame = next(source.decode(video=0))
    assert (frame.color_range, frame.colorspace, frame.color_primaries, frame.color_trc) == (1, 1, 1, 1)


def test_samples_are_whole_nal_units_and_the_first_is_an_idr() -> None:
    encoder = create(StreamFormat.FMP4)
    epoch = encoder.new_epoch()
    stream = init_payload(encoder) + b"".join(
        epoch.mux(encode_yuv(encoder, frames)).payload for frames in source_chunks()
    )
    for fragment in parse_mp4(stream).fragments:
        types = [[nal[0] & 0x1F for nal in row.nals] for row in fragment.samples]
        assert types == [[5]] + [[1]] * (len(types) - 1)
        assert [row.is_sync for row in fragment.samples] == [True] + [False] * (len(types) - 1)


def test_a_kept_chunk_is_muxed_again_in_the_next_epoch() -> None:
    encoder = create(StreamFormat.FMP4)
    first = encoder.new_epoch()
    kept = [encode_yuv(encoder, frames) for frames in source_chunks()]
    for chunk in kept:
        first.mux(chunk)
    second = encoder.new_epoch()
    resumed = [second.mux(chunk) for chunk in kept[1:]]
    later = source_chunks((9, 12, 12, 5))[3]
    resumed.append(second.mux(encode_yuv(encoder, later)))
    assert [chunk.pts for chunk in resumed] == [0, 12000, 24000]
    stream = init_payload(encoder) + b"".join(chunk.payload for chunk in resumed)
    assert [fragment.sequence_number for fragment in parse_mp4(stream).fragments] == [1, 2, 3]
    decoded = decode_video(stream, container="mp4")
    assert len(decoded) == 29
    assert psnr_db(decoded[-1], later[-1]) > 38


def test_the_init_segment_is_the_same_in_every_epoch() -> None:
    encoder = create(StreamFormat.FMP4)
    before = init_payload(encoder)
    encode_yuv(encoder, source_chunks()[0])
    assert init_payload(encoder) == before


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    half_width=st.integers(8, 120),
    half_height=st.integers(8, 80),
    counts=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    fps=st.integers(1, 60),
)
def test_any_size_and_any_chunk_lengths(half_width: int, half_height: int, counts: list[int], fps: int) -> None:
    width, height = 2 * half_width, 2 * half_height
    encoder = create(StreamFormat.FMP4, width=width, height=height, fps=fps)
    epoch = encoder.new_epoch()
    stream = init_payload(encoder)
    num_sent = 0
    for frames in source_chunks(tuple(counts), width=width, height=height):
        stream += epoch.mux(encode_yuv(encoder, frames)).payload
        num_sent += len(frames)
        decoded = decode_video(stream, container="mp4")
        assert len(decoded) == num_sent
        assert decoded[-1].shape == frames[-1].shape
        assert psnr_db(decoded[-1], frames[-1]) > 32
    file = parse_mp4(stream)
    assert (file.init.width, file.init.height) == (width, height)
    assert file.fragments[-1].end_time * fps == num_sent * file.init.timescale


# ---------------------------------------------------------------- other formats


def test_annex_b_carries_parameter_sets_at_each_chunk() -> None:
    encoder = create(StreamFormat.H264)
    epoch = encoder.new_epoch()
    assert epoch.init_segment() is None
    assert encoder.mime is not None
    assert encoder.mime.startswith('video/h264; codecs="avc1.64')
    stream = b""
    for frames in source_chunks():
        chunk = epoch.mux(encode_yuv(encoder, frames))
        assert [nal[0] & 0x1F for nal in chunk.payload.split(b"\0\0\0\1")[1:]] == [7, 8, 5] + [1] * (len(frames) - 1)
        assert chunk.sizes is not None
        assert len(chunk.sizes) == len(frames)
        assert sum(chunk.sizes) == len(chunk.payload)
        assert len(decode_video(chunk.payload, container="h264")) == len(frames)
        stream += chunk.payload
    assert len(decode_video(stream, container="h264")) == 33


def test_jpeg_frames_have_the_colours_of_the_source() -> None:
    colours = np.array([[230, 30, 40], [20, 200, 60], [40, 60, 220], [128, 128, 128]], np.float64)
    encoder = create(StreamFormat.JPEG)
    chunk = encoder.new_epoch().mux(encode_yuv(encoder, _flat_frames(colours)))
    assert chunk.sizes is not None
    assert (chunk.num_frames, len(chunk.sizes), sum(chunk.sizes)) == (4, 4, len(chunk.payload))
    ends = np.cumsum(chunk.sizes)
    for colour, end, size in zip(colours, ends, chunk.sizes, strict=True):
        image = np.asarray(Image.open(io.BytesIO(chunk.payload[end - size : end])))
        assert image.shape == (HEIGHT, WIDTH, 3)
        assert np.abs(image.reshape(-1, 3) - colour).max() <= 4
    assert encoder.mime == "image/jpeg"


def _flat_frames(rgb: np.ndarray) -> Frames:
    """One frame per colour, by the BT.709 limited-range formula (ITU-R BT.709-6 sections 3 and 4)."""
    luma = rgb @ np.array([0.2126, 0.7152, 0.0722])
    planes = np.stack(
        [
            16 + luma * 219 / 255,
            128 + (rgb[:, 2] - luma) / 1.8556 * 224 / 255,
            128 + (rgb[:, 0] - luma) / 1.5748 * 224 / 255,
        ]
    ).round()
    frames = np.empty((len(rgb), HEIGHT * 3 // 2, WIDTH), np.uint8)
    for frame, (luma_value, blue, red) in zip(frames, planes.T, strict=True):
        frame[:HEIGHT] = luma_value
        frame[HEIGHT : HEIGHT * 5 // 4] = blue
        frame[HEIGHT * 5 // 4 :] = red
    return frames


def test_rgb_goes_through_unchanged() -> None:
    encoder = create(StreamFormat.RGB24)
    assert (encoder.outputs, encoder.mime) == ((MediaFormat.RGB24,), None)
    array = np.random.default_rng(1).integers(0, 256, (12, HEIGHT, WIDTH, 3), dtype=np.uint8)
    parts, payload = part_of(array, MediaFormat.RGB24)
    chunk = encoder.new_epoch().mux(encoder.encode(parts, payload, 12))
    assert chunk.payload == array.tobytes()
    assert (chunk.shape, chunk.sizes, chunk.num_frames) == ((12, HEIGHT, WIDTH, 3), None, 12)


def test_latents_go_through_unchanged_and_count_media_frames() -> None:
    encoder = create(StreamFormat.LATENT)
    assert encoder.outputs == (MediaFormat.LATENT,)
    array = np.random.default_rng(2).standard_normal((16, 3, 12, 20)).astype(np.float32)
    parts, payload = part_of(array, MediaFormat.LATENT)
    epoch = encoder.new_epoch()
    first, second = (epoch.mux(encoder.encode(parts, payload, count)) for count in (9, 12))
    assert first.payload == array.tobytes()
    assert first.shape == (16, 3, 12, 20)
    assert second.pts == 9 * first.timescale // FPS


def test_a_format_finds_its_part_among_others() -> None:
    frames = yuv_chunk(width=WIDTH, height=HEIGHT, num_frames=3)
    latent = np.ones((16, 1, 12, 20), np.float32)
    parts = (*part_of(latent, MediaFormat.LATENT)[0], *part_of(frames, MediaFormat.YUV420)[0])
    payload = memoryview(latent.tobytes() + frames.tobytes())
    alone = encode_yuv(create(StreamFormat.FMP4), frames)
    assert create(StreamFormat.FMP4).encode(parts, payload, 3) == alone


# ---------------------------------------------------------------- refusals and lifetime


def yuv_part(shape: tuple[int, ...], num_bytes: int) -> tuple[MediaPart, ...]:
    return (MediaPart(format=MediaFormat.YUV420, shape=shape, num_bytes=num_bytes),)


@pytest.mark.parametrize(
    ("parts", "num_bytes", "num_frames", "message"),
    [
        (yuv_part((2, 144, 160), 46080), 46079, 2, "payload has 46079 bytes, but its parts add up to 46080"),
        (yuv_part((2, 144, 160), 46000), 46000, 2, "is 46080 bytes, got 46000"),
        (yuv_part((2, 144, 160), 46080), 46080, 3, r"expected yuv420p of shape \[3, 144, 160\], got \[2, 144, 160\]"),
        (yuv_part((2, 160, 144), 46080), 46080, 2, r"expected yuv420p of shape \[2, 144, 160\]"),
        (yuv_part((0, 144, 160), 0), 0, 0, "num_frames must be at least 1, got 0"),
        ((), 0, 2, r"expected a part in format yuv420p, got \[\]"),
    ],
)
@pytest.mark.parametrize("format", [StreamFormat.FMP4, StreamFormat.H264, StreamFormat.JPEG])
def test_refuses_what_does_not_fit_together(
    format: StreamFormat, parts: tuple[MediaPart, ...], num_bytes: int, num_frames: int, message: str
) -> None:
    encoder = create(format)
    with pytest.raises(ValueError, match=message):
        encoder.encode(parts, memoryview(bytes(num_bytes)), num_frames)
    assert encode_yuv(encoder, yuv_chunk(width=WIDTH, height=HEIGHT, num_frames=2)).num_frames == 2


def test_refuses_rgb_of_another_size() -> None:
    parts, payload = part_of(np.zeros((1, 95, 160, 3), np.uint8), MediaFormat.RGB24)
    with pytest.raises(ValueError, match=r"expected rgb24 of shape \[1, 96, 160, 3\], got \[1, 95, 160, 3\]"):
        create(StreamFormat.RGB24).encode(parts, payload, 1)


def test_refuses_to_mux_a_chunk_of_another_format() -> None:
    chunk = encode_yuv(create(StreamFormat.H264), yuv_chunk(width=WIDTH, height=HEIGHT, num_frames=1))
    with pytest.raises(ValueError, match="expected a chunk in format fmp4, got h264"):
        create(StreamFormat.FMP4).new_epoch().mux(chunk)


@pytest.mark.parametrize("format", list(StreamFormat))
def test_close_is_idempotent_and_final_for_encoding(format: StreamFormat) -> None:
    encoder = create(format)
    encoder.close()
    encoder.close()
    output = encoder.outputs[0]
    shape = {
        MediaFormat.YUV420: (1, 144, 160),
        MediaFormat.RGB24: (1, 96, 160, 3),
        MediaFormat.LATENT: (16, 1, 12, 20),
    }[output]
    array = np.zeros(shape, np.float32 if output is MediaFormat.LATENT else np.uint8)
    with pytest.raises(EncoderFailed, match="closed"):
        encoder.encode(*part_of(array, output), 1)
    assert encoder.new_epoch().timescale == FPS * 1000


@pytest.mark.parametrize("format", [StreamFormat.FMP4, pytest.param(StreamFormat.JPEG, marks=pytest.mark.slow)])
def test_memory_does_not_grow_over_200_chunks(format: StreamFormat) -> None:
    encoder = create(format)
    epoch = encoder.new_epoch()
    parts, payload = part_of(yuv_chunk(width=WIDTH, height=HEIGHT, num_frames=12), MediaFormat.YUV420)

    def run(num_chunks: int) -> None:
        for _ in range(num_chunks):
            epoch.mux(encoder.encode(parts, payload, 12))

    process = psutil.Process()
    tracemalloc.start()
    try:
        run(20)
        gc.collect()
        python_bytes, process_bytes = tracemalloc.get_traced_memory()[0], process.memory_info().rss
        run(200)
        gc.collect()
        grown_bytes = tracemalloc.get_traced_memory()[0] - python_bytes
        process_grown_bytes = process.memory_info().rss - process_bytes
    finally:
        tracemalloc.stop()
    assert grown_bytes < 64 * 1024
    # 200 leaked chunks would be 55 MB.
    assert process_grown_bytes < 20 * 1024 * 1024
