"""The `replay` verb: the chunks of an event log once more, as an mp4, as latents, or both."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from server.app import start_message
from server.clip import ready_worker, write_clip
from server.clip_arguments import ClipFiles, check_seed, decode, read_image
from server.config import ServerConfig
from server.config_values import ConfigError
from server.event_log import LoggedImage, LogStart, image_digest
from server.generate import GenerateJob
from server.health import distribution_version
from server.replay import (
    ImageLoader,
    differing_circumstances,
    differing_facts,
    is_recorded,
    read_plain,
    read_recorded,
)
from server.uploads import RawImage
from worldmodel import catalog
from worldmodel.messages import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """What the command line asked for. `images` are files, or names of start images; `seed` is for plain logs."""

    log: Path
    images: tuple[str, ...]
    seed: int | None
    any_model: bool
    files: ClipFiles


def replay(config: ServerConfig, request: ReplayRequest) -> None:
    """Write the clip. Raises `ConfigError` for a wrong call or log, `WorldModelError` if the worker cannot do it."""
    request.files.check()
    if request.seed is not None:
        check_seed(request.seed)
    try:
        text = request.log.read_bytes()
    except OSError as error:
        raise ConfigError(f"{request.log}: {error.strerror or error}") from error
    try:
        job, start = _job(config, request, text)
    except ValueError as error:
        raise ConfigError(f"{request.log}: {error}") from error
    asyncio.run(_replay(config, request, job, start))


async def _replay(config: ServerConfig, request: ReplayRequest, job: GenerateJob, start: LogStart | None) -> None:
    async with ready_worker(config) as (worker, info):
        if start is not None:
            _check_model(start, info, config, any_model=request.any_model)
        await write_clip(worker, job, info, config.media, request.files)


def _check_model(start: LogStart, info: ModelInfo, config: ServerConfig, *, any_model: bool) -> None:
    differing = differing_facts(start, info, start_message(config).model_options)
    if differing and not any_model:
        raise ConfigError(f"the log is another model's ({'; '.join(differing)}); --any-model replays it anyway")
    differing += differing_circumstances(start, info, distribution_version())
    if differing:
        print(f"note: latents may differ from those recorded: {'; '.join(differing)}", file=sys.stderr)


def _job(config: ServerConfig, request: ReplayRequest, text: bytes) -> tuple[GenerateJob, LogStart | None]:
    """Read the log; its start too, if it has one. Raises `ValueError` or `ConfigError`."""
    parse_control = catalog.control_parser(config.model.name)
    if is_recorded(text):
        if request.seed is not None:
            raise ConfigError("--seed: this log has its own seeds")
        recorded = read_recorded(text, parse_control, _image_loader(config, request))
        start = recorded.start
        prompt, seed, image, steps = start.prompt, start.seed, recorded.image, recorded.steps
    else:
        if len(request.images) != 1:
            raise ConfigError(f"--image: expected one, since a plain log has none, got {len(request.images)}")
        plain = read_plain(text, parse_control)
        image = decode(config, read_image(config, request.images[0])[0], what="--image")
        start, prompt, seed, steps = None, plain.prompt, request.seed or 0, plain.steps
    job = GenerateJob(
        prompt=prompt,
        seed=seed,
        image=image.size,
        image_rgb=image.pixels,
        steps=steps,
        outputs=request.files.outputs,
    )
    return job, start


# ---------------------------------------------------------------- images


def _image_loader(config: ServerConfig, request: ReplayRequest) -> ImageLoader:
    """Find images by their digest: beside the log, among --image, and among those that the configuration offers."""
    given = [read_image(config, image)[0] for image in request.images]
    offered = [config.checkpoint_path / image.file for image in config.model.start_images]

    def load(logged: LoggedImage) -> RawImage:
        if Path(logged.file).name != logged.file:
            raise ValueError(f"image.file: expected a name without a folder, got {logged.file!r}")
        files = [path.read_bytes() for path in (request.log.parent / logged.file, *offered) if path.is_file()]
        for file in (*given, *files):
            if image_digest(file) == logged.sha256:
                return decode(config, file, what=logged.file)
        raise ValueError(
            f"no image with SHA-256 {logged.sha256} beside the log ({logged.file}), among --image or on offer"
        )

    return load
