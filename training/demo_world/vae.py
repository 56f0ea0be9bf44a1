"""Train the demo world's video VAE: rendered walks in, `AutoencoderKLWan` weights in the diffusers layout out.

    python -m training.demo_world.vae --out RUN --seconds 400 [--start VAE_FOLDER | --resume RUN] [--decoder-only]

A run is bounded by time and leaves everything a later one needs to go on. Two clip lengths alternate: short ones for
variety, long ones because the causal decoder looks back about 18 latent frames and drifts in colour if it never saw
them.

Shape suffixes: B clips, C channels, M media frames, F latent frames, H height, W width.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file
from torch import Tensor

from training.demo_world import scene
from training.demo_world.files import located, replacing, write_tensors
from training.demo_world.options import count, make_out, number, trained_part
from training.demo_world.vae_clips import ClipPool, make_pool
from training.demo_world.vae_model import CONFIG, decode, encode, read_vae, strip, trainable
from training.demo_world.vae_report import evaluate

WARM_UP_STEPS = 300
EMA_DECAY = 0.999
SQUARED_WEIGHT = 4.0
KL_WEIGHT = 1e-4
MAX_LATENT_NOISE, MAX_DECODER_NOISE = 0.08, 0.04


# ---------------------------------------------------------------- one step


def _edges_l1(difference: Tensor) -> Tensor:
    across = difference[..., 1:] - difference[..., :-1]
    down = difference[..., 1:, :] - difference[..., :-1, :]
    return across.abs().mean() + down.abs().mean()


def loss_of(vae: AutoencoderKLWan, clips: Tensor, *, decoder_only: bool = False) -> tuple[Tensor, Tensor]:
    """Return the loss and the mean squared error of a batch in [-1, 1].

    The decoder sees posterior samples, or means if it learns alone, with up to `MAX_LATENT_NOISE` or
    `MAX_DECODER_NOISE` of the latents' spread added, so that it forgives what a generator gets slightly wrong.
    """
    with torch.autocast(clips.device.type, torch.bfloat16, cache_enabled=False):
        with torch.set_grad_enabled(not decoder_only):
            mean, log_variance = encode(vae, clips).float().chunk(2, dim=1)
        log_variance = log_variance.clamp(-20, 4)
        latents = mean if decoder_only else mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        amount = torch.rand(len(clips), 1, 1, 1, 1, device=clips.device) * mean.detach().std()
        amount = amount * (MAX_DECODER_NOISE if decoder_only else MAX_LATENT_NOISE)
        latents = latents + torch.randn_like(latents) * amount
        difference = decode(vae, latents).float() - clips
    squared = difference.square().mean()
    blurred = F.avg_pool3d(difference, (1, 4, 4)).abs().mean()
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    loss = difference.abs().mean() + SQUARED_WEIGHT * squared + 0.5 * _edges_l1(difference) + 0.5 * blurred
    return loss + KL_WEIGHT * divergence, squared.detach()


class Trainer:
    """Weights, optimiser and moving average; on CUDA each clip length is one captured graph.

    The decoder alone learns if `decoder_only`: latents stay what they are to whoever has learnt them.
    """

    def __init__(self, vae: AutoencoderKLWan, pools: list[ClipPool], *, decoder_only: bool = False) -> None:
        self.vae, self.pools, self._decoder_only = vae, pools, decoder_only
        if decoder_only:
            vae.encoder.requires_grad_(False)
            vae.quant_conv.requires_grad_(False)
        self.names = [name for name, parameter in vae.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for parameter in vae.parameters() if parameter.requires_grad]
        device = self.parameters[0].device
        self.learning_rate = torch.tensor(1e-5, device=device)
        on_cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.learning_rate, betas=(0.9, 0.98), weight_decay=1e-4, capturable=on_cuda
        )
        # As AdamW makes it at its first step, so that it can be saved and restored before.
        for parameter in self.parameters:
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.num_steps = 0
        self._graphs = [self._capture(pool) for pool in pools] if on_cuda else None

    def _compute(self, clips: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss, squared = loss_of(self.vae, clips, decoder_only=self._decoder_only)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1 - EMA_DECAY)
        return squared

    def _capture(self, pool: ClipPool) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        clips = pool.draw(pool.clips_per_step)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                self._compute(clips)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            squared = self._compute(clips)
        return graph, clips, squared

    def step(self, learning_rate: float) -> Tensor:
        """Train on one batch; clip lengths take turns. Returns the squared error, still on the device."""
        self.learning_rate.fill_(learning_rate)
        turn = self.num_steps % len(self.pools)
        pool = self.pools[turn]
        clips = pool.draw(pool.clips_per_step)
        self.num_steps += 1
        if self._graphs is None:
            return self._compute(clips)
        graph, static_clips, squared = self._graphs[turn]
        static_clips.copy_(clips)
        graph.replay()
        return squared

    def save(self, folder: Path) -> None:
        """Write weights and the optimiser's state as one, in files small enough for a repository or a slow link.

        Raises FloatingPointError if one of them is not finite; what was there stays.
        """
        with replacing(folder) as unfinished:
            for part, tensors in self._state().items():
                content = {n: t.detach().float().cpu().contiguous() for n, t in zip(self.names, tensors, strict=True)}
                lost = [name for name, tensor in content.items() if not tensor.isfinite().all()]
                if lost:
                    raise FloatingPointError(f"{part} of {len(lost)} tensors not finite, first {lost[0]}")
                write_tensors(content, unfinished / f"{part}.safetensors")

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote, in place, so that captured graphs stay valid; of a whole run the decoder may do.

        Raises FileNotFoundError naming a file that is missing, and ValueError naming a file that lacks tensors or has
        others; nothing is changed then.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for part, tensors in self._state().items():
            path = located(folder, f"{part}.safetensors")
            content, wanted = load_file(path), dict(zip(self.names, tensors, strict=True))
            wrong = [n for n, tensor in wanted.items() if n not in content or content[n].shape != tensor.shape]
            if wrong:
                raise ValueError(f"{path}: {len(wrong)} tensors missing or of other shapes, first {wrong[0]}")
            pairs += [(tensor, content[name]) for name, tensor in wanted.items()]
        with torch.no_grad():
            for tensor, saved in pairs:
                tensor.copy_(saved)

    def _state(self) -> dict[str, list[Tensor]]:
        state = self.optimizer.state
        return {
            "weights": self.parameters,
            "first_moment": [state[parameter]["exp_avg"] for parameter in self.parameters],
            "second_moment": [state[parameter]["exp_avg_sq"] for parameter in self.parameters],
            "step": [state[parameter]["step"] for parameter in self.parameters],
            "average": self.average,
        }


# ---------------------------------------------------------------- export


def export(
    trainer: Trainer, folder: Path, held_out: ClipPool, num_clips: int, latents: dict[str, list[float]] | None = None
) -> dict[str, object]:
    """Write the averaged weights as a diffusers VAE folder (bfloat16) and return their evaluation.

    `latents` are mean and standard deviation to keep; without, those that were found are written.
    """
    vae = trainable(copy.deepcopy(strip(trainer.vae)))
    parameters = dict(vae.named_parameters())
    with torch.no_grad():
        for name, average in zip(trainer.names, trainer.average, strict=True):
            parameters[name].copy_(average.bfloat16())
    report, sheet = evaluate(vae, held_out, num_clips)
    report |= latents or {}
    final = AutoencoderKLWan(**CONFIG, latents_mean=report["latents_mean"], latents_std=report["latents_std"])
    weights = {name: tensor.bfloat16().cpu().contiguous() for name, tensor in vae.state_dict().items()}
    with replacing(folder) as unfinished:
        sheet.save(unfinished / "vae.png")
        final.save_config(unfinished / "vae")
        write_tensors(weights, unfinished / "vae" / "diffusion_pytorch_model.safetensors")
    return report


# ---------------------------------------------------------------- the run


def learning_rate_at(peak: float, step: int, progress: float) -> float:
    """Warm up over steps, then a cosine over the run's time, 0 to 1."""
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * (0.5 + 0.5 * math.cos(math.pi * progress)) + 5e-6


def _run_folder(text: str) -> Path:
    """An option's type: the folder of a run that has saved its state."""
    if not located(Path(text), "weights.safetensors").is_file():
        raise argparse.ArgumentTypeError(f"expected the --out of an earlier run; {text} has no weights.safetensors")
    return Path(text)


def _expect_finite(squared: Tensor, num_steps: int) -> None:
    """Raise FloatingPointError if the squared error is none any more; waits for the device."""
    if not math.isfinite(squared.item()):
        raise FloatingPointError(f"squared error {squared.item()} after {num_steps} steps")


def _train(trainer: Trainer, arguments: argparse.Namespace) -> None:
    """Take steps until the time is over, saving meanwhile and at the end."""
    started = saved = time.monotonic()
    while (progress := (time.monotonic() - started) / arguments.seconds) < 1:
        squared = trainer.step(learning_rate_at(arguments.peak, trainer.num_steps, progress))
        if trainer.num_steps % 8 == 0:
            # Also the bound on what waits for the device.
            _expect_finite(squared, trainer.num_steps)
        if trainer.num_steps % 1000 == 1:
            rate = trainer.num_steps / (time.monotonic() - started)
            psnr = 10 * math.log10(4 / squared.item())
            print(f"step {trainer.num_steps}  psnr {psnr:.2f} dB  {rate:.1f} steps/s", flush=True)
        if arguments.smoke and trainer.num_steps == 2:
            break
        if time.monotonic() - saved >= arguments.save_s:
            trainer.save(arguments.out)
            saved = time.monotonic()
    trainer.save(arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo world's VAE for a bounded time.")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, report and contact sheet")
    parser.add_argument("--seconds", type=number(above=0), required=True, help="training time, set-up not counted")
    parser.add_argument("--start", type=trained_part, help="diffusers VAE folder to start from")
    parser.add_argument("--resume", type=_run_folder, help="--out of an earlier run to go on from")
    parser.add_argument("--decoder-only", action="store_true", help="leave encoder and latents as --start has them")
    parser.add_argument("--peak", type=number(above=0), default=1.2e-3, help="learning rate")
    parser.add_argument("--save-s", type=number(least=0), default=60.0, help="seconds between two saves to resume from")
    parser.add_argument("--seed", type=count(least=0), default=1)
    scene.add_changes(parser)
    parser.add_argument("--smoke", action="store_true", help="tiny clips and two steps, to try the program on a CPU")
    arguments = parser.parse_args()
    if arguments.decoder_only and arguments.start is None:
        parser.error("--decoder-only needs --start, the VAE whose encoder and latents stay")
    make_out(parser, arguments.out)
    scene.change(poplars=arguments.poplars, cutaway_m=arguments.cutaway)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rng = np.random.default_rng(arguments.seed)

    vae, latents = AutoencoderKLWan(**CONFIG), None
    if arguments.start is not None:
        first = read_vae(arguments.start)
        vae.load_state_dict(first.state_dict())
        if arguments.decoder_only:
            latents = {name: list(first.config[name]) for name in ("latents_mean", "latents_std")}
    trainable(vae.to(device))
    if arguments.smoke:
        pools = [make_pool(rng, device, walks=4, latent_frames=2, switch_chance=0.5, clips=1)]
        held_out = make_pool(rng, device, walks=2, latent_frames=3, switch_chance=0.0, clips=1)
    else:
        pools = [
            make_pool(rng, device, walks=20000, latent_frames=3, switch_chance=0.15, clips=8),
            make_pool(rng, device, walks=4000, latent_frames=13, switch_chance=0.5, clips=2),
        ]
        held_out = make_pool(rng, device, walks=96, latent_frames=21, switch_chance=0.0, clips=1)
    trainer = Trainer(vae, pools, decoder_only=arguments.decoder_only)
    if arguments.resume is not None:
        trainer.restore(arguments.resume)
    print(f"{sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters on {device}", flush=True)

    try:
        _train(trainer, arguments)
    except FloatingPointError as error:
        raise SystemExit(f"expected finite numbers: {error}; {arguments.out} keeps what was saved before") from error
    report = export(trainer, arguments.out, held_out, 2 if arguments.smoke else 64, latents)
    report |= {"steps": trainer.num_steps, "seconds": arguments.seconds, "seed": arguments.seed}
    (arguments.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
