"""Synthetic chunks for media tests: smooth moving pictures in the layouts that a worker sends."""

from __future__ import annotations

import io

import av
import numpy as np
import numpy.typing as npt

from worldmodel.messages import MediaFormat, MediaPart

Frames = npt.NDArray[np.uint8]


def yuv_chunk(*, width: int, height: int, num_frames: int, first_frame: int = 0) -> Frames:
    """Make uint8 [frames, height * 3 / 2, width], limited range: drifting luma waves, each frame of its own colour."""
    frames = np.empty((num_frames, height * 3 // 2, width), np.uint8)
    y, x = np.mgrid[0:height, 0:width]
    for index in range(num_frames):
        time = first_frame + index
        frames[index, :height] = 126 + 70 * np.sin((x + 3 * time) / 17) * np.cos((y - 2 * time) / 13)
        chroma = frames[index, height:].reshape(2, -1)
        chroma[0] = 128 + 50 * np.sin(time / 5)
        chroma[1] = 128 + 50 * np.cos(time / 7)
    return frames


def part_of(array: npt.NDArray[np.generic], format: MediaFormat) -> tuple[tuple[MediaPart, ...], memoryview]:
    """Describe an array as the only part of a payload."""
    part = MediaPart(format=format, shape=array.shape, num_bytes=array.nbytes)
    return (part,), memoryview(array.tobytes())


def decode_video(stream: bytes, *, container: str) -> list[Frames]:
    """Decode all frames, each as uint8 [height * 3 / 2, width]."""
    with av.open(io.BytesIO(stream), format=container) as source:
        return [frame.to_ndarray(format="yuv420p") for frame in source.decode(video=0)]


def psnr_db(a: Frames, b: Frames) -> float:
    difference = a.astype(np.float64) - b.astype(np.float64)
    return float(10 * np.log10(255**2 / np.mean(difference**2)))
