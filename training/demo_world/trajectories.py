"""Walks through the demo world: random key scripts, the cameras they lead to, and one pose for every media frame.

Cameras move exactly as keyboard sessions do (`worldmodel.lingbot.poses`), for many walks at once.

Shape suffixes: B walks, T latent frames, M media frames (1 + 4 * (T - 1)), K the eight keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.demo_world.scene import OBJECTS, PERIOD_M
from worldmodel.lingbot.poses import MAX_PITCH_RAD, PITCH_STEP_RAD, STEP, YAW_STEP_RAD

KEYS = "wasdijkl"
METRES_PER_UNIT = 5.0
"""One step of 0.05 units is a quarter of a metre a latent frame."""

Bools = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]

_W, _A, _S, _D, _I, _J, _K, _L = range(8)
_MOVES: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.42, (_W,)),
    (0.08, (_S,)),
    (0.07, (_A,)),
    (0.07, (_D,)),
    (0.04, (_W, _A)),
    (0.04, (_W, _D)),
    (0.28, ()),
)
_LONG_TURN_CHANCE = 0.12
_LOOK_CHANCE = 0.12
_MAX_LOOK_STEPS = 6

MAX_ASTRAY_YAW_RAD, MAX_ASTRAY_PITCH_RAD = np.radians(2.0), np.radians(1.0)
"""How far `astray` turns cameras: well below half a step of a key, so that the true direction is the nearest one."""
_ASTRAY_M = 0.02
_WANDER = 0.3
"""Standard deviation of a wandering camera's turn from one chunk to the next, over the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cameras:
    """Where each camera is after each latent frame: units [B, T, 2] (x, z), radians [B, T]."""

    position: Float64
    yaw: Float64
    pitch: Float64


def sample_keys(rng: np.random.Generator, num_walks: int, num_latent_frames: int) -> Bools:
    """Draw key scripts [B, T, K] of held segments, as people play: forward, turns up to a full circle, looks."""
    keys_BTK = np.zeros((num_walks, num_latent_frames, len(KEYS)), dtype=bool)
    for walk_TK in keys_BTK:
        frame = steps_up = 0
        while frame < num_latent_frames:
            held, length = _sample_segment(rng)
            if rng.random() < _LOOK_CHANCE:
                up = steps_up <= 0 if rng.random() < 0.8 else rng.random() < 0.5
                direction = 1 if up else -1
                length = int(rng.integers(1, 5))
                room = _MAX_LOOK_STEPS - direction * steps_up
                if room > 0:
                    length = min(length, room, num_latent_frames - frame)
                    held[_I if up else _K] = True
                    steps_up += direction * length
            walk_TK[frame : frame + length] = held
            frame += length
    return keys_BTK


def _sample_segment(rng: np.random.Generator) -> tuple[Bools, int]:
    held = np.zeros(len(KEYS), dtype=bool)
    if rng.random() < _LONG_TURN_CHANCE:
        held[_J if rng.random() < 0.5 else _L] = True
        return held, int(rng.integers(15, 61))
    choice = rng.choice(len(_MOVES), p=[chance for chance, _ in _MOVES])
    held[list(_MOVES[choice][1])] = True
    turn = rng.random()
    if turn < 0.2:
        held[_J] = True
    elif turn < 0.4:
        held[_L] = True
    return held, int(rng.integers(1, 9))


def walk(keys_BTK: Bools, start_B2: Float64, yaw_B: Float64, pitch_B: Float64 | None = None) -> Cameras:
    """Integrate key scripts. The pose of a latent frame is the one after its own keys."""
    num_walks, num_frames, _ = keys_BTK.shape
    keys = keys_BTK.astype(np.float64)
    position, yaw = start_B2.astype(np.float64), yaw_B.astype(np.float64)
    pitch = np.zeros(num_walks) if pitch_B is None else pitch_B.astype(np.float64)
    cameras = Cameras(
        position=np.empty((num_walks, num_frames, 2)),
        yaw=np.empty((num_walks, num_frames)),
        pitch=np.empty((num_walks, num_frames)),
    )
    for frame in range(num_frames):
        held = keys[:, frame]
        turned = pitch + PITCH_STEP_RAD * (held[:, _I] - held[:, _K])
        pitch = np.where(np.abs(turned) <= MAX_PITCH_RAD + 1e-9, turned, pitch)
        yaw = yaw + YAW_STEP_RAD * (held[:, _L] - held[:, _J])
        forward = np.stack([np.sin(yaw), np.cos(yaw)], axis=1)
        right = np.stack([np.cos(yaw), -np.sin(yaw)], axis=1)
        step = forward * (held[:, _W] - held[:, _S])[:, None] + right * (held[:, _D] - held[:, _A])[:, None]
        position = position + STEP * step
        cameras.position[:, frame], cameras.yaw[:, frame], cameras.pitch[:, frame] = position, yaw, pitch
    return cameras


def astray(rng: np.random.Generator, cameras: Cameras, frames_per_chunk: int) -> Cameras:
    """Return the walks as a model shows them that is a little off, by other amounts in each chunk.

    In one half of the walks headings and pitches of a chunk are off by draws of their own, in the other they wander
    from chunk to chunk. Places are off by draws of their own, a few centimetres. The first latent frame is the start
    image, and as it was.
    """
    num_walks, num_frames = cameras.yaw.shape
    shape = (num_walks, -(-num_frames // frames_per_chunk))
    wanders = rng.random((num_walks, 1)) < 0.5

    def off(values_BN: Float64) -> Float64:
        by_frame = np.repeat(values_BN, frames_per_chunk, axis=1)[:, :num_frames]
        by_frame[:, 0] = 0.0
        return by_frame

    def turns() -> Float64:
        wandering = rng.uniform(-1, 1, (num_walks, 1)) + np.cumsum(rng.normal(0, _WANDER, shape), axis=1)
        # A walk between two walls, at -1 and 1.
        folded = np.abs(np.mod(wandering + 1, 4) - 2) - 1
        return off(np.where(wanders, folded, rng.uniform(-1, 1, shape)))

    moved = np.stack([off(rng.normal(0, _ASTRAY_M / METRES_PER_UNIT, shape)) for _ in range(2)], axis=-1)
    return Cameras(
        position=cameras.position + moved,
        yaw=cameras.yaw + MAX_ASTRAY_YAW_RAD * turns(),
        pitch=cameras.pitch + MAX_ASTRAY_PITCH_RAD * turns(),
    )


def rotations(yaw: Float64, pitch: Float64) -> Float64:
    """Return camera-to-world rotations [..., 3, 3]: the heading about y after the pitch about x."""
    c, s, cp, sp = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch)
    zero = np.zeros_like(c)
    rows = (
        np.stack([c, s * sp, s * cp], axis=-1),
        np.stack([zero, cp, -sp], axis=-1),
        np.stack([-s, c * sp, c * cp], axis=-1),
    )
    return np.stack(rows, axis=-2)


def media_poses(cameras: Cameras) -> npt.NDArray[np.float32]:
    """Return render poses float32 [B, M, 12]: the first latent frame's, then four between each two, linearly."""
    num_walks, num_latent_frames = cameras.yaw.shape
    if num_latent_frames == 1:
        first, fraction = np.zeros(1, int), np.zeros(1)
    else:
        times = np.arange(1 + 4 * (num_latent_frames - 1)) / 4.0
        first = np.minimum(times.astype(int), num_latent_frames - 2)
        fraction = times - first
    second = np.minimum(first + 1, num_latent_frames - 1)

    def between(values: Float64) -> Float64:
        weight = fraction.reshape(1, -1, *[1] * (values.ndim - 2))
        return values[:, first] * (1 - weight) + values[:, second] * weight

    position = between(cameras.position) * METRES_PER_UNIT
    rotation = rotations(between(cameras.yaw), between(cameras.pitch))
    eye = np.stack([position[..., 0], np.zeros(position.shape[:2]), position[..., 1]], axis=-1)
    return np.concatenate([eye, rotation.reshape(num_walks, -1, 9)], axis=-1).astype(np.float32)


def sample_starts(rng: np.random.Generator, num_walks: int) -> Float64:
    """Draw starting points [B, 2] in units, none of them inside or right at an object."""
    starts = rng.random((num_walks, 2)) * PERIOD_M
    radius = np.maximum(OBJECTS[:, 5], OBJECTS[:, 6]) + 0.5
    while True:
        offset = starts[:, None] - OBJECTS[None, :, 1:3]
        offset -= PERIOD_M * np.round(offset / PERIOD_M)
        blocked = (np.linalg.norm(offset, axis=-1) < radius).any(axis=1)
        if not blocked.any():
            return starts / METRES_PER_UNIT
        starts[blocked] = rng.random((int(blocked.sum()), 2)) * PERIOD_M


def sample_headings(rng: np.random.Generator, num_walks: int) -> Float64:
    """Draw headings [B] in radians to start with, whole steps of a turning key from north.

    As keys turn by whole steps, all headings of such a walk are whole steps, and one that is a little off is known to
    be wrong.
    """
    return rng.integers(0, round(2 * np.pi / YAW_STEP_RAD), num_walks).astype(np.float64) * YAW_STEP_RAD
