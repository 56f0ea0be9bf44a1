"""The encoder in one pass against the stock one."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan

from training.demo_world import encoder
from training.demo_world.encoder import ClipEncoder
from training.demo_world.vae_model import CONFIG


def _vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**CONFIG).eval().requires_grad_(False)
    for name, parameter in vae.named_parameters():
        if name.endswith(("gamma", "bias")):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return vae


@pytest.mark.parametrize("num_media_frames", [1, 5, 13])
def test_one_pass_equals_the_stock_encoder(num_media_frames: int) -> None:
    vae = _vae()
    frames = torch.randint(0, 256, (2, num_media_frames, 16, 24, 3), dtype=torch.uint8)
    stock = vae._encode(frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1)[:, :16]
    torch.testing.assert_close(ClipEncoder(vae, torch.float32)(frames), stock, atol=2e-5, rtol=1e-4)


def test_batches_of_some_sizes_are_compiled_and_large_ones_go_in_equal_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vae = _vae()
    frames = torch.randint(0, 256, (4, 5, 16, 24, 3), dtype=torch.uint8)
    whole = ClipEncoder(vae, torch.float32)(frames)
    shapes = []

    def compiled(function, *, dynamic: bool):
        def run(x: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(x.shape))
            return function(x)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(encoder, "MAX_ELEMENTS", 3 * 5 * 16 * 24 * 48)
    grouped = ClipEncoder(vae, torch.float32)
    grouped.compile({(4, 5)})
    torch.testing.assert_close(grouped(frames), whole, atol=1e-5, rtol=1e-4)
    grouped(frames[:, :1])
    grouped(frames[:2])
    assert shapes == [(2, 5, 16, 24, 3)] * 2


def test_an_encoder_with_other_layers_is_refused() -> None:
    vae = _vae()
    vae.encoder.down_blocks[0] = torch.nn.Identity()
    with pytest.raises(TypeError, match="residual and downsampling layers; got Identity"):
        ClipEncoder(vae, torch.float32)
