"""What `worldserve bench` takes on the command line, checked before anything is started."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from server.config_values import ConfigError

MAX_EVENTS_PER_SECOND = 1000.0
MAX_SEED = 2**53 - 1


class Ways(StrEnum):
    """Which ways of running are measured. Both: first the model alone, then served."""

    SERVED = "served"
    BOTH = "both"
    IN_PROCESS = "only"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What the command line asked for. `settings` are the flags that override the configuration, by "section.key".

    `command` is the call as people type it, without the token.
    """

    url: str | None
    config_file: Path | None
    settings: dict[str, str]
    ways: Ways
    num_sessions: int
    num_chunks: int
    pacing: str
    events_per_second: float
    seed: int
    time_limit_s: float
    chunk_timeout_s: float
    prompt: str | None
    token: str | None
    commit: str | None
    json_file: Path | None
    plot_file: Path | None
    command: str

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be measured."""
        self._check_target()
        for flag, value, least in (("--sessions", self.num_sessions, 1), ("--chunks", self.num_chunks, 2)):
            if value < least:
                raise ConfigError(f"{flag}: expected a number from {least}, got {value}")
        for flag, seconds in (("--time-limit", self.time_limit_s), ("--chunk-timeout", self.chunk_timeout_s)):
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"{flag}: expected seconds above 0, got {seconds:g}")
        if not 0 <= self.events_per_second <= MAX_EVENTS_PER_SECOND:
            raise ConfigError(
                f"--events-per-second: expected 0 to {MAX_EVENTS_PER_SECOND:g}, got {self.events_per_second:g}"
            )
        if not 0 <= self.seed <= MAX_SEED - self.num_sessions:
            raise ConfigError(f"--seed: expected a number from 0 to {MAX_SEED - self.num_sessions}, got {self.seed}")
        self._check_files()

    def _check_target(self) -> None:
        if (self.url is None) == (self.config_file is None):
            raise ConfigError("bench: expected either the URL of a running server or --config FILE")
        if self.url is not None and self.ways is not Ways.SERVED:
            raise ConfigError("--in-process: expected --config, since it loads the model itself")
        if self.url is not None and self.settings:
            raise ConfigError(f"--{next(iter(self.settings))}: a running server has its own settings")
        if self.url is None and self.token is not None:
            raise ConfigError("--token: expected a URL, since a server of its own is asked with its own token")

    def _check_files(self) -> None:
        for path in (self.json_file, self.plot_file):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise ConfigError(f"{path}: expected the name of a file in a folder that exists")
        if self.plot_file is not None and self.plot_file.suffix != ".svg":
            raise ConfigError(f"--plot: expected a name that ends in .svg, got {self.plot_file}")


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything but the settings."""
    parser.add_argument("url", nargs="?", metavar="URL", help="a running server; or --config to start one")
    parser.add_argument("--config", type=Path, help="a TOML file: start a server of its own with it")
    parser.add_argument(
        "--in-process",
        nargs="?",
        const=Ways.BOTH,
        default=Ways.SERVED,
        choices=("both", "only"),
        help="also measure the model without a server; `only`: nothing but that",
    )
    parser.add_argument("--sessions", type=int, default=1, help="sessions at the same time (default 1)")
    parser.add_argument("--chunks", type=int, default=40, help="chunks of each session (default 40)")
    parser.add_argument(
        "--pacing",
        choices=("free", "playback", "clock"),
        default="free",
        help="what lets a chunk start: nothing (default), or a viewer at media rate",
    )
    parser.add_argument("--events-per-second", type=float, default=1.0, help="random keys of a session (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and keys (default 0)")
    parser.add_argument("--prompt", help="the prompt (default: that of the start image)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the report as a picture")
    parser.add_argument("--token", help="token of the running server")
    parser.add_argument(
        "--commit", help="commit to name in the report (default: the checkout's, of a server that bench starts)"
    )
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds each run may take (default 180)")
    parser.add_argument("--chunk-timeout", type=float, default=120.0, help="seconds without a chunk to give up after")


def read_bench_arguments(
    arguments: argparse.Namespace, settings: dict[str, str], *, argv: Sequence[str]
) -> BenchRequest:
    """Build the request. Raises `ConfigError` for what cannot be measured."""
    request = BenchRequest(
        url=arguments.url,
        config_file=arguments.config,
        settings=settings,
        ways=Ways(arguments.in_process),
        num_sessions=arguments.sessions,
        num_chunks=arguments.chunks,
        pacing=arguments.pacing,
        events_per_second=arguments.events_per_second,
        seed=arguments.seed,
        time_limit_s=arguments.time_limit,
        chunk_timeout_s=arguments.chunk_timeout,
        prompt=arguments.prompt,
        token=arguments.token,
        commit=arguments.commit,
        json_file=arguments.json,
        plot_file=arguments.plot,
        command=_command_line(argv, secret=arguments.token),
    )
    request.check()
    return request


def _command_line(argv: Sequence[str], *, secret: str | None) -> str:
    hidden = {} if secret is None else {secret: "...", f"--token={secret}": "--token=..."}
    return shlex.join(["worldserve", *(hidden.get(part, part) for part in argv)])
