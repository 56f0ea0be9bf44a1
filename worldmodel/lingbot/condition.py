"""The image condition of LingBot-World v2: 20 channels that tell the transformer which frame is given.

Shape suffixes: 3 colours, 20 condition channels, F latent frames, T media frames, H height, W width.

    channels 0..3    mask, 1 in the session's latent frame 0 and 0 elsewhere
    channels 4..19   normalised latents of the clip [image, grey, grey, ...], grey = 0.0

The streaming form gives the same numbers chunk by chunk from an immutable state. Once the image has left the temporal
reach of the encoder, grey frames leave its cache as it is; that is detected by comparing bits, and from then on the
last condition is reused without encoding. (LingBot-World v2 official code, wan/image2video.py.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worldmodel.wan.vae import VAECache, WanVAE

MASK_CHANNELS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConditionState:
    """Where the condition stream of a session stands. Never changed; exactly one of the three fields is set.

    `image_3HW`: before the first chunk. `cache`: while the image is in the encoder's reach. `fixed_condition_20FHW`:
    after that.
    """

    image_3HW: Tensor | None = None
    cache: VAECache | None = None
    fixed_condition_20FHW: Tensor | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether all further conditions are known without encoding."""
        return self.fixed_condition_20FHW is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors this state keeps alive."""
        kept = [tensor for tensor in (self.image_3HW, self.fixed_condition_20FHW) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept) + (
            0 if self.cache is None else self.cache.num_bytes
        )


def encode_clip_condition(vae: WanVAE, image_3HW: Tensor, num_latent_frames: int) -> Tensor:
    """Return the condition [20, num_latent_frames, H/8, W/8] of a clip that starts with an image in [-1, 1]."""
    condition_20FHW, _ = next_condition(vae, start_condition(image_3HW), num_latent_frames)
    return condition_20FHW


def start_condition(image_3HW: Tensor) -> ConditionState:
    """Return the state before a session's first chunk.

    `image_3HW` is in [-1, 1], at the session's size and on the model's device; it is kept, not copied.
    """
    if image_3HW.dim() != 3 or image_3HW.shape[0] != 3:
        raise ValueError(f"image: expected [3, height, width], got {list(image_3HW.shape)}")
    return ConditionState(image_3HW=image_3HW)


def next_condition(vae: WanVAE, state: ConditionState, num_latent_frames: int) -> tuple[Tensor, ConditionState]:
    """Return the condition [20, num_latent_frames, H/8, W/8] (float32) of the next chunk, and the state after it.

    `state` stays as it is. The returned tensor may be part of the next state: don't write to it.

    Raises:
        ValueError: for less than one latent frame, or, after the fixed point, another number than before.
    """
    if num_latent_frames < 1:
        raise ValueError(f"num_latent_frames: expected at least 1, got {num_latent_frames}")
    if state.fixed_condition_20FHW is not None:
        known = state.fixed_condition_20FHW.shape[1]
        if known != num_latent_frames:
            raise ValueError(f"num_latent_frames: expected {known} as in the chunks before, got {num_latent_frames}")
        return state.fixed_condition_20FHW, state
    if state.cache is None:
        return _opening_condition(vae, state, num_latent_frames)
    return _following_condition(vae, state.cache, num_latent_frames)


def _opening_condition(vae: WanVAE, state: ConditionState, num_latent_frames: int) -> tuple[Tensor, ConditionState]:
    if state.image_3HW is None:
        raise ValueError("condition state: expected an image before the first chunk, found none")
    image_3HW = state.image_3HW
    num_grey_frames = vae.config.temporal_factor * (num_latent_frames - 1)
    grey_3THW = image_3HW.new_zeros((3, num_grey_frames, *image_3HW.shape[1:]))
    latent_1CFHW, cache = vae.encode(torch.cat([image_3HW[:, None], grey_3THW], dim=1)[None])
    condition_20FHW = _with_mask(latent_1CFHW[0], is_opening=True)
    return condition_20FHW, ConditionState(cache=cache)


def _following_condition(vae: WanVAE, cache: VAECache, num_latent_frames: int) -> tuple[Tensor, ConditionState]:
    # The first history of the encoder is its last input frames, so it tells the picture size and device.
    newest = cache.tensors[0]
    num_grey_frames = vae.config.temporal_factor * num_latent_frames
    grey_13THW = newest.new_zeros((1, 3, num_grey_frames, *newest.shape[2:4]))
    latent_1CFHW, next_cache = vae.encode(grey_13THW, cache)
    condition_20FHW = _with_mask(latent_1CFHW[0], is_opening=False)
    if next_cache.equals(cache):
        return condition_20FHW, ConditionState(fixed_condition_20FHW=condition_20FHW)
    return condition_20FHW, ConditionState(cache=next_cache)


def _with_mask(latent_CFHW: Tensor, *, is_opening: bool) -> Tensor:
    mask_4FHW = latent_CFHW.new_zeros((MASK_CHANNELS, *latent_CFHW.shape[1:]))
    if is_opening:
        mask_4FHW[:, 0] = 1
    return torch.cat([mask_4FHW, latent_CFHW])
