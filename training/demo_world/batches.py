"""Batches of clips for the transformer: which frames, at which noise, with which history.

A clip has eight chunks: the opening three of a walk and five in a row of its later part. Positions of clips that do
not join are either true or far away, so that absolute frames past a thousand are ordinary. The chunk right after a gap
has no loss: nothing in its history leads to it.

Shape suffixes: B clips, N chunks (8), T latent frames (24), C channels, Y X latent rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.demo_world.dataset import CONDITION_FRAMES, FRAMES_PER_CHUNK, LATER_FRAMES, OPENING_FRAMES, Walks
from training.demo_world.prompts import PROMPTS_PER_STYLE

CHUNKS = 8
OPENING_CHUNKS = OPENING_FRAMES // FRAMES_PER_CHUNK
MAX_HISTORY_NOISE = 0.35
MAX_POSITION_CHUNK = 400
FIXED_TRANSLATION = 0.05
_MAX_OFFSET_CHUNKS = LATER_FRAMES // FRAMES_PER_CHUNK - (CHUNKS - OPENING_CHUNKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Clips to learn from. `prompts_BN` index the list of all prompts, `weights_BN` weigh the chunks' losses."""

    clean_BCTYX: Tensor
    noisy_BCTYX: Tensor
    target_BCTYX: Tensor
    condition_BCTYX: Tensor
    rotations_BT33: Tensor
    translations_BT3: Tensor
    sigmas_BN: Tensor
    positions_BT: Tensor
    prompts_BN: Tensor
    weights_BN: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clips:
    walks_B: Tensor
    frames_BT: Tensor
    positions_BT: Tensor
    is_joined_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Closed loops of continuous walks: which walks, their generated latents, and the error of each chunk."""

    walks_R: Tensor
    latents_RTCYX: Tensor
    errors_RN: Tensor


class Batches:
    """Draws batches from encoded walks."""

    def __init__(self, walks: Walks, fixed_condition: Tensor, sampler_sigmas: tuple[float, ...]) -> None:
        self._walks = walks
        self._fixed_condition = fixed_condition
        self._device = walks.gap_W.device
        self._sigmas = torch.tensor(sampler_sigmas, device=self._device)

    def teacher_forced(self, num_clips: int) -> Batch:
        """Draw clips whose history is true, with a little noise on it."""
        clips = self._draw_clips(num_clips, None)
        truth = self._latents(clips)
        strength = torch.rand(num_clips, CHUNKS, device=self._device).square() * MAX_HISTORY_NOISE
        strength = strength * (torch.rand(num_clips, 1, device=self._device) < 0.8)
        history = truth + _by_frame(strength) * torch.randn_like(truth)
        return self._finish(clips, truth, history, torch.ones(num_clips, CHUNKS, device=self._device))

    def self_forced(self, num_clips: int, rolled_out: RolledOut, max_error: float) -> Batch:
        """Draw clips whose history the model made itself, where it is within `max_error` of the truth.

        What is learnt is the way back: the target stays the truth.
        """
        chosen = torch.randint(0, len(rolled_out.walks_R), (num_clips,), device=self._device)
        clips = self._draw_clips(num_clips, rolled_out.walks_R[chosen])
        truth = self._latents(clips)
        history = rolled_out.latents_RTCYX[chosen[:, None], clips.frames_BT].float().transpose(1, 2)
        chunks_BN = clips.frames_BT[:, ::FRAMES_PER_CHUNK] // FRAMES_PER_CHUNK
        errors_BN = rolled_out.errors_RN[chosen[:, None], chunks_BN]
        before = torch.cat([torch.zeros_like(errors_BN[:, :1]), errors_BN[:, :-1]], dim=1)
        return self._finish(clips, truth, history, (before < max_error).float())

    def _draw_clips(self, num_clips: int, walks_B: Tensor | None) -> _Clips:
        device = self._device
        if walks_B is None:
            walks_B = torch.randint(0, len(self._walks), (num_clips,), device=device)
        offset_B = torch.randint(1, _MAX_OFFSET_CHUNKS + 1, (num_clips,), device=device)
        offset_B = torch.where(torch.rand(num_clips, device=device) < 0.4, torch.zeros_like(offset_B), offset_B)
        opening = torch.arange(OPENING_FRAMES, device=device).expand(num_clips, -1)
        later = torch.arange((CHUNKS - OPENING_CHUNKS) * FRAMES_PER_CHUNK, device=device)
        frames_BT = torch.cat([opening, OPENING_FRAMES + FRAMES_PER_CHUNK * offset_B[:, None] + later], dim=1)
        skipped_B = self._walks.gap_W[walks_B] + offset_B
        true_chunk = OPENING_CHUNKS + skipped_B
        far_chunk = torch.randint(OPENING_CHUNKS, MAX_POSITION_CHUNK, (num_clips,), device=device)
        keeps_true = (torch.rand(num_clips, device=device) < 0.5) | (skipped_B == 0)
        chunk_B = torch.where(keeps_true, true_chunk, far_chunk)
        positions_BT = torch.cat([opening, FRAMES_PER_CHUNK * chunk_B[:, None] + later], dim=1)
        return _Clips(walks_B=walks_B, frames_BT=frames_BT, positions_BT=positions_BT, is_joined_B=skipped_B == 0)

    def _latents(self, clips: _Clips) -> Tensor:
        return self._walks.latents_WTCYX[clips.walks_B[:, None], clips.frames_BT].float().transpose(1, 2)

    def _finish(self, clips: _Clips, truth: Tensor, history: Tensor, weights_BN: Tensor) -> Batch:
        num_clips, device = len(truth), self._device
        walks, index = self._walks, (clips.walks_B[:, None], clips.frames_BT)
        sigmas_BN = self._draw_sigmas(num_clips)
        noise = torch.randn_like(truth)
        sigma = _by_frame(sigmas_BN)
        opening = walks.conditions_WTCYX[clips.walks_B].float().transpose(1, 2)
        constant = self._fixed_condition.expand(num_clips, -1, CHUNKS * FRAMES_PER_CHUNK - CONDITION_FRAMES, -1, -1)
        styles_BN = walks.styles_WT[index][:, ::FRAMES_PER_CHUNK]
        # One wording a style and clip, so that a prompt does not change where the style does not.
        wording = torch.randint(0, PROMPTS_PER_STYLE, (num_clips, int(walks.styles_WT.max()) + 1), device=device)
        after_gap = ~clips.is_joined_B
        weights_BN = weights_BN.clone()
        weights_BN[after_gap, OPENING_CHUNKS] = 0
        weights_BN[after_gap, OPENING_CHUNKS + 1] *= 0.5
        return Batch(
            clean_BCTYX=history[:, :, :-FRAMES_PER_CHUNK],
            noisy_BCTYX=(1 - sigma) * truth + sigma * noise,
            target_BCTYX=noise - truth,
            condition_BCTYX=torch.cat([opening, constant], dim=2),
            rotations_BT33=self._with_any_first(walks.rotations_WT33, index),
            translations_BT3=self._scale(self._with_any_first(walks.translations_WT3, index)),
            sigmas_BN=sigmas_BN,
            positions_BT=clips.positions_BT,
            prompts_BN=styles_BN * PROMPTS_PER_STYLE + wording.gather(1, styles_BN),
            weights_BN=weights_BN,
        )

    def _draw_sigmas(self, num_clips: int) -> Tensor:
        """Draw noise levels: mostly those of the sampler, else uniform under the shift of 5."""
        shape = (num_clips, CHUNKS)
        sampler = self._sigmas[torch.randint(0, len(self._sigmas), shape, device=self._device)]
        uniform = torch.rand(shape, device=self._device)
        shifted = (5 * uniform / (1 + 4 * uniform)).clamp(0.02, 1.0)
        return torch.where(torch.rand(shape, device=self._device) < 0.8, sampler, shifted)

    def _with_any_first(self, motion_WT: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
        """Take the clips' motion, with that of the first frame of half of them random: the network must ignore it."""
        motion = motion_WT[index].clone()
        num_clips = len(motion)
        other_walk = torch.randint(0, len(self._walks), (num_clips,), device=self._device)
        other_frame = torch.randint(1, motion_WT.shape[1], (num_clips,), device=self._device)
        is_random = torch.rand(num_clips, device=self._device) < 0.5
        motion[is_random, 0] = motion_WT[other_walk, other_frame][is_random]
        return motion

    def _scale(self, translations_BT3: Tensor) -> Tensor:
        """Divide by the largest step of the chunk, of the clip, or by the length of one step, at random."""
        num_clips = len(translations_BT3)
        length = translations_BT3.norm(dim=-1)
        of_chunk = length.unflatten(1, (CHUNKS, -1)).amax(-1).repeat_interleave(FRAMES_PER_CHUNK, dim=1)
        of_clip = length.amax(1, keepdim=True).expand_as(length)
        choice = torch.rand(num_clips, 1, device=self._device)
        fixed = torch.full_like(length, FIXED_TRANSLATION)
        divisor = torch.where(choice < 0.6, of_chunk, torch.where(choice < 0.8, of_clip, fixed))
        return translations_BT3 / torch.where(divisor > 1e-6, divisor, torch.ones_like(divisor))[..., None]


def _by_frame(values_BN: Tensor) -> Tensor:
    """Spread one value a chunk over its latent frames: [B, 1, T, 1, 1]."""
    return values_BN.repeat_interleave(FRAMES_PER_CHUNK, dim=1)[:, None, :, None, None]
