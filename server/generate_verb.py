"""The `generate` verb: a start image, a prompt and a key script become an mp4, over the worker of the server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from server.clip import ready_worker, write_clip
from server.clip_arguments import ClipFiles, check_seed, decode, read_image
from server.config import ConfigError, ServerConfig
from server.generate import GenerateJob, num_chunks, script_steps
from server.key_script import parse_key_script
from server.uploads import RawImage
from worldmodel import catalog
from worldmodel.messages import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRequest:
    """What the command line asked for. `image` is a file, or the name of a start image of the configuration."""

    image: str
    prompt: str | None
    keys: str
    num_media_frames: int
    seed: int
    files: ClipFiles


def make_clip(config: ServerConfig, request: ClipRequest) -> None:
    """Write the clip. Raises `ConfigError` for a wrong call, `WorldModelError` if the worker cannot do it."""
    try:
        parse_key_script(request.keys)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if request.num_media_frames < 1:
        raise ConfigError(f"--frames: expected a number from 1, got {request.num_media_frames}")
    check_seed(request.seed)
    file, offered = read_image(config, request.image)
    prompt = request.prompt if request.prompt is not None else (offered.prompt if offered else None)
    if prompt is None:
        raise ConfigError("--prompt: expected a text, since the start image is a file and brings none")
    request.files.check()
    asyncio.run(_make_clip(config, request, decode(config, file, what="--image"), prompt))


async def _make_clip(config: ServerConfig, request: ClipRequest, image: RawImage, prompt: str) -> None:
    async with ready_worker(config) as (worker, info):
        await write_clip(worker, _job(config, request, image, prompt, info), info, config.media, request.files)


def _job(config: ServerConfig, request: ClipRequest, image: RawImage, prompt: str, info: ModelInfo) -> GenerateJob:
    try:
        chunks = num_chunks(info, request.num_media_frames)
        steps = script_steps(parse_key_script(request.keys), info, chunks, catalog.control_parser(config.model.name))
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    return GenerateJob(
        prompt=prompt,
        seed=request.seed,
        image=image.size,
        image_rgb=image.pixels,
        steps=steps,
        outputs=request.files.outputs,
    )
