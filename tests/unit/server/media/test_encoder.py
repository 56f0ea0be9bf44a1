"""libx264: nothing held back, an IDR at each chunk, clear errors."""

import numpy as np
import pytest

from server.config import MediaSection
from server.config_values import ConfigError
from server.media import h264
from server.media.encoder import EncoderFailed, H264Encoder
from tests.support.media_chunks import yuv_chunk


def encoder(media: MediaSection | None = None) -> H264Encoder:
    return H264Encoder(width=160, height=96, fps=16, media=media or MediaSection())


@pytest.mark.parametrize("preset", ["ultrafast", "veryfast", "medium"])
def test_every_frame_leaves_with_its_chunk_and_only_the_first_is_an_idr(preset: str) -> None:
    subject = encoder(MediaSection(preset=preset))
    for num_frames in (9, 12, 1, 12):
        units = subject.encode(yuv_chunk(width=160, height=96, num_frames=num_frames))
        assert [unit.keyframe for unit in units] == [True] + [False] * (num_frames - 1)


def test_a_scene_cut_inside_a_chunk_makes_no_keyframe() -> None:
    frames = yuv_chunk(width=160, height=96, num_frames=12)
    frames[6:] = np.random.default_rng(3).integers(16, 235, frames[6:].shape, dtype=np.uint8)
    assert [unit.keyframe for unit in encoder().encode(frames)].count(True) == 1


def test_samples_hold_no_parameter_sets_and_no_settings_text() -> None:
    units = encoder().encode(yuv_chunk(width=160, height=96, num_frames=3))
    types = [[h264.nal_type(nal) for nal in unit.nals] for unit in units]
    assert types == [[5], [1], [1]]


def test_does_not_change_or_keep_the_frames() -> None:
    frames = yuv_chunk(width=160, height=96, num_frames=2)
    before = frames.copy()
    frames.flags.writeable = False
    first = encoder().encode(frames)
    assert np.array_equal(frames, before)
    subject = encoder()
    reused = before.copy()
    units = subject.encode(reused)
    reused[:] = 0
    subject.encode(before)
    assert units == first


def test_crf_is_ours() -> None:
    frames = yuv_chunk(width=160, height=96, num_frames=6)

    def coded_bytes(crf: int) -> int:
        return sum(len(nal) for unit in encoder(MediaSection(crf=crf)).encode(frames) for nal in unit.nals)

    assert coded_bytes(15) > 1.5 * coded_bytes(35)


@pytest.mark.parametrize("shape", [(2, 144, 161), (2, 96, 160), (144, 160), (0, 144, 160)])
def test_refuses_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected frames of shape \[n, 144, 160\]"):
        encoder().encode(np.zeros(shape, np.uint8))


@pytest.mark.parametrize(("width", "height"), [(161, 96), (160, 97), (0, 96)])
def test_refuses_odd_sizes(width: int, height: int) -> None:
    with pytest.raises(ValueError, match=f"positive and even, got {width}x{height}"):
        H264Encoder(width=width, height=height, fps=16, media=MediaSection())


def test_refuses_a_frame_rate_of_zero() -> None:
    with pytest.raises(ValueError, match="fps must be positive, got 0"):
        H264Encoder(width=160, height=96, fps=0, media=MediaSection())


def test_names_the_settings_that_libx264_refuses() -> None:
    with pytest.raises(ValueError, match="libx264 refused 40000x96 at 16 fps, preset veryfast, crf 20"):
        H264Encoder(width=40000, height=96, fps=16, media=MediaSection())


def test_never_uses_a_profile_that_browsers_do_not_play() -> None:
    assert encoder(MediaSection(crf=1)).parameter_sets.codec.startswith("avc1.64")
    # crf 0 is lossless, a profile of its own.
    with pytest.raises(ConfigError, match=r"media.crf: expected 1 to 51, got 0"):
        MediaSection(crf=0)


def test_a_refused_chunk_leaves_the_encoder_usable() -> None:
    subject = encoder()
    with pytest.raises(ValueError, match="expected frames of shape"):
        subject.encode(np.zeros((1, 10, 10), np.uint8))
    assert len(subject.encode(yuv_chunk(width=160, height=96, num_frames=2))) == 2


def test_close_is_idempotent_and_final() -> None:
    subject = encoder()
    subject.close()
    subject.close()
    with pytest.raises(EncoderFailed, match="closed"):
        subject.encode(yuv_chunk(width=160, height=96, num_frames=1))
