"""How well a VAE of the demo world does on held-out clips: PSNR by frame, the latents' spread, a contact sheet."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from torch import Tensor

from training.demo_world.vae_clips import ClipPool
from training.demo_world.vae_model import decode, encode


@torch.no_grad()
def evaluate(vae: AutoencoderKLWan, pool: ClipPool, num_clips: int) -> tuple[dict[str, object], Image.Image]:
    """Encode and decode held-out long clips in float32; PSNR in dB over [-1, 1], overall and by media frame.

    The picture shows the first clip, truth above decoded.
    """
    sheets: list[Image.Image] = []
    errors, latents = [], []
    for _ in range(num_clips):
        clips = pool.draw(1)
        mean = encode(vae, clips)[:, : vae.config.z_dim]
        decoded = decode(vae, mean).clamp(-1, 1)
        errors.append((decoded - clips).square().mean(dim=(0, 1, 3, 4)))
        latents.append(mean.float())
        if not sheets:
            sheets.append(contact_sheet(clips, decoded))
    stacked, error = torch.cat(latents), torch.stack(errors)
    psnr = 10 * torch.log10(4 / error)
    report: dict[str, object] = {
        "psnr_db": psnr.mean().item(),
        "psnr_db_by_frame": [round(value, 2) for value in psnr.mean(dim=0)[::8].tolist()],
        "latents_mean": stacked.mean(dim=(0, 2, 3, 4)).tolist(),
        "latents_std": stacked.std(dim=(0, 2, 3, 4)).tolist(),
    }
    return report, sheets[0]


def contact_sheet(truth: Tensor, decoded: Tensor, columns: int = 10) -> Image.Image:
    """Put frames of the first clip above what became of them."""
    step = max(1, truth.shape[2] // columns)
    rows = []
    for clips in (truth, decoded):
        frames = ((clips[0, :, ::step][:, :columns] + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()
        rows.append(np.concatenate(list(frames), axis=1))
    return Image.fromarray(np.concatenate(rows, axis=0))
