"""The `generate` verb: a start image, a prompt and a key script become an mp4, over the worker of the server."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.app import start_message
from server.config import ConfigError, ServerConfig, StartImageConfig
from server.console import LoadBar, follow_loading
from server.errors import ServerError
from server.generate import ClipChunk, GenerateJob, generate, num_chunks, script_steps
from server.key_script import parse_key_script
from server.media.formats import StreamEncoder, create_stream_encoder
from server.uploads import RawImage, decode_image
from server.wire.messages import StreamFormat
from server.worker_client import WorkerClient, WorkerPolicy
from worldmodel import catalog
from worldmodel.messages import MediaFormat, MediaPart, ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRequest:
    """What the command line asked for. `image` is a file, or the name of a start image of the configuration."""

    image: str
    prompt: str | None
    keys: str
    num_media_frames: int
    seed: int
    out: Path
    latents: Path | None


def make_clip(config: ServerConfig, request: ClipRequest) -> None:
    """Write the clip. Raises `ConfigError` for a wrong call, `WorldModelError` if the worker cannot do it."""
    try:
        parse_key_script(request.keys)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if request.seed < 0:
        raise ConfigError(f"--seed: expected a number from 0, got {request.seed}")
    image, offered = _read_image(config, request.image)
    prompt = request.prompt if request.prompt is not None else (offered.prompt if offered else None)
    if prompt is None:
        raise ConfigError("--prompt: expected a text, since the start image is a file and brings none")
    for path in (request.out, request.latents):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: the folder {path.parent} does not exist")
    one_session = replace(config, kvcache=replace(config.kvcache, requested_sessions=1))
    asyncio.run(_make_clip(one_session, request, image, prompt))


def _read_image(config: ServerConfig, image: str) -> tuple[RawImage, StartImageConfig | None]:
    offered = next((each for each in config.model.start_images if each.name == image), None)
    path = config.checkpoint_path / offered.file if offered else Path(image)
    try:
        return decode_image(path.read_bytes(), limits=config.limits, field="image"), offered
    except OSError as error:
        names = ", ".join(each.name for each in config.model.start_images) or "none"
        reason = error.strerror or str(error)
        raise ConfigError(f"--image: {image!r} is no start image ({names}) and no file: {reason}") from error
    except ServerError as error:
        raise ConfigError(f"--image: {error.message}") from error


async def _make_clip(config: ServerConfig, request: ClipRequest, image: RawImage, prompt: str) -> None:
    worker = WorkerClient(start_message(config), WorkerPolicy.from_config(config))
    await worker.start()
    try:
        with LoadBar(sys.stderr) as bar:
            await follow_loading(worker, bar)
        await worker.wait_ready()
        info = worker.info
        assert info is not None, "a ready worker has told its geometry"
        job = _job(config, request, image, prompt, info)
        await _write(worker, job, info, config, request)
    finally:
        await worker.stop()


def _job(config: ServerConfig, request: ClipRequest, image: RawImage, prompt: str, info: ModelInfo) -> GenerateJob:
    try:
        chunks = num_chunks(info, request.num_media_frames)
        steps = script_steps(parse_key_script(request.keys), info, chunks, catalog.control_parser(config.model.name))
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    outputs = (MediaFormat.YUV420,) if request.latents is None else (MediaFormat.YUV420, MediaFormat.LATENT)
    return GenerateJob(
        prompt=prompt, seed=request.seed, image=image.size, image_rgb=image.pixels, steps=steps, outputs=outputs
    )


async def _write(
    worker: WorkerClient, job: GenerateJob, info: ModelInfo, config: ServerConfig, request: ClipRequest
) -> None:
    """Write both files beside their final names and rename them at the end, so that a half clip never looks whole."""
    with ExitStack() as cleanup:
        partial = request.out.with_name(f".{request.out.name}.partial")
        cleanup.callback(partial.unlink, missing_ok=True)
        encoder = create_stream_encoder(
            StreamFormat.FMP4, width=info.width, height=info.height, fps=info.fps, media=config.media
        )
        cleanup.callback(encoder.close)
        progress = cleanup.enter_context(_clip_progress())
        bar = progress.add_task("frames", total=request.num_media_frames)
        latents: list[npt.NDArray[np.generic]] = []
        with partial.open("wb") as file:
            writer = _ClipWriter(encoder, file)
            async with aclosing(generate(worker, job)) as chunks:
                async for chunk in chunks:
                    await asyncio.to_thread(writer.write, chunk)
                    if MediaFormat.LATENT in chunk.media:
                        latents.append(chunk.media[MediaFormat.LATENT])
                    progress.advance(bar, chunk.committed.num_media_frames)
        if request.latents is not None:
            await asyncio.to_thread(_write_latents, request.latents, latents)
        os.replace(partial, request.out)
    print(f"{request.out}: {request.num_media_frames} frames, {request.num_media_frames / info.fps:.1f} s", flush=True)


class _ClipWriter:
    """Append chunks to one fragmented mp4."""

    def __init__(self, encoder: StreamEncoder, file: BinaryIO) -> None:
        self._encoder = encoder
        self._muxer = encoder.new_epoch()
        self._file = file
        init = self._muxer.init_segment()
        assert init is not None, "an fMP4 stream has an init segment"
        file.write(init.payload)

    def write(self, chunk: ClipChunk) -> None:
        frames = chunk.media[MediaFormat.YUV420]
        part = MediaPart(format=MediaFormat.YUV420, shape=frames.shape, num_bytes=frames.nbytes)
        encoded = self._encoder.encode((part,), frames.data.cast("B"), chunk.committed.num_media_frames)
        self._file.write(self._muxer.mux(encoded).payload)


def _write_latents(path: Path, latents: list[npt.NDArray[np.generic]]) -> None:
    """Write `latents` [channels, latent frames, height, width] float32, all chunks joined along the frames."""
    # Imported here: only this verb needs it, and the server itself has no tensors.
    from safetensors.numpy import save_file

    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file({"latents": np.ascontiguousarray(np.concatenate(latents, axis=1))}, str(partial))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _clip_progress() -> Progress:
    return Progress(
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("frames"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
