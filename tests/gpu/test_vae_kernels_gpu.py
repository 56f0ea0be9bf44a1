"""The fused decoder against its plain form: single operations, and whole pictures in 16 bits against float32.

Run with `pytest -m gpu`; without a device these tests fail. With Triton's interpreter (TRITON_INTERPRET=1) the float32
operations run on a CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.vae_ops_cases import check_vae_ops
from worldmodel.checkpoint.random_weights import RandomWeights, fill_random
from worldmodel.kernels.choice import create_vae_ops
from worldmodel.kernels.vae_ops import VaeOps
from worldmodel.lingbot.published import vae_config
from worldmodel.wan.pixels import to_rgb24
from worldmodel.wan.vae import ConvPath, VAECache, WanVAE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
NUM_FULL_SIZE = 5


def triton_ops() -> VaeOps:
    if IS_INTERPRETED:
        from worldmodel.kernels.vae_ops_triton import TritonVaeOps

        return TritonVaeOps()
    return create_vae_ops(torch.device(DEVICE))


@pytest.mark.parametrize("channels", [5, 96, 384])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 4e-4), (torch.bfloat16, 3e-3)])
def test_fused_operations_equal_the_plain_ones(channels: int, dtype: torch.dtype, tolerance: float) -> None:
    check_vae_ops(triton_ops(), channels=channels, dtype=dtype, device=DEVICE, tolerance=tolerance)


def random_vae(dtype: torch.dtype, path: ConvPath, base_dim: int) -> WanVAE:
    vae = WanVAE.from_config(dict(vae_config(base_dim=base_dim)))
    fill_random(vae, RandomWeights(seed=5, device=DEVICE), dtype=torch.float32, device=DEVICE)
    vae = vae.to(dtype)
    vae.fold_weights(path)
    return vae


def decode(vae: WanVAE, num_chunks: int, height: int, width: int) -> list[torch.Tensor]:
    """Return frames [3, T, H, W] of each chunk of three latent frames."""
    generator = torch.Generator().manual_seed(1)
    cache: VAECache | None = None
    chunks = []
    for _ in range(num_chunks):
        latents = torch.randn(1, 16, 3, height // 8, width // 8, generator=generator).to(DEVICE)
        frames, cache = vae.decode(latents, cache)
        chunks.append(frames[0].float())
    return chunks


def test_a_fused_stream_in_float32_equals_the_plain_one() -> None:
    plain, fused = (
        decode(random_vae(torch.float32, path, 16), 3, 96, 160) for path in (ConvPath.PLAIN, ConvPath.FUSED)
    )
    for got, expected in zip(fused, plain, strict=True):
        assert (got - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("dtype", "least_psnr_db", "most_levels"), [(torch.float16, 59, 2), (torch.bfloat16, 50, 5)], ids=["f16", "bf16"]
)
def test_pictures_in_16_bits_at_full_size_stay_near_float32(
    dtype: torch.dtype, least_psnr_db: float, most_levels: int
) -> None:
    """Frames are scaled so that the plain picture fills the range of pixels, as a trained decoder's does."""
    plain = decode(random_vae(torch.float32, ConvPath.PLAIN, 96), NUM_FULL_SIZE, 480, 832)
    fused = decode(random_vae(dtype, ConvPath.FUSED, 96), NUM_FULL_SIZE, 480, 832)
    for index, (got, expected) in enumerate(zip(fused, plain, strict=True)):
        scale = 1.0 / (3.0 * expected.std())
        levels = [to_rgb24(frames * scale).int() for frames in (got, expected)]
        error = (levels[0] - levels[1]).abs()
        psnr_db = 10 * torch.log10(255.0**2 / error.float().square().mean())
        counts = [int((error == difference).sum()) for difference in range(1, 6)]
        print(
            f"chunk {index}: PSNR {psnr_db:.1f} dB, largest difference {int(error.max())}; pixels by 1 to 5: {counts}"
        )
        assert psnr_db > least_psnr_db
        assert error.max() <= most_levels
