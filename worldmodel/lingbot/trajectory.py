"""Camera paths from files: `poses.npy` and `intrinsics.npy` of a clip -> one pose a latent frame. Torch-free.

Files must be regular, are bounded in size before a byte is parsed, and hold plain numbers only. Links are followed only
for somebody who may read the files anyway, on the command line; what clients name is opened without. What a trajectory
does in a session belongs to `reducer.py`: `trajectory_control` makes the control for it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worldmodel.errors import RequestRefused
from worldmodel.lingbot.config import MAX_PIXELS, MIN_FOCAL_PX
from worldmodel.lingbot.controls import MAX_COORDINATE, ROTATION_TOLERANCE
from worldmodel.lingbot.poses import (
    Float64,
    quaternions_from_rotations,
    rotations_from_quaternions,
    slerp,
)

MAX_FILE_POSES = 4096
"""A pose for each media frame of 1024 latent frames, the most that the official code can place."""

MAX_NPY_HEADER_BYTES = 4096

_NPY_MAGIC = b"\x93NUMPY"
_NPY_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}
"""Size of the header's length in each version of the format that we read (numpy, doc/neps/nep-0001)."""

_SIZE = rb"(?:0|[1-9]\d{0,8})"
_NPY_ITEMS = (
    rb"'descr': ?'(?P<descr>[^']{1,40})'",
    rb"'fortran_order': ?(?P<order>True|False)",
    rb"'shape': ?\((?P<shape>" + _SIZE + rb"(?:, ?" + _SIZE + rb"){0,7}),? ?\)",
)
_NPY_HEADER = re.compile(rb"\{(?:(?:" + rb"|".join(_NPY_ITEMS) + rb")(?:, ?|(?=\}))){3}\}\s*")
_FLOAT_TYPES = (b"<f4", b"<f8", b">f4", b">f8")
MEDIA_FRAMES_PER_LATENT_FRAME = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CameraClip:
    """One pose [n, 4, 4] and one row fx, fy, cx, cy [n, 4] for each latent frame, or for each media frame of a file."""

    poses_n44: Float64
    intrinsics_n4: Float64


def load_clip(
    folder: Path, below: Sequence[str] = (), *, max_poses: int = MAX_FILE_POSES, follows_links: bool = False
) -> CameraClip:
    """Read `poses.npy` [N, 4, 4] and `intrinsics.npy` [N, 4] (or one row) from a folder.

    `below` leads from a trusted folder to the one with the files, a name a step; none of them, nor the folder, nor the
    files may be a link unless `follows_links`.

    Raises `RequestRefused` (code ``bad_trajectory``, `field` the file name) for links, special files, files that are
    too large, other shapes or types, values that are not finite, and poses that are not rigid.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    folder_fd = _open_folder(folder, below, flags)
    try:
        poses_n44 = _load(folder_fd, flags, "poses.npy", (4, 4), max_poses)
        intrinsics_n4 = _load(folder_fd, flags, "intrinsics.npy", (4,), max_poses)
    finally:
        os.close(folder_fd)
    _check_rigid(poses_n44, "poses.npy")
    if len(intrinsics_n4) not in (1, len(poses_n44)):
        raise _refusal("intrinsics.npy", f"expected 1 row or {len(poses_n44)}, one a pose, got {len(intrinsics_n4)}")
    focal_n2 = intrinsics_n4[:, :2]
    if (focal_n2 < MIN_FOCAL_PX).any() or (focal_n2 > MAX_PIXELS).any():
        raise _refusal("intrinsics.npy", f"expected focal lengths from {MIN_FOCAL_PX:g} to {MAX_PIXELS:g} pixels")
    if (np.abs(intrinsics_n4[:, 2:]) > MAX_PIXELS).any():
        raise _refusal("intrinsics.npy", f"expected principal points within {MAX_PIXELS:g} pixels")
    return CameraClip(poses_n44=poses_n44, intrinsics_n4=np.broadcast_to(intrinsics_n4, (len(poses_n44), 4)).copy())


def num_latent_frames(num_media_frames: int, num_poses: int, latent_frames_per_chunk: int) -> int:
    """Count the latent frames of a clip: whole chunks within the poses (official code, wan/image2video.py)."""
    kept = _kept_poses(num_media_frames, num_poses)
    latent_frames = (kept - 1) // MEDIA_FRAMES_PER_LATENT_FRAME + 1
    return latent_frames - latent_frames % latent_frames_per_chunk


def resample(clip: CameraClip, num_media_frames: int, latent_frames_per_chunk: int) -> CameraClip:
    """Reduce a clip with a pose for each media frame to one with a pose for each latent frame.

    The targets are spread over the whole kept range, ends included. For a compatible length that is each fourth pose;
    when the latent count had to be cut to whole chunks, the path is stretched over the shorter axis, as the official
    code does (wan/utils/cam_utils.py). Translations and intrinsics are interpolated linearly, rotations on the
    sphere.

    Raises `RequestRefused` if not even one chunk fits.
    """
    count = num_latent_frames(num_media_frames, len(clip.poses_n44), latent_frames_per_chunk)
    if count < 1:
        needed = (latent_frames_per_chunk - 1) * MEDIA_FRAMES_PER_LATENT_FRAME + 1
        raise _refusal("poses.npy", f"expected at least {needed} poses for one chunk, got {len(clip.poses_n44)}")
    kept = _kept_poses(num_media_frames, len(clip.poses_n44))
    return interpolate(clip, np.linspace(0.0, kept - 1.0, count))


def interpolate(clip: CameraClip, positions: Float64) -> CameraClip:
    """Read a clip at fractional indices [n] between 0 and its last pose."""
    last = len(clip.poses_n44) - 1
    low = np.clip(np.floor(positions).astype(np.int64), 0, max(last - 1, 0))
    high = np.minimum(low + 1, last)
    fractions = positions - low
    quaternions = quaternions_from_rotations(clip.poses_n44[:, :3, :3])
    poses_n44 = np.tile(np.eye(4), (len(positions), 1, 1))
    poses_n44[:, :3, :3] = rotations_from_quaternions(slerp(quaternions[low], quaternions[high], fractions))
    poses_n44[:, :3, 3] = _mix(clip.poses_n44[low, :3, 3], clip.poses_n44[high, :3, 3], fractions)
    intrinsics_n4 = _mix(clip.intrinsics_n4[low], clip.intrinsics_n4[high], fractions)
    return CameraClip(poses_n44=poses_n44, intrinsics_n4=intrinsics_n4)


def trajectory_control(clip: CameraClip) -> dict[str, object]:
    """Return a clip with a pose for each latent frame as the data of a `lingbot.camera_trajectory.v1` control.

    Intrinsics of files refer to the official 832x480 image, which is that control's default.
    """
    return {"poses": clip.poses_n44.tolist(), "intrinsics": clip.intrinsics_n4.tolist()}


def _kept_poses(num_media_frames: int, num_poses: int) -> int:
    kept = min(num_media_frames, num_poses)
    return kept - (kept - 1) % MEDIA_FRAMES_PER_LATENT_FRAME if kept > 0 else 0


def _mix(start: Float64, end: Float64, fractions: Float64) -> Float64:
    return start + (end - start) * fractions[:, None]


# ---------------------------------------------------------------- files


def _refusal(name: str, text: str) -> RequestRefused:
    return RequestRefused(f"{name}: {text}", code="bad_trajectory", field=name)


def _open_folder(folder: Path, below: Sequence[str], flags: int) -> int:
    """Open a folder for reading. With `O_NOFOLLOW` no link is followed from its own name on."""
    name, folder_fd = folder.name, -1
    try:
        folder_fd = os.open(folder, flags | os.O_DIRECTORY)
        for part in below:
            if part in ("", ".", "..") or "/" in part:
                raise _refusal("folder", f"expected a name, got {part!r}")
            name = part
            above_fd, folder_fd = folder_fd, os.open(part, flags | os.O_DIRECTORY, dir_fd=folder_fd)
            os.close(above_fd)
    except (OSError, RequestRefused) as error:
        if folder_fd >= 0:
            os.close(folder_fd)
        if isinstance(error, RequestRefused):
            raise
        raise _refusal("folder", f"{name!r} cannot be opened: {error.strerror}") from error
    return folder_fd


def _load(folder_fd: int, flags: int, name: str, row_shape: tuple[int, ...], max_rows: int) -> Float64:
    """Read one array of rows as float64."""
    data = _read(folder_fd, flags, name, MAX_NPY_HEADER_BYTES + max_rows * 8 * int(np.prod(row_shape)))
    shape, fortran_order, dtype, offset = _npy_header(data, name)
    if len(shape) != 1 + len(row_shape) or shape[1:] != row_shape:
        sides = ", ".join(map(str, ("N", *row_shape)))
        raise _refusal(name, f"expected the shape [{sides}], got {list(shape)}")
    if not 1 <= shape[0] <= max_rows:
        raise _refusal(name, f"expected 1 to {max_rows} rows, got {shape[0]}")
    count = int(np.prod(shape))
    if len(data) - offset != count * dtype.itemsize:
        raise _refusal(name, f"expected {count * dtype.itemsize} bytes of data, got {len(data) - offset}")
    flat = np.frombuffer(data, dtype=dtype, offset=offset)
    array = flat.reshape(shape, order="F" if fortran_order else "C").astype(np.float64)
    if not (np.abs(array) <= MAX_COORDINATE).all():
        raise _refusal(name, f"expected finite numbers of at most {MAX_COORDINATE:g}")
    return np.ascontiguousarray(array)


def _read(folder_fd: int, flags: int, name: str, max_bytes: int) -> bytes:
    """Read a regular file of an open folder."""
    try:
        # O_NONBLOCK keeps the open of a named pipe from waiting for a writer.
        file_fd = os.open(name, flags | os.O_NONBLOCK, dir_fd=folder_fd)
    except OSError as error:
        raise _refusal(name, f"cannot be opened: {error.strerror}") from error
    try:
        info = os.fstat(file_fd)
        if not stat.S_ISREG(info.st_mode):
            raise _refusal(name, "expected a regular file")
        if info.st_size > max_bytes:
            raise _refusal(name, f"expected at most {max_bytes} bytes, got {info.st_size}")
        with open(file_fd, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(file_fd)
    if len(data) > max_bytes:
        raise _refusal(name, f"expected at most {max_bytes} bytes, the file is growing")
    return data


def _npy_header(data: bytes, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.floating], int]:
    """Return shape, order, element type and offset of the data of an .npy file of floats.

    numpy's own reader evaluates the header as a Python literal: brackets or signs by the thousand end it in errors of
    the interpreter. All that it ever writes for plain floats is one dict of three items.
    """
    if not data.startswith(_NPY_MAGIC) or len(data) < len(_NPY_MAGIC) + 2:
        raise _refusal(name, "expected an .npy file")
    version = (data[6], data[7])
    if version not in _NPY_LENGTH_BYTES:
        raise _refusal(name, f"expected .npy version 1.0 or 2.0, got {version[0]}.{version[1]}")
    start = len(_NPY_MAGIC) + 2 + _NPY_LENGTH_BYTES[version]
    offset = start + int.from_bytes(data[8:start], "little")
    if offset > min(len(data), MAX_NPY_HEADER_BYTES):
        raise _refusal(name, f"expected an .npy file with a short header, got one that ends at byte {offset}")
    found = _NPY_HEADER.fullmatch(data, start, offset)
    if found is None or None in found.group("descr", "order", "shape"):
        raise _refusal(name, "expected an .npy file of one plain array")
    if found["descr"] not in _FLOAT_TYPES:
        got = found["descr"].decode("ascii", "replace")
        raise _refusal(name, f"expected elements of type float32 or float64, got {got!r}")
    shape = tuple(int(size) for size in found["shape"].split(b","))
    return shape, found["order"] == b"True", np.dtype(found["descr"].decode()), offset


def _check_rigid(poses_n44: Float64, name: str) -> None:
    rotations = poses_n44[:, :3, :3]
    error_n = np.abs(rotations @ rotations.swapaxes(1, 2) - np.eye(3)).max(axis=(1, 2))
    error_n = np.maximum(error_n, np.abs(poses_n44[:, 3] - np.array([0.0, 0.0, 0.0, 1.0])).max(axis=1))
    worst = int(error_n.argmax())
    if error_n[worst] > ROTATION_TOLERANCE:
        raise _refusal(
            name, f"pose {worst}: expected a rigid motion within {ROTATION_TOLERANCE:g}, got {error_n[worst]:.3g}"
        )
    mirrored = np.flatnonzero(np.linalg.det(rotations) < 0)
    if len(mirrored):
        raise _refusal(name, f"pose {mirrored[0]}: expected a rotation, got a mirrored one (determinant -1)")
