"""Batches of clips for the transformer: which frames, at which noise, with which history.

A clip has eight chunks: the opening three of a walk and five in a row of its later part. Positions of clips that do
not join are either true or far away, so that absolute frames past a thousand are ordinary. The chunk right after a gap
has no loss: nothing in its history leads to it.

Shape suffixes: B clips, N chunks (8), T latent frames (24), C channels, Y X latent rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from training.demo_world.dataset import CONDITION_FRAMES, FRAMES_PER_CHUNK, LATER_FRAMES, OPENING_FRAMES, Walks
from training.demo_world.prompts import PROMPTS_PER_STYLE

CHUNKS = 8
OPENING_CHUNKS = OPENING_FRAMES // FRAMES_PER_CHUNK
MAX_HISTORY_NOISE = 0.35
MAX_POSITION_CHUNK = 400
FIXED_TRANSLATION = 0.05
WORDINGS_PER_STYLE = 8
"""Different prompts of a style in one batch."""
_MAX_OFFSET_CHUNKS = LATER_FRAMES // FRAMES_PER_CHUNK - (CHUNKS - OPENING_CHUNKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Clips to learn from.

    Noisy latents, targets and noise levels hold one copy of the clip after the other. `prompts_BN` index the rows of
    `wordings_Q`, which index the list of all prompts; `weights_BN` weigh the chunks' losses, `poses_BTE` say where the
    frames were seen from, `history_poses_BTE` where those of the history were, as far as `history_weights_BN` says that
    this is known.
    """

    clean_BCTYX: Tensor
    noisy_BCTYX: Tensor
    target_BCTYX: Tensor
    condition_BCTYX: Tensor
    rotations_BT33: Tensor
    translations_BT3: Tensor
    poses_BTE: Tensor
    history_poses_BTE: Tensor
    history_weights_BN: Tensor
    sigmas_BN: Tensor
    positions_BT: Tensor
    prompts_BN: Tensor
    wordings_Q: Tensor
    weights_BN: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clips:
    walks_B: Tensor
    frames_BT: Tensor
    positions_BT: Tensor
    is_joined_B: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    latents: Tensor
    poses_BTE: Tensor
    known_BN: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Closed loops of continuous walks: which walks, their generated latents, and the error of each chunk.

    Latents and errors have as many chunks as a walk; those from `num_chunks` on, at least `CHUNKS`, were not made.
    """

    walks_R: Tensor
    latents_RTCYX: Tensor
    errors_RN: Tensor
    num_chunks: int

    def __post_init__(self) -> None:
        if self.num_chunks < CHUNKS:
            raise ValueError(f"a rollout has at least {CHUNKS} chunks, those of a clip; got {self.num_chunks}")


class Batches:
    """Draws batches from encoded walks."""

    def __init__(
        self,
        walks: Walks,
        fixed_condition: Tensor,
        sampler_sigmas: tuple[float, ...],
        *,
        num_copies: int = 1,
        served_scale_share: float = 0.6,
    ) -> None:
        self._walks = walks
        self._fixed_condition = fixed_condition
        self._device = walks.gap_W.device
        self._sigmas = torch.tensor(sampler_sigmas, device=self._device)
        self._num_copies, self._served_scale_share = num_copies, served_scale_share
        self._after_gap_N = torch.ones(CHUNKS)
        self._after_gap_N[OPENING_CHUNKS], self._after_gap_N[OPENING_CHUNKS + 1] = 0.0, 0.5
        self._after_gap_N = self._after_gap_N.to(self._device)
        self._num_styles = int(walks.styles_WT.max()) + 1

    def draw(
        self,
        num_clips: int,
        rolled_out: RolledOut | None = None,
        *,
        num_own: int = 0,
        max_error: float = 0.0,
        astray_share: float = 0.0,
    ) -> Batch:
        """Draw clips, of which the last `num_own` continue histories that the model made itself.

        Of the others, `astray_share` have a history that is a little astray, and the rest a true one; both with a
        little noise on them. An own history counts where it is within `max_error` of the truth. What is learnt is the
        way back: the target stays the truth. Nothing here waits for the device.
        """
        walks_B = torch.randint(0, len(self._walks), (num_clips,), device=self._device)
        most_B = torch.full((num_clips,), _MAX_OFFSET_CHUNKS, device=self._device)
        if rolled_out is not None and num_own:
            chosen = torch.randint(0, len(rolled_out.walks_R), (num_own,), device=self._device)
            walks_B = torch.cat([walks_B[:-num_own], rolled_out.walks_R[chosen]])
            most_B[-num_own:].fill_(min(_MAX_OFFSET_CHUNKS, rolled_out.num_chunks - CHUNKS))
        clips = self._draw_clips(walks_B, most_B)
        truth = self._latents(clips)
        strength = torch.rand(num_clips, CHUNKS, device=self._device).square() * MAX_HISTORY_NOISE
        strength = strength * (torch.rand(num_clips, 1, device=self._device) < 0.8)
        is_astray_B = torch.rand(num_clips, device=self._device) < astray_share
        index = (clips.walks_B[:, None], clips.frames_BT)
        astray = self._walks.astray_WTCYX[index].float().transpose(1, 2)
        history = torch.where(is_astray_B.view(-1, 1, 1, 1, 1), astray, truth)
        history = history + _by_frame(strength) * torch.randn_like(truth)
        poses_BTE = torch.where(
            is_astray_B.view(-1, 1, 1), self._walks.astray_poses_WTE[index], self._walks.poses_WTE[index]
        )
        known_BN = torch.ones(num_clips, CHUNKS - 1, device=self._device)
        weights_BN = torch.ones(num_clips, CHUNKS, device=self._device)
        if rolled_out is not None and num_own:
            frames = clips.frames_BT[-num_own:]
            own = rolled_out.latents_RTCYX[chosen[:, None], frames].float().transpose(1, 2)
            errors = rolled_out.errors_RN[chosen[:, None], frames[:, ::FRAMES_PER_CHUNK] // FRAMES_PER_CHUNK]
            before = torch.cat([torch.zeros_like(errors[:, :1]), errors[:, :-1]], dim=1)
            history = torch.cat([history[:-num_own], own])
            weights_BN = torch.cat([weights_BN[:-num_own], (before < max_error).float()])
            known_BN[-num_own:] = 0.0
        return self._finish(clips, truth, _History(latents=history, poses_BTE=poses_BTE, known_BN=known_BN), weights_BN)

    def _draw_clips(self, walks_B: Tensor, most_B: Tensor) -> _Clips:
        """Draw where the later part of each clip begins: up to `most_B` chunks after the opening."""
        device, num_clips = self._device, len(walks_B)
        offset_B = (1 + (torch.rand(num_clips, device=device) * most_B).long()).clamp(max=most_B)
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

    def _finish(self, clips: _Clips, truth: Tensor, history: _History, weights_BN: Tensor) -> Batch:
        num_clips, device = len(truth), self._device
        walks, index = self._walks, (clips.walks_B[:, None], clips.frames_BT)
        sigmas_BN = self._draw_sigmas(num_clips)
        repeated = truth.repeat(1, 1, self._num_copies, 1, 1)
        noise = torch.randn_like(repeated)
        sigma = _by_frame(sigmas_BN)
        opening = walks.conditions_WTCYX[clips.walks_B].float().transpose(1, 2)
        constant = self._fixed_condition.expand(num_clips, -1, CHUNKS * FRAMES_PER_CHUNK - CONDITION_FRAMES, -1, -1)
        styles_BN = walks.styles_WT[index][:, ::FRAMES_PER_CHUNK]
        # One wording a style and clip, so that a prompt does not change where the style does not.
        wordings = torch.randint(0, PROMPTS_PER_STYLE, (self._num_styles, WORDINGS_PER_STYLE), device=device)
        wordings = wordings + PROMPTS_PER_STYLE * torch.arange(self._num_styles, device=device)[:, None]
        wording = torch.randint(0, WORDINGS_PER_STYLE, (num_clips, self._num_styles), device=device)
        return Batch(
            clean_BCTYX=history.latents[:, :, :-FRAMES_PER_CHUNK],
            noisy_BCTYX=(1 - sigma) * repeated + sigma * noise,
            target_BCTYX=noise - repeated,
            condition_BCTYX=torch.cat([opening, constant], dim=2),
            rotations_BT33=self._with_any_first(walks.rotations_WT33, index),
            translations_BT3=self._scale(self._with_any_first(walks.translations_WT3, index)),
            poses_BTE=walks.poses_WTE[index],
            history_poses_BTE=history.poses_BTE,
            history_weights_BN=history.known_BN,
            sigmas_BN=sigmas_BN,
            positions_BT=clips.positions_BT,
            prompts_BN=styles_BN * WORDINGS_PER_STYLE + wording.gather(1, styles_BN),
            wordings_Q=wordings.flatten(),
            weights_BN=torch.where(clips.is_joined_B[:, None], weights_BN, weights_BN * self._after_gap_N),
        )

    def _draw_sigmas(self, num_clips: int) -> Tensor:
        """Draw noise levels: mostly those of the sampler, else uniform under the shift of 5."""
        shape = (num_clips, CHUNKS * self._num_copies)
        sampler = self._sigmas[torch.randint(0, len(self._sigmas), shape, device=self._device)]
        uniform = torch.rand(shape, device=self._device)
        shifted = (5 * uniform / (1 + 4 * uniform)).clamp(0.02, 1.0)
        return torch.where(torch.rand(shape, device=self._device) < 0.8, sampler, shifted)

    def _with_any_first(self, motion_WT: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
        """Take the clips' motion, with that of the first frame of half of them random: the network must ignore it."""
        motion = motion_WT[index]
        num_clips = len(motion)
        other_walk = torch.randint(0, len(self._walks), (num_clips,), device=self._device)
        other_frame = torch.randint(1, motion_WT.shape[1], (num_clips,), device=self._device)
        is_random = torch.rand(num_clips, device=self._device) < 0.5
        other = motion_WT[other_walk, other_frame]
        first = torch.where(is_random.view(-1, *[1] * (other.dim() - 1)), other, motion[:, 0])
        return torch.cat([first[:, None], motion[:, 1:]], dim=1)

    def _scale(self, translations_BT3: Tensor) -> Tensor:
        """Divide by the largest step of the chunk, as a server does; else by the clip's or one step's length."""
        num_clips = len(translations_BT3)
        length = translations_BT3.norm(dim=-1)
        of_chunk = length.unflatten(1, (CHUNKS, -1)).amax(-1).repeat_interleave(FRAMES_PER_CHUNK, dim=1)
        of_clip = length.amax(1, keepdim=True).expand_as(length)
        choice = torch.rand(num_clips, 1, device=self._device)
        fixed = torch.full_like(length, FIXED_TRANSLATION)
        share = self._served_scale_share
        divisor = torch.where(choice < share, of_chunk, torch.where(choice < (1 + share) / 2, of_clip, fixed))
        return translations_BT3 / torch.where(divisor > 1e-6, divisor, torch.ones_like(divisor))[..., None]


def _by_frame(values_BN: Tensor) -> Tensor:
    """Spread one value a chunk over its latent frames: [B, 1, T, 1, 1]."""
    return values_BN.repeat_interleave(FRAMES_PER_CHUNK, dim=1)[:, None, :, None, None]
