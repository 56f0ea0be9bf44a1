"""Train the demo world's transformer and text encoder.

    python -m training.demo_world.transformer --out RUN --vae VAE_FOLDER --seconds 500 [--resume RUN] [--phase self]

Two phases. `teacher`: every chunk is predicted after its true history. `self`: three quarters of the clips continue
histories that the model made itself, as long as they are close to the truth, and learn the way back to it. A run starts
from the averaged weights of the one before; the optimiser warms up again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from training.demo_world import scene
from training.demo_world.batches import CHUNKS, Batch, Batches, RolledOut
from training.demo_world.closed_loop import evaluate, roll_out_walks
from training.demo_world.dataset import FRAMES_PER_CHUNK, LatentSpace, Walks, build_walks
from training.demo_world.model import SIGMAS, DemoModel, PromptTable, export, save_parts
from training.demo_world.network import TrainingNetwork
from training.demo_world.optimizer import Optimizer
from training.demo_world.vae import trainable

WARM_UP_STEPS = 200
ROLL_OUT_EVERY = 40


class Phase(StrEnum):
    TEACHER = "teacher"
    SELF = "self"


def loss_of(network: TrainingNetwork, prompts: PromptTable, batch: Batch) -> Tensor:
    """Return the weighted mean squared error of the predicted flow."""
    num_clips = len(batch.noisy_BCTYX)

    def segments(values_BT: Tensor) -> Tensor:
        """Cut values of latent frames into chunks: those of the history, then all, clip by clip."""
        values_BN = values_BT.unflatten(1, (CHUNKS, FRAMES_PER_CHUNK))
        return torch.cat([values_BN[:, :-1], values_BN], dim=1).flatten(0, 1)

    timesteps = torch.cat([torch.zeros_like(batch.sigmas_BN[:, :-1]), 1000.0 * batch.sigmas_BN], dim=1).flatten()
    prompts_G = torch.cat([batch.prompts_BN[:, :-1], batch.prompts_BN], dim=1).flatten()
    text, bias = prompts.rows(network, prompts_G)
    inputs = network.segment_inputs(
        timesteps_G=timesteps,
        rotations_G=segments(batch.rotations_BT33),
        translations_G=segments(batch.translations_BT3),
        positions_G=segments(batch.positions_BT),
        text_GLD=text,
        text_bias_G11L=bias,
    )
    clean = torch.cat([batch.clean_BCTYX, batch.condition_BCTYX[:, :, :-FRAMES_PER_CHUNK]], dim=1)
    flow = network.clip_flow(clean, torch.cat([batch.noisy_BCTYX, batch.condition_BCTYX], dim=1), inputs)
    squared = (flow.float() - batch.target_BCTYX).square().mean(dim=(1, 3, 4))
    by_chunk = squared.view(num_clips, CHUNKS, FRAMES_PER_CHUNK).mean(-1)
    return (by_chunk * batch.weights_BN).sum() / batch.weights_BN.sum().clamp(min=1)


def learning_rate_at(peak: float, step: int, progress: float, floor: float) -> float:
    """Warm up over steps, then a cosine over the run's time down to `floor` times the peak."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, progress))
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * (floor + (1 - floor) * cosine)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo world's transformer for a bounded time.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vae", type=Path, required=True, help="diffusers folder of the trained VAE")
    parser.add_argument("--seconds", type=float, required=True, help="training time; data and evaluation not counted")
    parser.add_argument("--resume", type=Path, help="--out of an earlier run to go on from")
    parser.add_argument("--phase", type=Phase, default=Phase.TEACHER, choices=list(Phase))
    parser.add_argument("--peak", type=float, help="learning rate; default 2e-3 for teacher, 6e-4 for self")
    parser.add_argument("--floor", type=float, default=0.2, help="last learning rate over the peak")
    parser.add_argument("--walks", type=int, default=4096)
    parser.add_argument("--clips", type=int, default=64, help="clips a step")
    parser.add_argument("--horizon", type=int, default=6, help="chunks of a rollout in phase self, at most 18")
    parser.add_argument("--max-error", type=float, default=0.15, help="latent error up to which a history is used")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="two steps on a few walks, to try the program on a CPU")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.walks, arguments.clips, arguments.horizon = 6, 2, 4
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True

    space = LatentSpace(
        trainable(AutoencoderKLWan.from_pretrained(arguments.vae, torch_dtype=torch.float32).to(device))
    )
    model = DemoModel().to(device)
    if arguments.resume is not None:
        model.restore(arguments.resume)
    network, prompts = model.network(), PromptTable(model, device)
    optimizer = Optimizer(dict(model.named_parameters()), layer_prefix="transformer.blocks")
    fixed_condition = space.fixed_condition(scene.HEIGHT, scene.WIDTH, device)
    began = time.monotonic()
    walks = build_walks(space, np.random.default_rng(arguments.seed), arguments.walks, device)
    print(f"{len(walks)} walks in {time.monotonic() - began:.0f} s", flush=True)
    batches = Batches(walks, fixed_condition, SIGMAS)
    if device.type == "cuda":
        network.compile()

    peak = arguments.peak or (2e-3 if arguments.phase is Phase.TEACHER else 6e-4)
    rolled_out: RolledOut | None = None
    began, started = time.monotonic(), None
    while True:
        progress = 0.0 if started is None else (time.monotonic() - started) / arguments.seconds
        if progress >= 1 or (arguments.smoke and optimizer.num_steps == 2):
            break
        if arguments.phase is Phase.SELF and optimizer.num_steps % ROLL_OUT_EVERY == 0:
            rolled_out = _roll_out(network, prompts, optimizer, walks, fixed_condition, arguments)
        with torch.autocast(device.type, torch.bfloat16):
            if rolled_out is None:
                loss = loss_of(network, prompts, batches.teacher_forced(arguments.clips))
            else:
                own = arguments.clips // 2
                loss = loss_of(network, prompts, batches.self_forced(own, rolled_out, arguments.max_error))
                loss = 0.5 * (loss + loss_of(network, prompts, batches.teacher_forced(arguments.clips - own)))
        loss.backward()
        optimizer.step(learning_rate_at(peak, optimizer.num_steps, progress, arguments.floor))
        if optimizer.num_steps == 5:
            started = time.monotonic()
            print(f"first steps after {started - began:.0f} s", flush=True)
        if optimizer.num_steps % 200 == 0 and started is not None:
            rate = optimizer.num_steps / (time.monotonic() - started)
            print(f"step {optimizer.num_steps}  loss {loss.item():.4f}  {rate:.2f} steps/s", flush=True)

    optimizer.swap_average()
    save_parts(dict(model.named_parameters()), arguments.out, "weights")
    export(model, arguments.out)
    sessions, chunks = (2, 3) if arguments.smoke else (24, 26)
    with torch.autocast(device.type, torch.bfloat16):
        result = evaluate(network, prompts, space, fixed_condition, sessions=sessions, chunks=chunks)
    result.sheet.save(arguments.out / "closed_loop.png")
    report = {"phase": arguments.phase, "steps": optimizer.num_steps, "chunks": [1, 2, 3, 6, 10, 12, 15, 20, 26]}
    report |= result.at((1, 2, 3, 6, 10, 12, 15, 20, 26))
    (arguments.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


def _roll_out(
    network: TrainingNetwork,
    prompts: PromptTable,
    optimizer: Optimizer,
    walks: Walks,
    fixed_condition: Tensor,
    arguments: argparse.Namespace,
) -> RolledOut:
    """Make histories with the averaged weights, which are what will be served."""
    optimizer.swap_average()
    sessions = 2 if arguments.smoke else 192
    with torch.autocast(fixed_condition.device.type, torch.bfloat16):
        rolled_out = roll_out_walks(
            network, prompts, walks, fixed_condition, sessions=sessions, chunks=arguments.horizon
        )
    optimizer.swap_average()
    if optimizer.num_steps % (5 * ROLL_OUT_EVERY) == 0:
        errors = rolled_out.errors_RN[:, : arguments.horizon]
        used = (errors < arguments.max_error).float().mean().item()
        print(f"rollout: error by chunk {[round(e, 3) for e in errors.mean(0).tolist()]}, used {used:.2f}", flush=True)
    return rolled_out


if __name__ == "__main__":
    sys.exit(main())
