"""The encoder half of the Wan 2.1 VAE: what cameras saw to normalised latents. Keeps nothing between calls.

A call's clip is encoded from its first frame. Carrying the encoder's memory from call to call would not give the same:
each clip begins with a copy of its own first frame, as the network was trained to see it.

Shapes: C channels, T media frames, F latent frames, Y and X rows and columns, of pixels or latents.
Facts: DreamZero official code, its action head (`encode_video`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from worldmodel.wan.vae import WanVAE
from worldmodel.wan.vae_cache import VAECache
from worldmodel.wan.vae_config import VAEConfig

LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
"""Statistics of the published Wan 2.1 latents, by channel."""

PIECE_LATENT_FRAMES = 2
"""Latent frames encoded at once: bounds the activations of a clip of 33 frames."""

VAE_CLASS = "AutoencoderKLWan"


class ObservationVAE(WanVAE):
    """A `WanVAE` without its decoder. Call `fold_weights` after loading."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__(config)
        del self.decoder
        del self.post_quant_conv

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent along height and width."""
        return self.config.spatial_factor

    def encode_clip(self, frames_CTYX: Tensor) -> Tensor:
        """Encode 1 + 4n frames in [-1, 1] to 1 + n latent frames, float32 [C, F, Y, X], in bounded memory."""
        cache: VAECache | None = None
        latents = []
        step = self.config.temporal_factor * PIECE_LATENT_FRAMES
        start, end = 0, min(1 + step, frames_CTYX.shape[1])
        while start < frames_CTYX.shape[1]:
            latent_1CFYX, cache = self.encode(frames_CTYX[None, :, start:end], cache)
            latents.append(latent_1CFYX[0])
            start, end = end, min(end + step, frames_CTYX.shape[1])
        return torch.cat(latents, dim=1)


def condition_latents(vae: ObservationVAE, picture_CYX: Tensor, num_latent_frames: int) -> Tensor:
    """Return the latents of a clip that begins with a picture and is grey from then on, float32 [C, F, Y, X]."""
    num_frames = 1 + vae.config.temporal_factor * (num_latent_frames - 1)
    clip_CTYX = picture_CYX.new_zeros(picture_CYX.shape[0], num_frames, *picture_CYX.shape[1:])
    clip_CTYX[:, 0] = picture_CYX
    return vae.encode_clip(clip_CTYX)


def condition_channels(latents_CFYX: Tensor, num_mask_channels: int) -> Tensor:
    """Put mask channels before the condition latents: 1 on the first latent frame, 0 on the others."""
    mask_MFYX = latents_CFYX.new_zeros(num_mask_channels, *latents_CFYX.shape[1:])
    mask_MFYX[:, 0] = 1
    return torch.cat([mask_MFYX, latents_CFYX])
