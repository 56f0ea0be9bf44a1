"""The mean of the weights of several runs that went on from one and the same: often better than each.

python -m training.demo_world.mean --runs RUN RUN ... --out FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from training.demo_world.model import DemoModel, export


def average(runs: list[Path]) -> DemoModel:
    """Return the mean of the runs' weights, readers of poses included."""
    model, mean = DemoModel(), DemoModel()
    with torch.no_grad():
        for parameter in mean.parameters():
            parameter.zero_()
        for run in runs:
            model.load(run)
            for total, parameter in zip(mean.parameters(), model.parameters(), strict=True):
                total.add_(parameter, alpha=1 / len(runs))
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the mean of several runs' weights.")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="--out of runs of one ancestor")
    parser.add_argument("--out", type=Path, required=True, help="folder for transformer, text encoder and poses")
    arguments = parser.parse_args()
    export(average(arguments.runs), arguments.out)


if __name__ == "__main__":
    main()
