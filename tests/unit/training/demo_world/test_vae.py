"""The trainable forwards equal the stock layers."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan

from training.demo_world.vae import CONFIG, decode, encode, strip, trainable


def test_folded_layers_and_whole_clip_calls_equal_the_stock_model() -> None:
    torch.manual_seed(0)
    vae = trainable(AutoencoderKLWan(**CONFIG)).eval()
    stock = strip(vae).eval()
    clip = torch.rand(1, 3, 9, 16, 24) * 2 - 1
    with torch.no_grad():
        moments = encode(vae, clip)
        torch.testing.assert_close(moments, stock._encode(clip), atol=1e-5, rtol=1e-4)
        latents = moments[:, : vae.config.z_dim]
        torch.testing.assert_close(
            decode(vae, latents).clamp(-1, 1), stock._decode(latents).sample, atol=1e-5, rtol=1e-4
        )
