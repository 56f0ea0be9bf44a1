"""Clips that the VAE learns from and is judged by: walks that are planned once and drawn when they are needed.

Shape suffixes: B clips, M media frames, H height, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.demo_world import scene, trajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPool:
    """Walks to draw clips of one length from: poses [N, M, 12], styles [N, M], on the training device."""

    poses: Tensor
    styles: Tensor
    clips_per_step: int

    def draw(self, num_clips: int) -> Tensor:
        """Render a random batch, float [B, 3, M, H, W] in [-1, 1]."""
        chosen = torch.randint(0, len(self.poses), (num_clips,), device=self.poses.device)
        frames = scene.render(self.poses[chosen].flatten(0, 1), self.styles[chosen].flatten())
        clips = frames.view(num_clips, -1, scene.HEIGHT, scene.WIDTH, 3).permute(0, 4, 1, 2, 3)
        return (clips.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last_3d)


def make_pool(
    rng: np.random.Generator, device: torch.device, *, walks: int, latent_frames: int, switch_chance: float, clips: int
) -> ClipPool:
    """Plan walks; `switch_chance` of them change style somewhere after the first media frame."""
    keys = trajectories.sample_keys(rng, walks, latent_frames)
    headings = rng.random(walks) * 2 * math.pi
    tilts = np.radians(rng.integers(-4, 5, walks) * 4.0) * (rng.random(walks) < 0.4)
    poses = trajectories.media_poses(trajectories.walk(keys, trajectories.sample_starts(rng, walks), headings, tilts))
    styles = np.repeat(rng.integers(0, len(scene.STYLES), walks)[:, None], poses.shape[1], axis=1)
    for index in np.nonzero(rng.random(walks) < switch_chance)[0]:
        styles[index, 1 + 4 * rng.integers(0, latent_frames - 1) :] = rng.integers(0, len(scene.STYLES))
    return ClipPool(
        poses=torch.from_numpy(poses).to(device),
        styles=torch.from_numpy(styles.astype(np.int32)).to(device),
        clips_per_step=clips,
    )
