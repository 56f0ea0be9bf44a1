"""Rollouts against the renderer: PSNR by chunk, sharpness, and contact sheets.

This is the quick measure between training runs; what ships is measured through the server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from training.demo_world import scene, trajectories
from training.demo_world.batches import RolledOut
from training.demo_world.dataset import (
    CONDITION_FRAMES,
    FRAMES_PER_CHUNK,
    LatentSpace,
    Walks,
    draw,
    relative_motion,
)
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


def roll_out_walks(
    network: TrainingNetwork, prompts: PromptTable, walks: Walks, fixed_condition: Tensor, *, sessions: int, chunks: int
) -> RolledOut:
    """Roll out random continuous walks of the training set, for histories of the model's own making."""
    continuous = torch.nonzero(walks.gap_W == 0)[:, 0]
    chosen = continuous[torch.randint(0, len(continuous), (sessions,), device=continuous.device)]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """PSNR in dB by chunk: the loop, the VAE alone, a frozen first frame; and the latents' spread over the truth's."""

    psnr_db: list[float]
    ceiling_db: list[float]
    frozen_db: list[float]
    sharpness: list[float]
    sheet: Image.Image

    def at(self, chunks: tuple[int, ...]) -> dict[str, list[float]]:
        """Return the numbers at chunks counted from 1."""
        series = {"psnr_db": self.psnr_db, "ceiling_db": self.ceiling_db, "frozen_db": self.frozen_db}
        series["sharpness"] = self.sharpness
        return {
            name: [round(values[chunk - 1], 2) for chunk in chunks if chunk <= len(values)]
            for name, values in series.items()
        }


@torch.no_grad()
def evaluate(
    network: TrainingNetwork,
    prompts: PromptTable,
    space: LatentSpace,
    fixed_condition: Tensor,
    *,
    sessions: int = 24,
    chunks: int = 26,
    seed: int = 999,
) -> Evaluation:
    """Roll out held-out random key scripts, half of them with style changes, and compare with the renderer."""
    rng = np.random.default_rng(seed)
    device = fixed_condition.device
    frames = chunks * FRAMES_PER_CHUNK
    keys = trajectories.sample_keys(rng, sessions, frames)
    cameras = trajectories.walk(keys, trajectories.sample_starts(rng, sessions), rng.random(sessions) * 2 * math.pi)
    styles = np.repeat(rng.integers(0, len(scene.STYLES), sessions)[:, None], chunks, axis=1)
    for session in range(sessions // 2, sessions):
        for chunk in range(1, chunks):
            changes = rng.random() < 0.08
            styles[session, chunk] = rng.integers(0, len(scene.STYLES)) if changes else styles[session, chunk - 1]
    truth = draw(cameras, np.repeat(styles, FRAMES_PER_CHUNK, axis=1), device)
    rotations, translations = relative_motion(cameras)
    script = Script(
        styles_EN=torch.from_numpy(styles).to(device),
        rotations_ET33=torch.from_numpy(rotations).to(device),
        translations_ET3=torch.from_numpy(translations).to(device),
        conditions_ECTYX=space.opening_condition(truth[:, 0]),
    )
    latents = roll_out(network, prompts, script, fixed_condition)
    true_latents = torch.cat([space.encode(part) for part in truth.split(8)])
    generated = torch.cat([space.decode(part) for part in latents.split(8)])
    rebuilt = torch.cat([space.decode(part) for part in true_latents.split(8)])
    spread = [x.unflatten(2, (chunks, -1)).std(dim=(3, 4, 5)).mean(dim=(0, 1)) for x in (latents, true_latents)]
    return Evaluation(
        psnr_db=_psnr_by_chunk(generated, truth, chunks),
        ceiling_db=_psnr_by_chunk(rebuilt, truth, chunks),
        frozen_db=_psnr_by_chunk(truth[:, :1].expand_as(truth), truth, chunks),
        sharpness=(spread[0] / spread[1]).tolist(),
        sheet=sheet([(truth[index], generated[index]) for index in (0, 1, sessions // 2, sessions - 1)]),
    )


def _psnr_by_chunk(frames: Tensor, truth: Tensor, chunks: int) -> list[float]:
    """Return the mean PSNR of each chunk's media frames; the first chunk has 9, every other one 12."""
    squared = (frames.float() - truth.float()).square().mean(dim=(2, 3, 4))
    ends = [9 + 12 * chunk for chunk in range(chunks)]
    starts = [0, *ends[:-1]]
    means = [squared[:, start:end].mean(1).clamp(min=1e-3) for start, end in zip(starts, ends, strict=True)]
    return [(10 * torch.log10(255**2 / mean)).mean().item() for mean in means]


def sheet(pairs: list[tuple[Tensor, Tensor]], columns: int = 12) -> Image.Image:
    """Put the truth above what was generated, evenly spaced frames of [M, H, W, 3]."""
    rows = []
    for pair in pairs:
        for frames in pair:
            index = np.linspace(0, len(frames) - 1, columns).astype(int)
            rows.append(np.concatenate(list(frames[index].cpu().numpy()), axis=1))
    return Image.fromarray(np.concatenate(rows, axis=0))
