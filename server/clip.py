"""A job in a worker of its own, and the files it leaves: an mp4, latents, or both."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.app import start_message
from server.clip_arguments import ClipFiles, partial_of
from server.config import MediaSection, ServerConfig
from server.console import LoadBar, follow_loading
from server.generate import ClipChunk, GenerateJob, generate
from server.media.formats import StreamEncoder, create_stream_encoder
from server.wire.messages import StreamFormat
from server.worker import Worker
from server.worker_client import WorkerClient, WorkerPolicy
from worldmodel.messages import MediaFormat, MediaPart, ModelInfo


class ClipFailed(Exception):
    """Report that a file of the clip could not be written, in one sentence; nothing half-made is left."""


@asynccontextmanager
async def ready_worker(config: ServerConfig) -> AsyncIterator[tuple[Worker, ModelInfo]]:
    """Load a worker for one session, showing how far it is, and stop it in the end. Raises `WorldModelError`."""
    one_session = replace(config, kvcache=replace(config.kvcache, requested_sessions=1))
    worker = WorkerClient(start_message(one_session), WorkerPolicy.from_config(one_session))
    await worker.start()
    try:
        with LoadBar(sys.stderr) as bar:
            await follow_loading(worker, bar)
        await worker.wait_ready()
        info = worker.info
        assert info is not None, "a ready worker has told its geometry"
        yield worker, info
    finally:
        await worker.stop()


async def write_clip(worker: Worker, job: GenerateJob, info: ModelInfo, media: MediaSection, files: ClipFiles) -> None:
    """Write files beside their final names and rename them at the end, so that a half clip never looks whole.

    Raises `ClipFailed`, and what `generate` raises.
    """
    try:
        await _write_clip(worker, job, info, media, files)
    except OSError as error:
        raise ClipFailed(f"{error.filename or files.out or files.latents}: {error.strerror or error}") from error


async def _write_clip(worker: Worker, job: GenerateJob, info: ModelInfo, media: MediaSection, files: ClipFiles) -> None:
    num_media_frames = job.num_media_frames(info)
    with ExitStack() as cleanup:
        writer = None if files.out is None else _open_writer(files.out, info, media, cleanup)
        progress = cleanup.enter_context(_clip_progress())
        bar = progress.add_task("frames", total=num_media_frames)
        latents: list[npt.NDArray[np.generic]] = []
        async with aclosing(generate(worker, job)) as chunks:
            async for chunk in chunks:
                if writer is not None:
                    await asyncio.to_thread(writer.write, chunk)
                if MediaFormat.LATENT in chunk.media:
                    latents.append(chunk.media[MediaFormat.LATENT])
                progress.advance(bar, chunk.committed.num_media_frames)
        if files.latents is not None:
            await asyncio.to_thread(_write_latents, files.latents, latents)
        if writer is not None:
            writer.finish()
    print(f"{files.out or files.latents}: {num_media_frames} frames, {num_media_frames / info.fps:.1f} s", flush=True)


def _open_writer(out: Path, info: ModelInfo, media: MediaSection, cleanup: ExitStack) -> _ClipWriter:
    partial = partial_of(out)
    cleanup.callback(partial.unlink, missing_ok=True)
    encoder = create_stream_encoder(StreamFormat.FMP4, width=info.width, height=info.height, fps=info.fps, media=media)
    cleanup.callback(encoder.close)
    return _ClipWriter(encoder, cleanup.enter_context(partial.open("wb")), partial=partial, out=out)


class _ClipWriter:
    """Append chunks to one fragmented mp4."""

    def __init__(self, encoder: StreamEncoder, file: BinaryIO, *, partial: Path, out: Path) -> None:
        self._encoder = encoder
        self._muxer = encoder.new_epoch()
        self._file = file
        self._partial = partial
        self._out = out
        init = self._muxer.init_segment()
        assert init is not None, "an fMP4 stream has an init segment"
        file.write(init.payload)

    def write(self, chunk: ClipChunk) -> None:
        frames = chunk.media[MediaFormat.YUV420]
        part = MediaPart(format=MediaFormat.YUV420, shape=frames.shape, num_bytes=frames.nbytes)
        encoded = self._encoder.encode((part,), frames.data.cast("B"), chunk.committed.num_media_frames)
        self._file.write(self._muxer.mux(encoded).payload)

    def finish(self) -> None:
        """Give the file its final name."""
        self._file.close()
        os.replace(self._partial, self._out)


def _write_latents(path: Path, latents: list[npt.NDArray[np.generic]]) -> None:
    """Write `latents` [channels, latent frames, height, width] float32, all chunks joined along the frames."""
    # Imported here: only this verb needs it, and the server itself has no tensors.
    from safetensors.numpy import save

    partial = partial_of(path)
    try:
        # The library's own `save_file` makes files that only their owner may read.
        partial.write_bytes(save({"latents": np.ascontiguousarray(np.concatenate(latents, axis=1))}))
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
