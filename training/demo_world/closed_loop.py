"""Closed loops of scripts, as a server would play them; the training takes histories of its own making from here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from training.demo_world.batches import RolledOut
from training.demo_world.dataset import CONDITION_FRAMES, FRAMES_PER_CHUNK, Walks
from training.demo_world.model import SIGMAS, PromptTable
from training.demo_world.network import TrainingNetwork
from training.demo_world.prompts import PROMPTS_PER_STYLE
from training.demo_world.rollouts import Rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What sessions are asked for: styles [E, N], motion of every latent frame [E, T, ...], opening condition."""

    styles_EN: Tensor
    rotations_ET33: Tensor
    translations_ET3: Tensor
    conditions_ECTYX: Tensor


@torch.no_grad()
def roll_out(network: TrainingNetwork, prompts: PromptTable, script: Script, fixed_condition: Tensor) -> Tensor:
    """Generate all chunks of the sessions from their own output, as a server would: latents [E, 16, T, Y, X]."""
    rollouts, latents = Rollouts(network), []
    num_sessions, num_chunks = script.styles_EN.shape
    device = script.styles_EN.device
    for chunk in range(num_chunks):
        frames = slice(chunk * FRAMES_PER_CHUNK, (chunk + 1) * FRAMES_PER_CHUNK)
        wording = torch.randint(0, PROMPTS_PER_STYLE, (num_sessions,), device=device)
        text, bias = network.text_rows(*prompts.encode(script.styles_EN[:, chunk] * PROMPTS_PER_STYLE + wording))
        moved = script.translations_ET3[:, frames]
        longest = moved.norm(dim=-1).amax(1)[:, None, None]
        condition = script.conditions_ECTYX[:, :, frames]
        if frames.stop > CONDITION_FRAMES:
            condition = fixed_condition.expand(num_sessions, -1, FRAMES_PER_CHUNK, -1, -1)
        inputs = rollouts.inputs(
            condition_BCFYX=condition,
            rotations_BF33=script.rotations_ET33[:, frames],
            translations_BF3=moved / torch.where(longest > 1e-6, longest, torch.ones_like(longest)),
            positions_BF=torch.arange(frames.start, frames.stop, device=device).expand(num_sessions, -1),
            text_BLD=text,
            text_bias_B11L=bias,
        )
        latents.append(rollouts.chunk(inputs, SIGMAS))
    return torch.cat(latents, dim=2)


def continuous_walks(walks: Walks, among: Tensor | None = None) -> Tensor:
    """Return the walks without a gap, of all or of some, by their index; waits for the device."""
    if among is None:
        among = torch.arange(len(walks), device=walks.gap_W.device)
    return among[walks.gap_W[among] == 0]


def roll_out_walks(
    network: TrainingNetwork,
    prompts: PromptTable,
    walks: Walks,
    fixed_condition: Tensor,
    *,
    chosen: Tensor,
    chunks: int,
) -> RolledOut:
    """Roll out the chosen walks, which must be continuous: what the model makes of them, and how far off it is."""
    frames = chunks * FRAMES_PER_CHUNK
    script = Script(
        styles_EN=walks.styles_WT[chosen, :frames:FRAMES_PER_CHUNK],
        rotations_ET33=walks.rotations_WT33[chosen, :frames],
        translations_ET3=walks.translations_WT3[chosen, :frames],
        conditions_ECTYX=walks.conditions_WTCYX[chosen].float().transpose(1, 2),
    )
    generated = roll_out(network, prompts, script, fixed_condition).transpose(1, 2)
    squared = (generated - walks.latents_WTCYX[chosen, :frames].float()).square().mean(dim=(2, 3, 4))
    all_frames = walks.latents_WTCYX.shape[1]
    errors = squared.unflatten(1, (chunks, FRAMES_PER_CHUNK)).mean(-1)
    # Chunks beyond the horizon count as lost.
    padding = all_frames // FRAMES_PER_CHUNK - chunks
    return RolledOut(
        walks_R=chosen,
        latents_RTCYX=torch.nn.functional.pad(generated, (0, 0, 0, 0, 0, 0, 0, all_frames - frames)).bfloat16(),
        errors_RN=torch.nn.functional.pad(errors, (0, padding), value=math.inf),
        num_chunks=chunks,
    )
