"""The trainable forwards equal the stock layers, and what a step changes."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from training.demo_world.scene import HEIGHT, WIDTH
from training.demo_world.vae import CONFIG, ClipPool, Trainer, decode, encode, strip, trainable


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


class _Noise(ClipPool):
    def draw(self, num_clips: int) -> torch.Tensor:
        return torch.rand(num_clips, 3, 5, HEIGHT // 4, WIDTH // 4) * 2 - 1


def test_a_decoder_that_learns_alone_leaves_the_latents_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(1)
    vae = trainable(AutoencoderKLWan(**CONFIG))
    before = {name: parameter.detach().clone() for name, parameter in vae.named_parameters()}
    pool = _Noise(poses=torch.zeros(0), styles=torch.zeros(0), clips_per_step=1)
    trainer = Trainer(vae, [pool], decoder_only=True)
    trainer.step(1e-3)
    changed = {name for name, parameter in vae.named_parameters() if not torch.equal(parameter, before[name])}
    assert {name.split(".")[0] for name in changed} == {"decoder", "post_quant_conv"}
    assert set(trainer.names) >= changed
    trainer.save(tmp_path)
    learnt = [parameter.detach().clone() for parameter in trainer.parameters]
    trainer.step(1e-3)
    assert not torch.equal(learnt[0], trainer.parameters[0])
    trainer.restore(tmp_path)
    assert all(map(torch.equal, learnt, trainer.parameters))
