"""Whether the server can serve, in words, and everything it says about itself."""

from __future__ import annotations

import resource
import sys
from importlib.metadata import PackageNotFoundError, version

from server.context import ServerContext
from server.wire.messages import PROTOCOL_VERSION
from server.wire.rest import CapacityView, LoadView, MemoryView, ModelView, ServerInfo
from server.worker import WorkerStatus
from worldmodel import catalog
from worldmodel.messages import LoadProgress, LoadStage, MemoryStats, ModelInfo

DISTRIBUTION = "worldserve"


def distribution_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"


def not_ready_reason(context: ServerContext) -> str | None:
    """Return why no session could be started, None if one could, or could wait for its turn."""
    worker, table = context.worker, context.table
    num_tombstones = table.num_tombstones + context.robots.num_tombstones
    if table.is_stopping:
        return "the server is shutting down"
    if table.is_broken:
        return "the scheduler has stopped, which is a bug; the server must be restarted"
    match worker.status:
        case WorkerStatus.READY:
            return (
                _leak_reason(worker.info, worker.memory)
                or _orphan_reason(worker.info, worker.memory, table.num_resident)
                or _tombstone_reason(worker.info, num_tombstones)
            )
        case WorkerStatus.LOADING:
            progress = worker.progress
            shown = "" if progress is None else f": {progress.stage}, {progress.fraction:.0%}"
            return f"the model is loading{shown}"
        case WorkerStatus.RESTARTING:
            return f"the worker is being restarted: {worker.failure}"
        case WorkerStatus.FAILED:
            return f"the model can't be served: {worker.failure}"
        case WorkerStatus.STOPPED:
            return "the worker was stopped"


def _leak_reason(info: ModelInfo | None, memory: MemoryStats | None) -> str | None:
    """Notice pages that belong to no session and would refuse one more."""
    if info is None or memory is None or memory.sessions >= info.capacity_sessions or not info.capacity_sessions:
        return None
    needed = memory.total_pages // info.capacity_sessions
    if memory.free_pages >= needed:
        return None
    return (
        f"pages have leaked: {memory.free_pages} of {memory.total_pages} are free with {memory.sessions} sessions, "
        f"and one more needs {needed}"
    )


def _orphan_reason(info: ModelInfo | None, memory: MemoryStats | None, num_resident: int) -> str | None:
    """Notice sessions in the worker that have no place here and would refuse one more: nobody can close them."""
    if info is None or memory is None or memory.sessions <= num_resident or memory.sessions < info.capacity_sessions:
        return None
    return f"the worker holds sessions of nobody ({memory.sessions - num_resident}) and has no room for another"


def _tombstone_reason(info: ModelInfo | None, num_tombstones: int) -> str | None:
    """Notice sessions that could not be released and together hold every place."""
    if info is None or not num_tombstones or num_tombstones < info.capacity_sessions:
        return None
    return f"all {info.capacity_sessions} places are held by sessions that the worker did not release; close them again"


def server_info(context: ServerContext) -> ServerInfo:
    """Describe the server, with effective values once the worker has told them."""
    worker, model = context.worker, context.config.model
    reason = not_ready_reason(context)
    info = worker.info
    return ServerInfo(
        version=distribution_version(),
        protocol=PROTOCOL_VERSION,
        status=worker.status,
        ready=reason is None,
        reason=reason,
        error=worker.failure if worker.status is WorkerStatus.FAILED else None,
        load=_load(worker.progress),
        served_model=model.name,
        width=model.width,
        height=model.height,
        fps=model.fps,
        model=None if info is None else _model(info),
        capacity=_capacity(context, info),
        memory=_memory(worker.memory),
        versions={} if info is None else dict(info.versions),
        notice=model.notice,
        begin_image=model.begin_image,
        start_images=context.start_images.offers,
        prompts=list(model.prompts),
    )


def _load(progress: LoadProgress | None) -> LoadView:
    if progress is None:
        return LoadView(stage=LoadStage.SPAWN, fraction=0.0, percent=0, detail="")
    percent = round(progress.fraction * 100)
    return LoadView(stage=progress.stage, fraction=progress.fraction, percent=percent, detail=progress.detail)


def _model(info: ModelInfo) -> ModelView:
    return ModelView(
        name=info.model,
        title=catalog.lookup(info.model).title,
        width=info.width,
        height=info.height,
        fps=info.fps,
        latent_frames_per_chunk=info.latent_frames_per_chunk,
        first_chunk_media_frames=info.first_chunk_media_frames,
        chunk_media_frames=info.chunk_media_frames,
        sink_latent_frames=info.sink_latent_frames,
        window_latent_frames=info.window_latent_frames,
        device=info.device,
        precision=info.precision,
        attention_backend=info.attention_backend,
        checkpoint_digest=info.checkpoint_digest,
        parameters=info.parameters,
        noise_layout=info.noise_layout,
        sampler=info.sampler,
    )


def _capacity(context: ServerContext, info: ModelInfo | None) -> CapacityView | None:
    memory = context.worker.memory
    if info is None or memory is None:
        return None
    return CapacityView(
        sessions=info.capacity_sessions,
        resident=context.table.num_resident,
        waiting=context.table.num_waiting,
        total_pages=memory.total_pages,
        free_pages=memory.free_pages,
        kv_bytes_per_session=info.kv_bytes_per_session,
    )


def _memory(memory: MemoryStats | None) -> MemoryView | None:
    if memory is None:
        return None
    return MemoryView(
        worker_rss_bytes=memory.rss_bytes,
        device_bytes=memory.device_bytes,
        server_peak_rss_bytes=_peak_rss_bytes(),
    )


def _peak_rss_bytes() -> int:
    """Return the most memory this process has had resident. `ru_maxrss` is in kB, on macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
