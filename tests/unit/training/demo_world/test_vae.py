"""The trainable forwards equal the stock layers, and what a step changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

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
        return torch.rand(num_clips, 3, 5, 16, 16) * 2 - 1


def _noise_trainer(*, decoder_only: bool = False) -> Trainer:
    pool = _Noise(poses=torch.zeros(0), styles=torch.zeros(0), clips_per_step=1)
    return Trainer(trainable(AutoencoderKLWan(**CONFIG)), [pool], decoder_only=decoder_only)


def _step(trainer: Trainer) -> None:
    torch.manual_seed(5)
    trainer.step(1e-3)


def test_a_decoder_that_learns_alone_leaves_the_latents_as_they_are() -> None:
    torch.manual_seed(1)
    trainer = _noise_trainer(decoder_only=True)
    vae = trainer.vae
    before = {name: parameter.detach().clone() for name, parameter in vae.named_parameters()}
    trainer.step(1e-3)
    changed = {name for name, parameter in vae.named_parameters() if not torch.equal(parameter, before[name])}
    assert {name.split(".")[0] for name in changed} == {"decoder", "post_quant_conv"}
    assert set(trainer.names) >= changed


def test_a_new_trainer_goes_on_exactly_where_another_was_saved(tmp_path: Path) -> None:
    first, second = _noise_trainer(), _noise_trainer()
    _step(first)
    first.save(tmp_path)
    second.restore(tmp_path)
    _step(first)
    _step(second)
    assert all(map(torch.equal, first.parameters, second.parameters))
    assert all(map(torch.equal, first.average, second.average))


def test_a_trainer_is_refused_what_is_not_its_own_and_stays_as_it_was(tmp_path: Path) -> None:
    decoder, whole = _noise_trainer(decoder_only=True), _noise_trainer()
    decoder.save(tmp_path)
    before = [parameter.detach().clone() for parameter in whole.parameters]
    with pytest.raises(ValueError, match=r"weights\.safetensors: .* tensors missing .* first encoder\.conv_in\.weight"):
        whole.restore(tmp_path)
    whole.save(tmp_path)
    (tmp_path / "step.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"step\.safetensors"):
        decoder.restore(tmp_path)
    assert all(map(torch.equal, before, whole.parameters))
