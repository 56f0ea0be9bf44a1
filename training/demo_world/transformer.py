"""Train the demo world's transformer and text encoder.

    python -m training.demo_world.transformer --out RUN --vae VAE_FOLDER --seconds 500 [--resume CHECKPOINT]
    torchrun --nproc-per-node 2 -m training.demo_world.transformer ... --resume RUN --own-from 0.5 --decay 0.3

Chunks are predicted after their true history, or after one that is a little astray and teaches the way back; from
`--own-from` on, a share of the clips continue histories that the model made itself, as long as they are close to the
truth. Under torchrun every process
walks, learns and rolls out for itself, and gradients are averaged. A run starts from the averaged weights of the one
before; the optimiser warms up again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from training.demo_world import scene
from training.demo_world.arguments import ROLL_OUT_EVERY, portion_of, read_arguments
from training.demo_world.batches import CHUNKS, Batch, Batches, RolledOut
from training.demo_world.clips import ClipInputs, Clips
from training.demo_world.closed_loop import continuous_walks, roll_out_walks
from training.demo_world.dataset import FRAMES_PER_CHUNK, PORTION, LatentSpace, Walks, build_walks
from training.demo_world.judge import Judge
from training.demo_world.model import (
    CHUNK_POSE_LAYERS,
    HISTORY_POSE_LAYERS,
    SIGMAS,
    DemoModel,
    PromptTable,
    export,
)
from training.demo_world.optimizer import Optimizer
from training.demo_world.ring import WalkRing
from training.demo_world.steps import Stepper
from training.demo_world.vae_model import read_vae, trainable

WARM_UP_STEPS = 100
AGREE_EVERY = 20
"""Steps between two looks at the clock, which make the host wait for the device."""
POSE_WEIGHT = 0.1
HELD_OUT_WALKS, HELD_OUT_SEED = 2 * PORTION, 996


def loss_of(clips: Clips, model: DemoModel, prompts: PromptTable, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss and what it consists of.

    The loss is the weighted mean squared error of the predicted flow, and a little of the error of the poses that are
    read from history and from predicted chunks. Watched are the flow's error, that at pure noise, and the poses' two.
    """
    num_copies = clips.layout.num_copies
    weights = batch.weights_BN.repeat(1, num_copies)
    rows, mask = prompts.encode(batch.wordings_Q)
    inputs = ClipInputs(
        timesteps_BM=torch.cat([torch.zeros_like(batch.weights_BN[:, 1:]), 1000.0 * batch.sigmas_BN], dim=1),
        rotations_BF33=batch.rotations_BT33,
        translations_BF3=batch.translations_BT3,
        positions_BF=batch.positions_BT,
        prompts_BN=batch.prompts_BN,
        text_QLC=rows,
        text_mask_QL=mask,
    )
    clean = torch.cat([batch.clean_BCTYX, batch.condition_BCTYX[:, :, :-FRAMES_PER_CHUNK]], dim=1)
    noisy = torch.cat([batch.noisy_BCTYX, batch.condition_BCTYX.repeat(1, 1, num_copies, 1, 1)], dim=1)
    flow, (after_history, after_chunk) = clips.flow(clean, noisy, inputs)
    squared = (flow - batch.target_BCTYX).square().mean(dim=(1, 3, 4)).unflatten(1, (-1, FRAMES_PER_CHUNK)).mean(-1)
    poses = batch.poses_BTE.unflatten(1, (CHUNKS, FRAMES_PER_CHUNK))
    before = batch.history_poses_BTE.unflatten(1, (CHUNKS, FRAMES_PER_CHUNK))[:, :-1]
    tokens = (FRAMES_PER_CHUNK, -1)
    history = model.poses.errors(0, after_history[:, : CHUNKS - 1].unflatten(2, tokens), before)
    drawn = model.poses.errors(1, after_chunk[:, CHUNKS - 1 :].unflatten(2, tokens), poses.repeat(1, num_copies, 1, 1))
    of_flow = _weighted(squared, weights)
    of_history = _weighted(history.mean(-1), batch.history_weights_BN)
    of_drawn = _weighted(drawn.mean(-1), weights)
    at_noise = _weighted(squared, weights * (batch.sigmas_BN == 1.0))
    loss = of_flow + POSE_WEIGHT * (of_history + of_drawn)
    return loss, torch.stack([of_flow, at_noise, of_history, of_drawn])


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1)


def learning_rate_at(peak: float, step: int, progress: float, decay: float, floor: float) -> float:
    """Warm up over steps, stay, and fall to `floor` times the peak over the last share `decay` of the run."""
    falling = 1.0 if decay <= 0 else min(1.0, (1.0 - progress) / decay)
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * (floor + (1 - floor) * max(0.0, falling))


class Clock:
    """How long a run has been training, by the first process's clock in all of them; before `start` no time passes.

    The run is `seconds` long, or ends at `until` in seconds since 1970.
    """

    def __init__(self, seconds: float | None, until: float | None, device: torch.device) -> None:
        self._seconds, self._until, self._device = seconds, until, device
        self._started: float | None = None
        self.total_s = 1.0
        self.elapsed_s = 0.0

    @property
    def progress(self) -> float:
        """The share of the run that is over."""
        return self.elapsed_s / self.total_s

    def start(self) -> None:
        """Begin to count; waits for the device."""
        self._started = time.time()
        until_s = math.inf if self._until is None else max(1.0, self._until - self._started)
        self.total_s = self._agreed(until_s if self._seconds is None else self._seconds)

    def read(self) -> None:
        """Find out what time it is; waits for the device."""
        if self._started is not None:
            self.elapsed_s = self._agreed(time.time() - self._started)

    def _agreed(self, value: float) -> float:
        number = torch.tensor(value, device=self._device)
        if distributed.is_initialized():
            distributed.broadcast(number, 0)
        return float(number.item())


class Run:
    """A training run of one process. Only the first process writes and reports."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device, rank: int) -> None:
        self.arguments, self.device, self.is_first = arguments, device, rank == 0
        self.clock = Clock(arguments.seconds, arguments.until, device)
        scene.change(poplars=arguments.poplars, cutaway_m=arguments.cutaway)
        torch.manual_seed(arguments.seed)
        vae = read_vae(arguments.vae).to(device)
        self.space = LatentSpace(trainable(vae))
        self.model = DemoModel().to(device)
        if arguments.resume is not None:
            missing = self.model.load(arguments.resume)
            self.say(f"from {arguments.resume}, with {len(missing)} new tensors")
        self.network, self.prompts = self.model.network(), PromptTable(self.model, device)
        self.optimizer = Optimizer(
            dict(self.model.named_parameters()), layer_prefix="transformer.blocks", ema_decay=arguments.ema
        )
        clips = Clips(
            self.network,
            CHUNKS,
            num_copies=arguments.copies,
            pose_layers=(HISTORY_POSE_LAYERS, CHUNK_POSE_LAYERS),
        )
        if arguments.compile:
            clips.compile()
            if device.type == "cuda":
                self.space.compile()

        def compute(batch: Batch) -> tuple[Tensor, Tensor]:
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                return loss_of(clips, self.model, self.prompts, batch)

        self.stepper = Stepper(compute, self.optimizer, uses_graphs=arguments.graphs and device.type == "cuda")
        # From here on every process has its own chance.
        torch.manual_seed(1000 * arguments.seed + rank)
        self.fixed_condition = self.space.fixed_condition(scene.HEIGHT, scene.WIDTH, device)
        began = time.monotonic()
        rng = np.random.default_rng([arguments.seed, rank])
        self._portion = portion = portion_of(arguments.walks)
        num_held_out = 2 if arguments.smoke else HELD_OUT_WALKS
        self.held_out = self._build(np.random.default_rng(HELD_OUT_SEED), num_held_out)
        self._wait()
        prepared = time.monotonic()
        self.say(f"held-out walks after {prepared - began:.0f} s, in which the encoder was prepared")
        walks = self._build(rng, -(-arguments.walks // portion) * portion)
        self._wait()
        now = time.monotonic()
        self.say(f"{len(walks)} walks a process, {len(walks) / (now - prepared):.1f} a second")
        self.ring = WalkRing(
            walks,
            lambda num_walks: self._build(rng, num_walks),
            portion=portion,
            clips_per_step=arguments.clips,
            seen=arguments.seen,
        )
        self._looked_s = 0.0
        self._agree_every, self._roll_out_every = (2, 2) if arguments.smoke else (AGREE_EVERY, ROLL_OUT_EVERY)
        self.batches = Batches(
            walks,
            self.fixed_condition,
            SIGMAS,
            num_copies=arguments.copies,
            served_scale_share=arguments.served_scale_share,
        )

    def _build(self, rng: np.random.Generator, num_walks: int) -> Walks:
        return build_walks(self.space, rng, num_walks, self.device, portion=self._portion)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def train(self) -> None:
        """Take steps until the time is over; all processes take equally many."""
        arguments, rolled_out = self.arguments, None
        clock, began, step = self.clock, time.monotonic(), 0
        watched = torch.zeros(())
        next_look_s = 0.0
        while True:
            if step and step % self._agree_every == 0:
                self._expect_finite(step, watched)
                clock.read()
                if clock.progress >= 1:
                    return
                if clock.elapsed_s >= next_look_s:
                    self._look(step, clock.elapsed_s)
                    next_look_s += arguments.look_s
            if clock.progress >= arguments.own_from and step % self._roll_out_every == 0:
                rolled_out = self._histories()
            num_own = round(arguments.own_share * arguments.clips)
            batch = self.batches.draw(
                arguments.clips,
                rolled_out,
                num_own=num_own,
                max_error=arguments.max_error,
                astray_share=arguments.astray_share,
            )
            rate = learning_rate_at(arguments.peak, step, clock.progress, arguments.decay, arguments.floor)
            watched = self.stepper.step(batch, rate)
            self.ring.step()
            step += 1
            if step == 5:
                watched.tolist()
                clock.start()
                self.say(f"first steps after {time.monotonic() - began:.0f} s, {clock.total_s:.0f} s to go")
            if step % 200 == 0:
                steps_per_s = step / max(1.0, clock.elapsed_s)
                numbers = "  ".join(f"{value:.4f}" for value in watched.tolist())
                self.say(f"step {step}  flow, at noise, poses: {numbers}  {steps_per_s:.2f} steps/s")
            if arguments.smoke and step == 5:
                self._expect_finite(step, watched)
                return

    def _expect_finite(self, step: int, watched: Tensor) -> None:
        """Raise FloatingPointError once a weight is no number any more, in all processes, which have the same.

        A weight that was lost at any step is lost in the average for good, and so is the next loss.
        """
        if not self.optimizer.average.isfinite().all().item():
            numbers = "  ".join(f"{value:.4f}" for value in watched.tolist())
            raise FloatingPointError(
                f"expected finite weights after {step} steps; flow, at noise, poses: {numbers}; "
                f"{self.arguments.out} keeps what was saved before"
            )

    def _look(self, step: int, seconds: float) -> None:
        """Say how closed loops are doing on walks that are learnt from and on others, and save what there is.

        Where the former do better, walks are learnt by heart.
        """
        arguments, chunks = self.arguments, max(12, self.arguments.horizon)
        learnt_from = continuous_walks(self.ring.walks)[:HELD_OUT_WALKS]
        for name, walks, chosen in (
            ("learnt from", self.ring.walks, learnt_from),
            ("held out", self.held_out, continuous_walks(self.held_out)),
        ):
            if not len(chosen):
                self.say(f"after {seconds:.0f} s, {step} steps, {name}: no walk without a gap")
                continue
            errors = self._roll_out(walks, chosen, chunks).errors_RN[:, :chunks]
            by_chunk = " ".join(f"{error:.3f}" for error in errors.mean(0).tolist())
            used = (errors < arguments.max_error).float().mean().item()
            self.say(f"after {seconds:.0f} s, {step} steps, {name}: error by chunk {by_chunk}, {used:.2f} usable")
        renewing_s, passed_s = self.ring.take_seconds(), seconds - self._looked_s
        self._looked_s = seconds
        share = renewing_s / max(1.0, passed_s)
        self.say(f"{self.ring.num_renewed} walks renewed, for which {share:.2f} of the time went since the last look")
        if self.is_first and step:
            self.save()

    def _histories(self) -> RolledOut | None:
        """Make histories of walks that stay until the next time; without any that has no gap, none."""
        chosen = continuous_walks(self.ring.walks, self.ring.lasting(self._roll_out_every))
        if not len(chosen):
            return None
        chosen = chosen[torch.randint(0, len(chosen), (self.arguments.sessions,), device=self.device)]
        return self._roll_out(self.ring.walks, chosen, self.arguments.horizon)

    def _roll_out(self, walks: Walks, chosen: Tensor, chunks: int) -> RolledOut:
        """Play walks with the averaged weights, which are what will be served."""
        self.optimizer.swap_average()
        with torch.autocast(self.device.type, torch.bfloat16):
            rolled_out = roll_out_walks(
                self.network, self.prompts, walks, self.fixed_condition, chosen=chosen, chunks=chunks
            )
        self.optimizer.swap_average()
        return rolled_out

    def save(self) -> None:
        """Write the averaged weights as a checkpoint's folders."""
        self.optimizer.swap_average()
        export(self.model, self.arguments.out)
        self.optimizer.swap_average()

    def report(self) -> None:
        """Evaluate the averaged weights against the renderer, in bfloat16 as they are saved."""
        arguments = self.arguments
        self.optimizer.swap_average()
        self.optimizer.weights.copy_(self.optimizer.weights.bfloat16())
        torch.manual_seed(0)
        with torch.autocast(self.device.type, torch.bfloat16):
            judge = Judge(self.network, self.prompts, self.space, self.fixed_condition)
            judged = judge.report(arguments.out / "closed_loop.png", is_short=arguments.smoke)
        report = {"steps": self.optimizer.num_steps, "seconds": round(self.clock.elapsed_s), **judged}
        (arguments.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps(report), flush=True)


def main() -> None:
    arguments = read_arguments()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    rank, on_gpu = int(os.environ.get("RANK", "0")), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group("nccl" if on_gpu else "gloo")
    run = Run(arguments, device, rank)
    run.train()
    if run.is_first:
        run.save()
        run.report()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
