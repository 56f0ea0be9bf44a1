"""Encoded walks to train the transformer on, kept on the training device.

A walk is the beginning of a session, `OPENING_FRAMES` latent frames, and `LATER_FRAMES` of the same session after a gap
of some chunks, so that clips show the sink and a window that may be far from it.

Shape suffixes: W walks, T latent frames of a walk (opening, then later), E pose features, C channels, Y X latent rows
and columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from training.demo_world import scene, trajectories
from training.demo_world.encoder import ClipEncoder
from training.demo_world.poses import pose_features
from training.demo_world.vae_model import decode

FRAMES_PER_CHUNK = 3
OPENING_FRAMES = 9
LATER_FRAMES = 45
MAX_GAP_CHUNKS = 40
CONDITION_FRAMES = 9
"""Latent frames whose condition differs from the constant of pure grey; from there on it is the fixed point."""

PORTION = 24
"""Walks that are rendered and encoded at once."""
TRAINING_RAYS = 2
"""Rays a pixel of a walk has across and down. Pictures are judged with 3; the latents of both differ by a mean squared
error of 6e-4, what a place less than a centimetre away makes (6 walks of 6 latent frames, 2026-11-30)."""
LEAD_FRAMES = 4
"""Latent frames in front of the later part whose latents are dropped: the causal encoder looks back."""

_CONTINUOUS_CHANCE = 0.6
_FIXED_POINT_FRAMES = 97


class LatentSpace:
    """The trained VAE, frozen, with normalised latents as the transformer sees them."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self.vae = vae.eval().requires_grad_(False)
        device = next(vae.parameters()).device
        self._mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self._encoder = ClipEncoder(vae, torch.bfloat16)

    def compile(self) -> None:
        """Compile the encoder for the clips that whole portions of walks consist of, on a GPU."""
        both = 2 * PORTION
        self._encoder.compile(
            {
                (both, 4 * OPENING_FRAMES - 3),
                (both, 4 * (LEAD_FRAMES + LATER_FRAMES) - 3),
                (PORTION, 4 * CONDITION_FRAMES - 3),
            }
        )

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """Encode frames [B, M, H, W, 3], uint8 or float on the scale of 0 to 255, to latents [B, 16, F, Y, X]."""
        return (self._encoder(frames) - self._mean) / self._std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, 16, F, Y, X] to frames uint8 [B, M, H, W, 3]."""
        with torch.autocast(latents.device.type, torch.bfloat16):
            clips = decode(self.vae, latents.float() * self._std + self._mean).float()
        return ((clips.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1)

    def opening_condition(self, first_frames: Tensor) -> Tensor:
        """Return the condition [B, 20, CONDITION_FRAMES, Y, X] of sessions that start with images [B, H, W, 3]."""
        shape = (len(first_frames), 4 * CONDITION_FRAMES - 3, *first_frames.shape[1:])
        clips = torch.full(shape, 127.5, device=first_frames.device)
        clips[:, 0] = first_frames.float()
        latents = self.encode(clips)
        mask = torch.zeros_like(latents[:, :4])
        mask[:, :, 0] = 1
        return torch.cat([mask, latents], dim=1)

    def fixed_condition(self, height: int, width: int, device: torch.device) -> Tensor:
        """Return the condition [1, 20, 1, Y, X] once the image is out of the encoder's reach."""
        latents = self.encode(torch.full((1, _FIXED_POINT_FRAMES, height, width, 3), 127.5, device=device))[:, :, -1:]
        return torch.cat([torch.zeros_like(latents[:, :4]), latents], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """Encoded walks.

    `gap_W` counts the chunks left out after the opening, `styles_WT` index `STYLES`, rotations and translations are
    relative to the latent frame before, translations in units and not yet scaled; `poses_WTE` say where the frame was
    seen from. `astray_WTCYX` are the latents of the same walks gone a little astray, `astray_poses_WTE` their poses.
    """

    latents_WTCYX: Tensor
    astray_WTCYX: Tensor
    conditions_WTCYX: Tensor
    rotations_WT33: Tensor
    translations_WT3: Tensor
    poses_WTE: Tensor
    astray_poses_WTE: Tensor
    styles_WT: Tensor
    gap_W: Tensor

    def __len__(self) -> int:
        return len(self.gap_W)

    def part(self, first: int, end: int) -> Walks:
        """Return the walks from `first` to before `end`, in the same memory."""
        return Walks(**{field.name: getattr(self, field.name)[first:end] for field in fields(self)})

    def replace(self, first: int, others: Walks) -> None:
        """Put other walks in the place of those from `first` on, in the same memory."""
        for field in fields(self):
            getattr(self, field.name)[first : first + len(others)].copy_(getattr(others, field.name))


def relative_motion(cameras: trajectories.Cameras) -> tuple[np.ndarray, np.ndarray]:
    """Return rotations [W, T, 3, 3] and translations [W, T, 3] of each latent frame seen from the one before.

    The first frame's is the identity.
    """
    rotation = trajectories.rotations(cameras.yaw, cameras.pitch)
    height = np.zeros(cameras.yaw.shape)
    position = np.stack([cameras.position[..., 0], height, cameras.position[..., 1]], axis=-1)
    relative, moved = np.zeros_like(rotation), np.zeros_like(position)
    relative[:, 0] = np.eye(3)
    relative[:, 1:] = np.einsum("btji,btjk->btik", rotation[:, :-1], rotation[:, 1:])
    moved[:, 1:] = np.einsum("btji,btj->bti", rotation[:, :-1], position[:, 1:] - position[:, :-1])
    return relative.astype(np.float32), moved.astype(np.float32)


def media_styles(styles_BT: np.ndarray) -> np.ndarray:
    """Return the style of each media frame: the first latent frame's once, every other one's four times."""
    return np.concatenate([styles_BT[:, :1], np.repeat(styles_BT[:, 1:], 4, axis=1)], axis=1)


def draw(cameras: trajectories.Cameras, styles_BT: np.ndarray, device: torch.device, rays: int = 3) -> Tensor:
    """Render walks to frames uint8 [B, M, H, W, 3], each pixel of `rays` x `rays` rays."""
    poses = _on(device, trajectories.media_poses(cameras))
    styles = _on(device, media_styles(styles_BT).astype(np.int32))
    frames = scene.render(poses.flatten(0, 1), styles.flatten(), rays)
    return frames.view(*poses.shape[:2], *frames.shape[1:])


def build_walks(
    space: LatentSpace,
    rng: np.random.Generator,
    num_walks: int,
    device: torch.device,
    *,
    portion: int = PORTION,
    rays: int = TRAINING_RAYS,
) -> Walks:
    """Plan, render and encode walks, each as it is and gone a little astray. Nothing here waits for the device."""
    portions = []
    for first in range(0, num_walks, portion):
        portions.append(_build_portion(space, rng, min(portion, num_walks - first), device, rays))
    parts = {field.name: [getattr(walks, field.name) for walks in portions] for field in fields(Walks)}
    return Walks(**{name: torch.cat(tensors) for name, tensors in parts.items()})


def _build_portion(
    space: LatentSpace, rng: np.random.Generator, num_walks: int, device: torch.device, rays: int
) -> Walks:
    gap = np.where(rng.random(num_walks) < _CONTINUOUS_CHANCE, 0, rng.integers(1, MAX_GAP_CHUNKS + 1, num_walks))
    keys = trajectories.sample_keys(rng, num_walks, OPENING_FRAMES + FRAMES_PER_CHUNK * int(gap.max()) + LATER_FRAMES)
    # The first latent frame is the start image, and does not move.
    keys[:, 0] = False
    headings = trajectories.sample_headings(rng, num_walks)
    cameras = trajectories.walk(keys, trajectories.sample_starts(rng, num_walks), headings)
    both = (cameras, trajectories.astray(rng, cameras, FRAMES_PER_CHUNK))
    rotations, translations = relative_motion(cameras)
    later = OPENING_FRAMES + FRAMES_PER_CHUNK * gap[:, None] + np.arange(LATER_FRAMES)
    kept = np.concatenate([np.tile(np.arange(OPENING_FRAMES), (num_walks, 1)), later], axis=1)
    row = np.arange(num_walks)[:, None]
    styles = _sample_styles(rng, gap)
    lead = np.concatenate([later[:, :1] - np.arange(LEAD_FRAMES, 0, -1), later], axis=1)
    before = np.where(
        gap[:, None] == 0,
        styles[:, OPENING_FRAMES - LEAD_FRAMES : OPENING_FRAMES],
        styles[:, OPENING_FRAMES : OPENING_FRAMES + 1],
    )
    lead_styles = np.concatenate([before, styles[:, OPENING_FRAMES:]], axis=1)
    opening = kept[:, :OPENING_FRAMES]
    openings = [draw(_pick(seen, row, opening), styles[:, :OPENING_FRAMES], device, rays) for seen in both]
    followings = [draw(_pick(seen, row, lead), lead_styles, device, rays) for seen in both]
    encoded = (space.encode(torch.cat(openings)), space.encode(torch.cat(followings))[:, :, LEAD_FRAMES:])
    latents = torch.cat(encoded, dim=2).transpose(1, 2).bfloat16()
    poses = [_on(device, pose_features(_pick(seen, row, kept))) for seen in both]
    return Walks(
        latents_WTCYX=latents[:num_walks],
        astray_WTCYX=latents[num_walks:],
        conditions_WTCYX=space.opening_condition(openings[0][:, 0]).transpose(1, 2).bfloat16(),
        rotations_WT33=_on(device, rotations[row, kept]),
        translations_WT3=_on(device, translations[row, kept]),
        poses_WTE=poses[0],
        astray_poses_WTE=poses[1],
        styles_WT=_on(device, styles),
        gap_W=_on(device, gap),
    )


def _on(device: torch.device, values: np.ndarray) -> Tensor:
    """Bring values to a device, without waiting for what it is doing."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _pick(cameras: trajectories.Cameras, row: np.ndarray, frames: np.ndarray) -> trajectories.Cameras:
    return trajectories.Cameras(
        position=cameras.position[row, frames], yaw=cameras.yaw[row, frames], pitch=cameras.pitch[row, frames]
    )


def _sample_styles(rng: np.random.Generator, gap_W: np.ndarray) -> np.ndarray:
    """Draw styles [W, T] that may change at a chunk's start, and in most walks survive the gap."""
    num_styles = len(scene.STYLES)
    chunks = (OPENING_FRAMES + LATER_FRAMES) // FRAMES_PER_CHUNK
    styles = np.empty((len(gap_W), chunks), dtype=np.int64)
    styles[:, 0] = rng.integers(0, num_styles, len(gap_W))
    for chunk in range(1, chunks):
        chance = np.full(len(gap_W), 0.07)
        if chunk == OPENING_FRAMES // FRAMES_PER_CHUNK:
            chance = np.where(gap_W > 0, 0.3, 0.07)
        changes = rng.random(len(gap_W)) < chance
        styles[:, chunk] = np.where(changes, rng.integers(0, num_styles, len(gap_W)), styles[:, chunk - 1])
    return np.repeat(styles, FRAMES_PER_CHUNK, axis=1)
