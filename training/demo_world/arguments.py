"""The command line of the transformer's training."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from training.demo_world import scene
from training.demo_world.batches import CHUNKS
from training.demo_world.dataset import FRAMES_PER_CHUNK, LATER_FRAMES, OPENING_FRAMES, PORTION
from training.demo_world.options import count, folder_with, make_out, number, trained_part

ROLL_OUT_EVERY = 120
"""Steps between histories of the model's own making, whose time is that of launching them, however many."""
MIN_WALKS = 4
WALK_CHUNKS = (OPENING_FRAMES + LATER_FRAMES) // FRAMES_PER_CHUNK


def read_arguments() -> argparse.Namespace:
    """Read the command line; ends the process, naming the option, where no run could do what it asks for."""
    positive, share = number(above=0), number(least=0, most=1)
    some = count(least=1)
    parser = argparse.ArgumentParser(description="Train the demo world's transformer for a bounded time.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vae", type=trained_part, required=True, help="diffusers folder of the trained VAE")
    duration = parser.add_mutually_exclusive_group(required=True)
    duration.add_argument("--seconds", type=positive, help="training time; data and evaluation not counted")
    duration.add_argument(
        "--until", type=number(), help="when training ends, seconds since 1970; evaluation not counted"
    )
    parser.add_argument(
        "--resume", type=folder_with(), help="--out of an earlier run, or a checkpoint; it may lack last layers"
    )
    parser.add_argument("--peak", type=positive, default=2e-3, help="learning rate")
    parser.add_argument("--decay", type=share, default=0.0, help="last share of the run in which the rate falls")
    parser.add_argument("--floor", type=share, default=0.02, help="last learning rate over the peak")
    parser.add_argument(
        "--ema", type=number(least=0, below=1), default=0.998, help="decay of the weights' average, a step"
    )
    walks = count(least=MIN_WALKS)
    parser.add_argument("--walks", type=walks, default=1024, help="walks a process holds at once, in whole portions")
    parser.add_argument(
        "--seen", type=positive, default=8.0, help="clips that a walk is in before a new one takes its place"
    )
    scene.add_changes(parser)
    parser.add_argument(
        "--served-scale-share", type=share, default=0.6, help="clips whose steps are scaled as a server scales them"
    )
    parser.add_argument("--astray-share", type=share, default=0.6, help="other clips whose history is a little astray")
    parser.add_argument("--clips", type=some, default=24, help="clips a step and process")
    parser.add_argument("--copies", type=some, default=2, help="noisy copies of each clip")
    parser.add_argument(
        "--own-from", type=number(least=0), default=2.0, help="progress, 0 to 1, from which histories are own"
    )
    parser.add_argument("--own-share", type=share, default=0.5, help="clips with a history of the model's own making")
    parser.add_argument("--sessions", type=some, default=192, help="rollouts at once, a process")
    horizon = count(least=CHUNKS, most=WALK_CHUNKS)
    parser.add_argument("--horizon", type=horizon, default=12, help="chunks of a rollout, 8 to 18")
    parser.add_argument("--max-error", type=positive, default=0.15, help="latent error up to which a history is used")
    parser.add_argument("--look-s", type=positive, default=60.0, help="seconds between two looks at closed loops")
    parser.add_argument("--seed", type=count(least=0), default=7)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="layers as they are written")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="launch every operation by itself")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="five steps on a few walks and a look at them, to try the program on a CPU, where nothing is compiled",
    )
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.walks, arguments.clips, arguments.sessions, arguments.horizon = MIN_WALKS, 2, 2, CHUNKS
        arguments.own_from = min(arguments.own_from, 0.0)
        arguments.compile = arguments.compile and torch.cuda.is_available()
    elif (renewed := _most_renewed(arguments)) >= arguments.walks and arguments.own_from < 1:
        parser.error(
            f"own histories are of walks that stay for {ROLL_OUT_EVERY} steps, which renew up to {renewed} of "
            f"{arguments.walks}: expected more --walks, a larger --seen, or fewer --clips"
        )
    make_out(parser, arguments.out)
    return arguments


def _most_renewed(arguments: argparse.Namespace) -> int:
    """Return how many walks may go from one time that own histories are made to the next."""
    portion = portion_of(arguments.walks)
    return portion * math.ceil(ROLL_OUT_EVERY * arguments.clips / arguments.seen / portion)


def portion_of(num_walks: int) -> int:
    """Return how many walks are drawn at once."""
    return min(PORTION, num_walks // MIN_WALKS)
