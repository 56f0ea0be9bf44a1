"""The `generate` verb: a start image, a prompt and a camera become an mp4, over the worker of the server."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from pathlib import Path

from server.clip import ready_worker, write_clip
from server.clip_arguments import ClipFiles, check_seed, decode, read_image
from server.config import ServerConfig
from server.config_values import ConfigError
from server.errors import BadInput
from server.generate import GenerateJob, GenerateStep, num_chunks, script_steps
from server.key_script import parse_key_script
from server.limits import check_prompt
from server.uploads import RawImage
from worldmodel import catalog
from worldmodel.clips import ClipPlan, ClipWish
from worldmodel.errors import RequestRefused
from worldmodel.messages import ControlEvent, ModelInfo

OFFICIAL_SIZE = "official"
"""`--size` that lets the model's own rule choose by the start image."""

_FLAGS = {
    "width": "--size",
    "height": "--size",
    "image": "--image",
    "num_media_frames": "--frames",
    "camera_folder": "--camera",
    "checkpoint": "model.checkpoint",
}
"""What a field of a wish is called on the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRequest:
    """What the command line asked for. `image` is a file, or the name of a start image of the configuration.

    `size` is "WIDTHxHEIGHT" or `OFFICIAL_SIZE`, None for that of the configuration. `camera` is a folder with a path;
    `trims` makes a number of frames that does not fit shorter, and keys with it.
    """

    image: str
    prompt: str | None
    keys: str
    num_media_frames: int
    seed: int
    files: ClipFiles
    camera: Path | None = None
    size: str | None = None
    trims: bool = False


def make_clip(config: ServerConfig, request: ClipRequest) -> None:
    """Write the clip. Raises `ConfigError` for a wrong call, `WorldModelError` if the worker cannot do it.

    All that can be wrong about the call is found before the model is loaded.
    """
    check_seed(request.seed)
    if request.camera is not None and request.keys:
        raise ConfigError("--camera and --keys: expected one of them, since both move the camera")
    file, offered = read_image(config, request.image)
    prompt = request.prompt if request.prompt is not None else (offered.prompt if offered else None)
    if prompt is None:
        raise ConfigError("--prompt: expected a text, since the start image is a file and brings none")
    _check_prompt(config, prompt)
    request.files.check()
    image = decode(config, file, what="--image")
    plan = _plan(config, request, image)
    job = GenerateJob(
        prompt=prompt,
        seed=request.seed,
        image=image.size,
        image_rgb=image.pixels,
        steps=_steps(config, request, plan),
        outputs=request.files.outputs,
    )
    model = replace(config.model, width=plan.width, height=plan.height, options=plan.options)
    asyncio.run(_make_clip(replace(config, model=model), job, plan, request.files))


def _check_prompt(config: ServerConfig, prompt: str) -> None:
    """Raise `ConfigError` for a prompt that a served session would be refused for, in the same words.

    Bytes of the command line that are no UTF-8 come as halves of surrogate pairs, which no worker could be sent.
    """
    try:
        prompt.encode()
        check_prompt(prompt, max_chars=config.limits.max_prompt_chars, field="--prompt")
    except UnicodeEncodeError as error:
        raise ConfigError("--prompt: expected a text in UTF-8, got other bytes") from error
    except BadInput as error:
        raise ConfigError(error.message) from error


async def _make_clip(config: ServerConfig, job: GenerateJob, plan: ClipPlan, files: ClipFiles) -> None:
    async with ready_worker(config) as (worker, info):
        _check_plan(plan, info)
        await write_clip(worker, job, info, config.media, files)


def _plan(config: ServerConfig, request: ClipRequest, image: RawImage) -> ClipPlan:
    """Ask the model what the clip will be. Raises `ConfigError` naming the flag or the setting."""
    width, height = _size(config, request.size)
    wish = ClipWish(
        checkpoint=str(config.checkpoint_path),
        options=config.model.options,
        width=width,
        height=height,
        image_width=image.size.width,
        image_height=image.size.height,
        num_media_frames=request.num_media_frames,
        follows_image=request.size == OFFICIAL_SIZE,
        trims=request.trims,
        camera_folder=request.camera,
    )
    try:
        return catalog.clip_planner(config.model.name)(wish)
    except RequestRefused as error:
        flag = _FLAGS.get(error.field or "")
        if flag is None:
            raise ConfigError(error.message) from error
        raise ConfigError(f"{flag}: {error.message.removeprefix(f'{error.field}: ')}") from error


def _size(config: ServerConfig, size: str | None) -> tuple[int, int]:
    if size is None or size == OFFICIAL_SIZE:
        return config.model.width, config.model.height
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size)
    if match is None:
        raise ConfigError(f"--size: expected WIDTHxHEIGHT or {OFFICIAL_SIZE}, got {size!r}")
    return int(match[1]), int(match[2])


def _steps(config: ServerConfig, request: ClipRequest, plan: ClipPlan) -> tuple[GenerateStep, ...]:
    parse_control = catalog.control_parser(config.model.name)
    try:
        keys = parse_key_script(request.keys)
        if request.trims:
            keys = keys[: plan.num_chunks * plan.latent_frames_per_chunk]
        steps = script_steps(keys, plan.latent_frames_per_chunk, plan.num_chunks, parse_control)
    except ValueError as error:
        raise ConfigError(f"--keys: {str(error).removeprefix('keys: ')}") from error
    if not plan.controls:
        return steps
    opening = GenerateStep(events=(ControlEvent(event_id=0, controls=plan.controls),))
    return (opening, *steps[1:])


def _check_plan(plan: ClipPlan, info: ModelInfo) -> None:
    """Stop if the loaded model would make another clip than the one that was planned."""
    try:
        chunks = num_chunks(info, plan.num_media_frames)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    if (chunks, info.latent_frames_per_chunk) != (plan.num_chunks, plan.latent_frames_per_chunk):
        raise ConfigError(
            f"the checkpoint's config files promise chunks of {plan.latent_frames_per_chunk} latent frames, "
            f"the loaded model makes chunks of {info.latent_frames_per_chunk}"
        )
