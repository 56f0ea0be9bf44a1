"""What a checkpoint holds and what it takes to serve it: `python -m worldmodel.tools.inspect PATH`.

Reads headers and configs, no tensor data, and needs no GPU. Exit codes: 0 the checkpoint can be served, 1 it cannot
(the reasons are printed), 2 the call is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Column, Table

from worldmodel.errors import WorldModelError
from worldmodel.lingbot.inspection import CARDS_GB, Inspection, inspect_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Print the inspection and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        found = inspect_checkpoint(
            arguments.checkpoint,
            width=arguments.width,
            height=arguments.height,
            precision=arguments.precision,
            text_encoder=arguments.text_encoder,
            cards_gb=tuple(arguments.cards),
        )
    except (WorldModelError, ValueError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 1 if isinstance(error, WorldModelError) else 2
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(found, Console())
    return 1 if found.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="worldserve inspect", description="Show what a checkpoint holds and what it takes to serve it."
    )
    parser.add_argument("checkpoint", metavar="PATH", help="a checkpoint folder, or random:NAME")
    parser.add_argument("--width", type=int, default=832, help="picture width in pixels (default 832)")
    parser.add_argument("--height", type=int, default=480, help="picture height in pixels (default 480)")
    parser.add_argument("--precision", default="bf16", help="precision plan (default bf16)")
    parser.add_argument(
        "--text-encoder", choices=("resident", "streamed", "cpu"), help="where it is (default: as the server chooses)"
    )
    parser.add_argument(
        "--cards",
        type=_gigabytes,
        default=CARDS_GB,
        help="memory of cards in GB (default 24,48,80,141)",
        metavar="GB,GB",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _gigabytes(text: str) -> tuple[float, ...]:
    cards = tuple(float(part) for part in text.split(","))
    if not all(0 < card < 1e6 for card in cards):
        raise ValueError(text)
    return cards


def show(found: Inspection, console: Console) -> None:
    """Print the inspection as tables."""
    console.print(f"[bold]{found.checkpoint}[/bold]  digest {found.digest[:16]}", highlight=False)
    parts = Table("component", "class", "stored as", *_right("tensors", "parameters", "bytes"), title="components")
    for part in found.components:
        dtypes = ", ".join(f"{word}" for word in part.dtypes) or "-"
        cells = (f"{part.num_tensors:,}", f"{part.num_parameters:,}", _size(part.num_bytes))
        parts.add_row(part.name, part.class_name, dtypes, *cells)
    console.print(parts)
    console.print(_pairs("geometry", {key.replace("_", " "): str(value) for key, value in found.geometry.items()}))
    memory = {key.removesuffix("_bytes").replace("_", " "): _size(value) for key, value in found.memory.items()}
    console.print(_pairs(f"memory at {found.width}x{found.height}, {found.precision}", memory))
    cards = Table(*_right("card GB", "sessions", "free after one"), title="capacity")
    for card in found.capacity:
        spare = "does not fit" if card.sessions == 0 else _size(card.spare_bytes)
        cards.add_row(f"{card.card_gb:g}", str(card.sessions), spare)
    console.print(cards)
    for problem in found.problems:
        console.print(f"[red]cannot be served:[/red] {problem}", highlight=False)


def _right(*titles: str) -> list[Column]:
    return [Column(title, justify="right") for title in titles]


def _pairs(title: str, values: dict[str, str]) -> Table:
    table = Table(title=title, show_header=False)
    for key, value in values.items():
        table.add_row(key, value)
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


if __name__ == "__main__":
    raise SystemExit(main())
