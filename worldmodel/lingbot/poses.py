"""Rigid motion in float64 numpy: inverses, quaternions, interpolation, one key step. Torch-free, no state.

Poses are camera-to-world matrices [..., 4, 4] with OpenCV axes (x right, y down, z forward). Quaternions are x, y, z,
w.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from worldmodel.lingbot.controls import Action

Float64 = npt.NDArray[np.float64]

# Constants of one latent frame of key control: vLLM-Omni 0.30.0, lingbot_world/actions.py.
STEP: Final = 0.05
YAW_STEP_RAD: Final = math.radians(6.0)
PITCH_STEP_RAD: Final = math.radians(4.0)
MAX_PITCH_RAD: Final = math.radians(85.0)
_DIRECTION_EPS: Final = 1e-6


def frozen(array: Float64) -> Float64:
    """Make an array read-only and return it."""
    array.setflags(write=False)
    return array


def rigid_inverse(poses: Float64) -> Float64:
    """Invert poses [..., 4, 4] as rigid motions: the transposed rotation, no general inverse."""
    inverse = np.zeros_like(poses)
    rotation = np.swapaxes(poses[..., :3, :3], -1, -2)
    inverse[..., :3, :3] = rotation
    inverse[..., :3, 3] = -np.einsum("...ij,...j->...i", rotation, poses[..., :3, 3])
    inverse[..., 3, 3] = 1.0
    return inverse


def relative(before: Float64, after: Float64) -> Float64:
    """Return inv(before) @ after for poses [..., 4, 4].

    Translations are subtracted before they are rotated, so that an unmoved camera gives exactly zero however far it
    is from the origin.
    """
    delta = np.zeros(np.broadcast_shapes(before.shape, after.shape), dtype=np.float64)
    rotation = np.swapaxes(before[..., :3, :3], -1, -2)
    delta[..., :3, :3] = rotation @ after[..., :3, :3]
    delta[..., :3, 3] = np.einsum("...ij,...j->...i", rotation, after[..., :3, 3] - before[..., :3, 3])
    delta[..., 3, 3] = 1.0
    return delta


def framewise(poses: Float64) -> Float64:
    """Return [n, 4, 4] where frame 0 is the identity and frame i is pose i seen from pose i - 1."""
    return np.concatenate([np.eye(4)[None], relative(poses[:-1], poses[1:])])


def largest_step(relative_poses: Float64) -> float:
    """Return the largest translation norm of relative poses [n, 4, 4], 0 for none."""
    return float(np.linalg.norm(relative_poses[:, :3, 3], axis=-1).max(initial=0.0))


def project_rotations(poses: Float64) -> Float64:
    """Replace the rotation part of poses [n, 4, 4] by the nearest exact rotation."""
    u, _, vt = np.linalg.svd(poses[:, :3, :3])
    sign = np.ones((len(poses), 3))
    sign[:, 2] = np.linalg.det(u @ vt)
    exact = poses.copy()
    exact[:, :3, :3] = (u * sign[:, None, :]) @ vt
    return exact


# ---------------------------------------------------------------- quaternions


def rotations_from_quaternions(quaternions: Float64) -> Float64:
    """Turn quaternions [n, 4] into rotations [n, 3, 3]; they are normalised first."""
    x, y, z, w = (quaternions / np.linalg.norm(quaternions, axis=-1, keepdims=True)).T
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def quaternions_from_rotations(rotations: Float64) -> Float64:
    """Turn rotations [n, 3, 3] into unit quaternions [n, 4], each with a sign close to the one before it.

    Of the four classic formulas the one with the largest divisor is taken, so that half turns lose no digits.
    """
    diagonal = np.diagonal(rotations, axis1=-2, axis2=-1)
    trace = diagonal.sum(axis=-1)
    # Row c of `outer` is 4 * q[c] * q: any row with a large q[c] gives q.
    outer = np.empty((len(rotations), 4, 4))
    for axis in range(3):
        i, j, k = axis, (axis + 1) % 3, (axis + 2) % 3
        outer[:, i, i] = 1 + 2 * diagonal[:, i] - trace
        outer[:, i, j] = outer[:, j, i] = rotations[:, i, j] + rotations[:, j, i]
        outer[:, i, 3] = outer[:, 3, i] = rotations[:, k, j] - rotations[:, j, k]
    outer[:, 3, 3] = 1 + trace
    best = np.argmax(np.diagonal(outer, axis1=-2, axis2=-1), axis=-1)
    rows = outer[np.arange(len(rotations)), best]
    return sign_continuous(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


def sign_continuous(quaternions: Float64) -> Float64:
    """Flip quaternions [n, 4] so that neighbours are on the same half of the sphere."""
    dots = np.einsum("ni,ni->n", quaternions[1:], quaternions[:-1])
    signs = np.cumprod(np.concatenate([[1.0], np.where(dots < 0, -1.0, 1.0)]))
    return quaternions * signs[:, None]


def slerp(start: Float64, end: Float64, fractions: Float64) -> Float64:
    """Interpolate on the sphere between rows of [n, 4], `fractions` [n] from 0 to 1, the short way round."""
    dots = np.einsum("ni,ni->n", start, end)
    end = np.where(dots[:, None] < 0, -end, end)
    # atan2 of the chord lengths keeps its digits for close rotations, where arccos of the dot product does not.
    angle = 2 * np.arctan2(np.linalg.norm(end - start, axis=-1), np.linalg.norm(end + start, axis=-1))
    sine = np.sin(angle)
    apart = sine > 1e-12
    divisor = np.where(apart, sine, 1.0)
    weight_start = np.where(apart, np.sin((1 - fractions) * angle) / divisor, 1 - fractions)
    weight_end = np.where(apart, np.sin(fractions * angle) / divisor, fractions)
    return weight_start[:, None] * start + weight_end[:, None] * end


def nlerp_poses(start: Float64, end: Float64, fractions: Float64) -> Float64:
    """Interpolate two poses [4, 4] at `fractions` [n]: linear translation, normalised linear quaternion."""
    ends = quaternions_from_rotations(np.stack([start[:3, :3], end[:3, :3]]))
    poses = np.tile(np.eye(4), (len(fractions), 1, 1))
    poses[:, :3, :3] = rotations_from_quaternions(ends[0] + (ends[1] - ends[0]) * fractions[:, None])
    poses[:, :3, 3] = start[:3, 3] + (end[:3, 3] - start[:3, 3]) * fractions[:, None]
    at_end = fractions >= 1.0
    poses[at_end] = end
    return poses


# ---------------------------------------------------------------- keys


def rotation_x(angle_rad: float) -> Float64:
    cos, sin = math.cos(angle_rad), math.sin(angle_rad)
    return np.array([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]])


def rotation_y(angle_rad: float) -> Float64:
    cos, sin = math.cos(angle_rad), math.sin(angle_rad)
    return np.array([[cos, 0.0, sin], [0.0, 1.0, 0.0], [-sin, 0.0, cos]])


def pitch_of(pose: Float64) -> float:
    """Return how far a camera looks above the horizon, in radians."""
    return math.asin(max(-1.0, min(1.0, -float(pose[1, 2]))))


def key_step(pose: Float64, pitch_rad: float, keys: Iterable[Action]) -> tuple[Float64, float]:
    """Apply the held keys of one latent frame to a pose [4, 4]; returns the new pose and pitch.

    Yaw turns about the world's vertical, pitch about the camera's own x axis; a pitch step that would pass 85 degrees
    is ignored. The keys move in the horizontal plane, along the camera's directions after the turn; a diagonal is not
    normalised (vLLM-Omni 0.30.0, lingbot_world/actions.py).
    """
    held = set(keys)

    def axis(positive: Action, negative: Action) -> int:
        return (positive in held) - (negative in held)

    pitch_step = PITCH_STEP_RAD * axis(Action.I, Action.K)
    # Targets and trajectories go beyond the limit; from there keys lead back.
    if abs(pitch_rad + pitch_step) > max(MAX_PITCH_RAD, abs(pitch_rad)):
        pitch_step = 0.0
    yaw_step = YAW_STEP_RAD * axis(Action.L, Action.J)
    moved = pose.copy()
    if yaw_step:
        moved[:3, :3] = rotation_y(yaw_step) @ moved[:3, :3]
    if pitch_step:
        moved[:3, :3] = moved[:3, :3] @ rotation_x(pitch_step)
    forward = _horizontal(moved[:3, 2]) * axis(Action.W, Action.S)
    right = _horizontal(moved[:3, 0]) * axis(Action.D, Action.A)
    moved[:3, 3] += STEP * (forward + right)
    return moved, pitch_rad + pitch_step


def _horizontal(direction: Float64) -> Float64:
    """Return the direction without its vertical part, of length 1 (or 0 if it was vertical)."""
    flat = np.array([direction[0], 0.0, direction[2]])
    norm = float(np.linalg.norm(flat))
    return flat / (norm + _DIRECTION_EPS) if norm > 0 else flat
