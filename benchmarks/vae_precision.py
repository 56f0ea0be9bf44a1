"""Compare the VAE in float16 and bfloat16 with float32: pictures, latents, and the largest numbers on the way.

    python benchmarks/vae_precision.py
    python benchmarks/vae_precision.py --checkpoint DEMO --pictures DEMO/examples    (DEMO: worldmodel/data/demo_world)
    python benchmarks/vae_precision.py --device cuda --width 832 --height 480 --json vae_precision.json

Without a checkpoint the weights are random, of the published size, and pictures are scaled to fill the range of pixels
as those of a trained decoder do. On CUDA the reduced networks are those that serve, timed as well. On a CPU they are
float32 ones whose weights and results are rounded after every operation. Differences of pictures are in levels of 255;
`largest` is the largest number that any operation of the float32 network gave, to be compared with 65504.

Shapes: B batch, C channels, F latent frames, T media frames, H height, W width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.arguments import device_name, new_file
from benchmarks.provenance import provenance
from training.demo_world.options import count
from worldmodel.checkpoint.diffusers import open_checkpoint
from worldmodel.checkpoint.random_weights import RandomWeights, fill_random
from worldmodel.lingbot.published import vae_config
from worldmodel.wan.image import prepare_image
from worldmodel.wan.pixels import to_rgb24
from worldmodel.wan.vae import ConvPath, VAECache, WanVAE
from worldmodel.wan.vae_layers import DoublingConv

FORMATS = (torch.float16, torch.bfloat16)
CHUNK_LATENT_FRAMES = 3
STORED = ("convolution", "mm", "add", "mul", "silu", "attention")
"""Words of the operations whose results a reduced network stores; statistics of norms stay float32."""


class Watch(TorchDispatchMode):
    """Note the largest result that is stored, by operation, and round each to `dtype` if one is given."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype
        self.largest: dict[str, float] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        stored = out[0] if isinstance(out, tuple) else out
        if any(word in name for word in STORED) and isinstance(stored, Tensor) and stored.numel() > 1:
            self.largest[name] = max(self.largest.get(name, 0.0), float(stored.abs().max()))
            if self._dtype is not None:
                stored.copy_(stored.to(self._dtype))
        return out


def build(arguments: argparse.Namespace, dtype: torch.dtype, path: ConvPath | None) -> WanVAE:
    """Load or make the network; what is reduced on a CPU stays float32 and gets rounded weights."""
    is_emulated = arguments.device == "cpu"
    if arguments.checkpoint is None:
        vae = WanVAE.from_config(dict(vae_config(base_dim=arguments.base_dim)))
        fill_random(vae, RandomWeights(seed=5, device=arguments.device), dtype=torch.float32, device=arguments.device)
    else:
        component = open_checkpoint(arguments.checkpoint).component("vae")
        vae = WanVAE.from_config(component.config)
        component.load_into(vae, dtype=torch.float32, device=torch.device(arguments.device))
    vae = vae.to(arguments.device)
    if is_emulated:
        _round(list(vae.parameters()), dtype)
        vae.fold_weights(path)
        _round(
            [m.folded_weight for m in vae.modules() if isinstance(m, DoublingConv) and m.folded_weight is not None],
            dtype,
        )
        return vae
    vae = vae.to(dtype)
    vae.fold_weights(path)
    return vae


def _round(tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.to(dtype))


def read_pictures(folder: Path | None, height: int, width: int) -> list[Tensor]:
    """Return pictures [3, H, W] in [-1, 1]: those of a folder, or one of noise."""
    if folder is None:
        return [torch.rand(3, height, width, generator=torch.Generator().manual_seed(2)) * 2 - 1]
    files = sorted(folder.glob("*.png"))
    return [prepare_image(np.asarray(PIL.Image.open(file).convert("RGB")), height, width) for file in files]


def stream(
    call: Callable[[Tensor, VAECache | None], tuple[Tensor, VAECache]], inputs: Sequence[Tensor], device: torch.device
) -> tuple[list[Tensor], list[float]]:
    """Run a stream chunk by chunk; return float32 results and the milliseconds of each."""
    cache: VAECache | None = None
    results, times_ms = [], []
    for chunk in inputs:
        chunk = chunk.to(device)
        started_s = _now_s(device)
        result, cache = call(chunk, cache)
        times_ms.append(1000 * (_now_s(device) - started_s))
        results.append(result.float())
    return results, times_ms


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Comparison:
    """The float32 network, its inputs and results, and how far others are from it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._device = torch.device(arguments.device)
        pictures = read_pictures(arguments.pictures, arguments.height, arguments.width)
        # The first picture, then grey, as a condition is encoded; then every other picture for the largest numbers.
        grey = torch.zeros(1, 3, 12, arguments.height, arguments.width)
        self._clip = [torch.cat([pictures[0][None, :, None], grey[:, :, :8]], dim=2), grey]
        plain = build(arguments, torch.float32, ConvPath.PLAIN if self._device.type == "cuda" else None)
        with Watch() as encoding:
            self.encoded, _ = stream(plain.encode, self._clip, self._device)
            stills = [plain.encode(picture[None, :, None].to(self._device))[0] for picture in pictures]
        self._latents = self._decoder_inputs(stills)
        with Watch() as decoding:
            self.decoded, self.plain_ms = stream(plain.decode, self._latents, self._device)
        self.largest = {"encode": encoding.largest, "decode": decoding.largest}
        self._scale = 1.0 if arguments.checkpoint else 1.0 / (3.0 * float(torch.cat(self.decoded, dim=2).std()))

    def _decoder_inputs(self, stills: list[Tensor]) -> list[Tensor]:
        arguments, generator = self._arguments, torch.Generator().manual_seed(1)
        shape = (1, 16, CHUNK_LATENT_FRAMES, arguments.height // 8, arguments.width // 8)
        noise = [torch.randn(shape, generator=generator) for _ in range(arguments.chunks)]
        if arguments.pictures is None:
            return noise
        frames = torch.cat(stills, dim=2).cpu()
        repeats = -(-CHUNK_LATENT_FRAMES * arguments.chunks // frames.shape[2])
        return list(frames.repeat(1, 1, repeats, 1, 1).split(CHUNK_LATENT_FRAMES, dim=2)[: arguments.chunks])

    def compare(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the distances of a reduced network, by chunk."""
        is_emulated = self._device.type == "cpu"
        vae = build(self._arguments, dtype, None)
        mode: AbstractContextManager[object] = Watch(dtype) if is_emulated else nullcontext()
        with mode:
            encoded, _ = stream(vae.encode, self._clip, self._device)
            decoded, times_ms = stream(vae.decode, self._latents, self._device)
        return {
            "format": str(dtype).removeprefix("torch."),
            "pictures": [self._levels(got, want) for got, want in zip(decoded, self.decoded, strict=True)],
            "latents": [_relative(got, want) for got, want in zip(encoded, self.encoded, strict=True)],
            "decode_ms": None if is_emulated else statistics.median(times_ms[1:]),
        }

    def _levels(self, got: Tensor, expected: Tensor) -> dict[str, float]:
        exact = [(frames[0] * self._scale).clamp(-1, 1) * 127.5 for frames in (got, expected)]
        whole = [to_rgb24(frames[0] * self._scale).int() for frames in (got, expected)]
        error = (exact[0] - exact[1]).double()
        steps = (whole[0] - whole[1]).abs()
        mean_square = steps.double().square().mean().clamp_min(1e-12)
        return {
            "psnr_db": float(10 * torch.log10(255.0**2 / mean_square)),
            "rms_levels": float(error.square().mean().sqrt()),
            "largest_levels": float(error.abs().max()),
            "largest_whole_levels": int(steps.max()),
            "finite": bool(torch.isfinite(got).all()),
        }


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def show(report: dict[str, Any]) -> None:
    """Print everything as lines."""
    for network, largest in report["largest"].items():
        print(
            f"{network}: largest {max(largest.values()):.1f}",
            {name: round(value, 1) for name, value in largest.items()},
        )
    for row in report["formats"]:
        took = "" if row["decode_ms"] is None else f", decode {row['decode_ms']:.1f} ms"
        print(f"{row['format']}: latents {', '.join(f'{value:.1e}' for value in row['latents'])}{took}")
        for index, chunk in enumerate(row["pictures"]):
            print(f"  chunk {index}: " + "  ".join(f"{name} {value:.3g}" for name, value in chunk.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="folder with a VAE in the diffusers layout (default random weights)")
    parser.add_argument("--pictures", type=Path, help="folder of pictures to encode and decode (default noise)")
    parser.add_argument("--base-dim", type=int, default=96, help="width of random weights (default 96, as published)")
    parser.add_argument("--width", type=int, default=96, help="default 96")
    parser.add_argument("--height", type=int, default=64, help="default 64")
    parser.add_argument("--chunks", type=count(least=1), default=2, help="chunks of three latent frames (default 2)")
    parser.add_argument("--device", type=device_name, default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        comparison = Comparison(arguments)
        formats = [comparison.compare(dtype) for dtype in FORMATS]
    report = {
        **provenance(torch.device(arguments.device)),
        "size": [arguments.width, arguments.height],
        "checkpoint": arguments.checkpoint,
        "largest": comparison.largest,
        "formats": formats,
    }
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
