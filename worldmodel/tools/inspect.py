"""What a checkpoint holds and what it takes to serve it: `python -m worldmodel.tools.inspect PATH`.

Reads headers and configs, no tensor data, and needs no GPU. Exit codes: 0 the checkpoint can be served, 1 it cannot
(the reasons are printed), 2 the call is wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from worldmodel.catalog import OptionsParser
from worldmodel.checkpoint.errors import findings_of
from worldmodel.checkpoint.inspection import CARDS_GB, MAX_SESSIONS, Inspection
from worldmodel.checkpoint.problems import Problem
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.config import parse_options as parse_dreamzero
from worldmodel.dreamzero.inspection import inspect_dreamzero, is_dreamzero, trained_embodiment
from worldmodel.errors import RequestRefused, WorldModelError
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.config import parse_options as parse_lingbot
from worldmodel.lingbot.inspection import inspect_checkpoint
from worldmodel.offload_settings import OffloadSettings
from worldmodel.tools.amounts import bytes_text
from worldmodel.tools.argument_parser import ToolParser

MAX_CARD_GB = 1e6

OFFLOAD_KEYS = ("vae", "camera_modulation", "decode")
"""Settings of `[offload]` that count for resident weights too; plans of streamed ones are told by `doctor`."""

WORLD_WIDTH, WORLD_HEIGHT = 832, 480


def main(argv: Sequence[str] | None = None) -> int:
    """Print the inspection and return the exit code."""
    arguments = _parser().read(argv)
    try:
        found = _inspect(arguments)
    except (WorldModelError, ValueError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        if arguments.json and isinstance(error, WorldModelError):
            name = arguments.checkpoint
            problems = [problem.removeprefix(f"{name}: ") for problem in _whole(findings_of(error))]
            print(json.dumps({"checkpoint": name, "problems": problems}, indent=2))
        return 1 if isinstance(error, WorldModelError) else 2
    if arguments.json:
        print(json.dumps(asdict(found) | {"problems": _whole(found.problems)}, indent=2))
    else:
        show(found, Console())
    return 1 if found.problems else 0


def _whole(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.whole for problem in problems]


def _inspect(arguments: argparse.Namespace) -> Inspection:
    """Inspect a checkpoint of either model, at the picture size that it is served with if none is given."""
    table: dict[str, object] = dict(arguments.option)
    if is_dreamzero(arguments.checkpoint):
        if arguments.text_encoder is not None:
            raise ValueError("--text-encoder: the text encoder of a DreamZero checkpoint is always resident")
        if arguments.offload:
            raise ValueError("--offload: no setting of [offload] counts for a DreamZero checkpoint")
        # Without one, it is for the robot that the checkpoint is of.
        table.setdefault("embodiment", trained_embodiment(arguments.checkpoint))
        return inspect_dreamzero(
            arguments.checkpoint,
            width=arguments.width,
            height=arguments.height,
            precision=arguments.precision,
            options=DreamZeroOptions.from_json(_checked(parse_dreamzero, table)),
            cards_gb=arguments.cards,
        )
    return inspect_checkpoint(
        arguments.checkpoint,
        width=WORLD_WIDTH if arguments.width is None else arguments.width,
        height=WORLD_HEIGHT if arguments.height is None else arguments.height,
        precision=arguments.precision,
        text_encoder=arguments.text_encoder,
        options=LingBotOptions.from_json(_checked(parse_lingbot, table)),
        offload=_offload(arguments.offload),
        cards_gb=arguments.cards,
    )


def _checked(parse: OptionsParser, table: dict[str, object]) -> bytes:
    try:
        return parse(table)
    except RequestRefused as error:
        raise ValueError(f"--option: {error.message}") from error


def _offload(given: Sequence[tuple[str, object]]) -> OffloadSettings:
    """Read the settings of `[offload]` that count whatever is streamed. Raises ValueError."""
    table: dict[str, object] = dict(given)
    for name in table:
        if name not in OFFLOAD_KEYS:
            raise ValueError(f"--offload: expected one of {', '.join(OFFLOAD_KEYS)}, got {name!r}")
    try:
        return msgspec.convert(table, OffloadSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"--offload: {error}") from error


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="worldserve inspect",
        description="Show what a checkpoint holds and what it takes to serve it.",
    )
    parser.add_argument("checkpoint", metavar="PATH", help="a checkpoint folder, or random:NAME")
    parser.add_argument("--width", type=int, help="picture width in pixels (default 832, of DreamZero as trained)")
    parser.add_argument("--height", type=int, help="picture height in pixels (default 480, of DreamZero as trained)")
    parser.add_argument("--precision", default="bf16", help="precision plan (default bf16)")
    parser.add_argument(
        "--text-encoder", choices=("resident", "streamed", "cpu"), help="where it is (default: as the server chooses)"
    )
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option as in [model.options], such as vae_precision=float32; may be given several times",
    )
    parser.add_argument(
        "--offload",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"one of {', '.join(OFFLOAD_KEYS)} as in [offload], such as vae=parked; may be given several times",
    )
    parser.add_argument(
        "--cards",
        type=_gigabytes,
        default=CARDS_GB,
        help="memory of cards in GB (default 24,48,80,141)",
        metavar="GB,GB",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables, with problems in full")
    return parser


def _option(text: str) -> tuple[str, object]:
    """Read one option: its value is TOML, or else a text without quotes."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text[:80]!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        if value[:1] in ("[", "{", '"', "'"):
            raise argparse.ArgumentTypeError(f"{key}: expected a value as in TOML, got {value[:80]!r}") from None
        return key, value


def _gigabytes(text: str) -> tuple[float, ...]:
    try:
        cards = tuple(float(part) for part in text.split(","))
    except ValueError:
        cards = (0.0,)
    if not all(0 < card < MAX_CARD_GB for card in cards):
        raise argparse.ArgumentTypeError(
            f"expected numbers of GB above 0 with commas between them, such as 24,80, got {text[:40]!r}"
        )
    return cards


def show(found: Inspection, console: Console) -> None:
    """Print the inspection as tables. Names are folded where there is little room, numbers never."""
    console.print(
        f"[bold]{escape(found.checkpoint)}[/bold]  digest {found.digest[:16]}", highlight=False, soft_wrap=True
    )
    texts = (Column(title, overflow="fold") for title in ("component", "class", "stored as"))
    parts = Table(*texts, *_right("tensors", "parameters", "bytes"), title="components")
    for part in found.components:
        dtypes = ", ".join(f"{word}" for word in part.dtypes) or "-"
        cells = (f"{part.num_tensors:,}", f"{part.num_parameters:,}", bytes_text(part.num_bytes, digits=2))
        parts.add_row(part.name, part.class_name, dtypes, *cells)
    console.print(parts)
    console.print(_pairs("geometry", {key.replace("_", " "): str(value) for key, value in found.geometry.items()}))
    memory = {
        key.removesuffix("_bytes").replace("_", " "): bytes_text(value, digits=2) for key, value in found.memory.items()
    }
    console.print(_pairs(f"memory at {found.width}x{found.height}, {found.precision}", memory))
    cards = Table(*_right("card GB", "sessions", "free after one"), title="capacity")
    for card in found.capacity:
        spare = "does not fit" if card.sessions == 0 else bytes_text(card.spare_bytes, digits=2)
        sessions = f"{card.sessions} or more" if card.sessions >= MAX_SESSIONS else str(card.sessions)
        cards.add_row(f"{card.card_gb:g}", sessions, spare)
    console.print(cards)
    for problem in found.problems:
        console.print(f"[red]cannot be served:[/red] {escape(str(problem))}", highlight=False, soft_wrap=True)


def _right(*titles: str) -> list[Column]:
    return [Column(title, justify="right", no_wrap=True) for title in titles]


def _pairs(title: str, values: dict[str, str]) -> Table:
    table = Table(Column(no_wrap=True), Column(overflow="fold"), title=title, show_header=False)
    for key, value in values.items():
        table.add_row(key, value)
    return table


if __name__ == "__main__":
    # A reader that has enough, `head` for example, ends this program without a word.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    raise SystemExit(main())
