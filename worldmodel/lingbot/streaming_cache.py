"""The weight cache of streamed LingBot layers: what decides their bytes, and the entry that has them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from offload.cache_folder import CacheFolder
from offload.cache_manifest import Validation
from offload.cache_upkeep import prune
from offload.cached_layers import CachedLayers, cache_request, open_cached
from offload.errors import CacheError
from offload.file_lock import log_wait
from offload.weight_cache import WeightCache
from worldmodel.checkpoint.component import Component
from worldmodel.checkpoint.errors import naming
from worldmodel.checkpoint.loading import Progress
from worldmodel.lingbot.streamed_layers import LayerSource, StreamedLayers
from worldmodel.lingbot.streaming_plan import DeviceNumbers
from worldmodel.offload_settings import OffloadSettings

LOADER_VERSION = "1"
"""Raised when the same checkpoint and precision become other bytes, so that older entries are not found."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamRequest:
    """What streaming needs beside the transformer, whose layers have no linears yet."""

    source: LayerSource
    settings: OffloadSettings
    numbers: DeviceNumbers
    digest: str
    progress: Progress


def open_cache(layers: StreamedLayers, request: StreamRequest) -> CachedLayers:
    """Open the entry of a model's layers, made first where there is none. Raises `CacheError`, `LoadFailed`.

    Whoever has to be waited for is told to the log and as progress.
    """
    settings = request.settings
    folder = CacheFolder(Path(settings.cache_folder))

    def tell(text: str) -> None:
        log_wait(f"weight cache: {text}")
        request.progress(0.0, text)

    cache = WeightCache(folder, lock_timeout_s=settings.cache_lock_timeout_s, on_wait=tell)
    started_s = time.monotonic()
    cached = open_cached(
        layers,
        cache,
        cache_request(layers, source_identity(request), {**layers.metadata, "loader": LOADER_VERSION}),
        Validation(settings.cache_validation),
        on_made=lambda index: request.progress(
            (index + 1) / layers.num_layers, f"layer {index + 1} made for the cache"
        ),
    )
    how = "built" if cached.entry.was_built else "found"
    logger.info("weight cache: %s %s in %.1f s", how, cached.entry.folder.name, time.monotonic() - started_s)
    if settings.cache_max_bytes is not None:
        _make_room(folder, settings.cache_max_bytes, cached.entry.folder.name)
    return cached


def _make_room(folder: CacheFolder, max_bytes: int, mine: str) -> None:
    """Evict what is too much. The weights are there: what goes wrong here stops no start."""
    try:
        pruned = prune(folder, max_bytes=max_bytes, max_age_s=None, now_s=time.time(), mine=(mine,))
    except (CacheError, OSError) as error:
        logger.warning("weight cache: nothing more is evicted: %s", error)
        return
    for gone in pruned.removed:
        logger.info("weight cache: evicted %s, %d bytes", gone.address, gone.num_bytes)
    for stuck in pruned.stuck:
        logger.warning("weight cache: %s stays, it %s", stuck.address, stuck.problem)


def source_identity(request: StreamRequest) -> str:
    """Say which content the layers come from: the checkpoint's digest, and every file as it is on the disk now.

    The digest samples large files; a file that was written since has another time of modification.
    """
    return hashlib.sha256(json.dumps([request.digest, *_files(request.source.component)]).encode()).hexdigest()


def _files(component: Component) -> list[tuple[str, int, int]]:
    facts = []
    for file in sorted({info.file for info in component.tensors.values()}):
        with naming(file, "read"):
            found = file.stat()
        facts.append((str(file.resolve()), found.st_size, found.st_mtime_ns))
    return facts
