"""What a benchmark is told to do: one JSON object on standard input, written by `server/bench_verb.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from clients.bench.errors import BenchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One benchmark. `url` None: no server is driven, only `in_process_run` is reported.

    `spare_image` is a start image file for servers that offer none, with `prompt` as its prompt; `prompt` also replaces
    the prompt of an offered image if `prompt_given`. Every session makes `num_chunks` chunks, all of them within
    `time_limit_s`; a session that gets no chunk for `chunk_timeout_s` is given up. `events_per_second` are random keys
    of `seed`, for each session. `in_process_run` is a file of samples, `json_file` and `plot_file` are written.
    `own_server`: it was started from the packages that this is one of; `load_s` and `commit` are what its starter knows
    of it. `command` is shown in the report.
    """

    url: str | None
    spare_image: Path
    prompt: str
    num_sessions: int
    num_chunks: int
    pacing: str
    events_per_second: float
    seed: int
    time_limit_s: float
    chunk_timeout_s: float
    command: str
    prompt_given: bool = False
    token: str | None = None
    in_process_run: Path | None = None
    json_file: Path | None = None
    plot_file: Path | None = None
    own_server: bool = False
    load_s: float | None = None
    commit: str | None = None


def read_job(text: bytes) -> Job:
    """Raises `BenchError` for anything that is no job."""
    try:
        return msgspec.json.decode(text, type=Job, dec_hook=_decode)
    except msgspec.DecodeError as error:
        raise BenchError(f"the job is not what was expected: {error}") from error


def _decode(kind: type, value: Any) -> Any:
    """Paths travel as text."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind} is no field of a job")
