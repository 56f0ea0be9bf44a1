"""Write a checkpoint with random weights: `python -m worldmodel.tools.make_checkpoint --like MODEL OUT`.

Names, shapes, files and configs are those of the published checkpoint; the values are made up, the same for the same
seed. Exit codes: 0 done, 1 it could not be written, 2 the call is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from worldmodel.catalog import resolve
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.plan import MAX_SEED, CheckpointPlan, PlanRequest
from worldmodel.tools.amounts import bytes_text
from worldmodel.tools.argument_parser import ToolParser

PLANNERS: dict[str, str] = {
    "lingbot-world-v2": "worldmodel.lingbot.layout:plan_for",
    "dreamzero-droid": "worldmodel.dreamzero.layout:plan_for",
    "dreamzero-droid-5b": "worldmodel.dreamzero.layout:plan_for_5b",
}
"""A model's planner by name: a function from `PlanRequest` to `CheckpointPlan` that raises ValueError."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the checkpoint, or only show its plan, and return the exit code."""
    arguments = _parser().read(argv)
    planner = cast("Callable[[PlanRequest], CheckpointPlan]", resolve(PLANNERS[arguments.like]))
    request = PlanRequest(scale=arguments.scale, layout=arguments.layout, dtype=arguments.dtype)
    try:
        plan = planner(request)
    except ValueError as error:
        print(f"make-checkpoint: {error}", file=sys.stderr)
        return 2
    console = Console(stderr=True)
    if arguments.plan:
        _show(plan)
        return 0
    try:
        _write(plan, arguments.out, arguments.seed, console)
    except CheckpointError as error:
        print(f"make-checkpoint: {error}", file=sys.stderr)
        return 1
    size = bytes_text(plan.num_bytes, digits=2)
    print(f"{arguments.out}: {plan.num_parameters:,} parameters, {size} (random weights)")
    return 0


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="worldserve make-checkpoint",
        description="Write a checkpoint with random weights in the exact layout of a published one.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    parser.add_argument("--like", choices=sorted(PLANNERS), required=True, help="the published model")
    parser.add_argument("--scale", choices=("tiny", "full"), default="tiny", help="its full size, or a few MB")
    parser.add_argument("--layout", choices=("diffusers", "original"), default="diffusers", help="which of its layouts")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="type of the transformer's weights")
    parser.add_argument("--seed", type=_seed, default=0, help="another seed gives other values")
    parser.add_argument("--plan", action="store_true", help="list the files and their sizes, write nothing")
    return parser


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to {MAX_SEED}, got {text[:40]!r}")
    return int(text)


def _show(plan: CheckpointPlan) -> None:
    for path in sorted(plan.json_files):
        print(f"{'':>14}  {path}")
    for file in plan.tensor_files:
        print(f"{file.num_bytes:>14}  {file.path}  ({_count(len(file.tensors), 'tensor')})")
    print(f"{plan.num_bytes:>14}  bytes of {plan.num_parameters} parameters")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _write(plan: CheckpointPlan, out: Path, seed: int, console: Console) -> None:
    # torch takes seconds to import; a wrong call is told before.
    from worldmodel.checkpoint.writer import write_checkpoint

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=plan.num_bytes)

        def show(fraction: float, path: str) -> None:
            bar.update(task, completed=fraction * plan.num_bytes, description=path)

        write_checkpoint(plan, out, seed=seed, progress=show)


if __name__ == "__main__":
    raise SystemExit(main())
