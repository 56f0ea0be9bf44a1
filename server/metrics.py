"""What `/metrics` shows. One registry per application, so that tests and embedded servers don't share counters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from worldmodel.messages import MemoryStats, StageTimings

_STAGE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)


class Metrics:
    """Counters and histograms of one application. Names end in their unit."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.sessions = Gauge("worldserve_sessions", "Sessions by state.", ["state"], registry=r)
        self.resident = Gauge("worldserve_resident_sessions", "Sessions that hold a place in the worker.", registry=r)
        self.queued = Gauge("worldserve_queued_sessions", "Sessions that wait for a place.", registry=r)
        self.connections = Gauge("worldserve_connections", "Open WebSockets.", registry=r)
        self.body_bytes = Gauge(
            "worldserve_body_bytes", "Bytes of bodies of requests that are not answered yet.", registry=r
        )
        self.tasks = Gauge("worldserve_asyncio_tasks", "Tasks in the event loop.", registry=r)
        self.ready = Gauge("worldserve_ready", "1 if /readyz says so.", registry=r)
        self.capacity = Gauge("worldserve_capacity_sessions", "Places in the worker.", registry=r)
        self.worker_ready = Gauge("worldserve_worker_ready", "1 if the worker is ready.", registry=r)
        self.worker_generation = Gauge("worldserve_worker_generation", "Worker processes started.", registry=r)
        self.pages = Gauge("worldserve_pages", "KV pages of the worker.", ["state"], registry=r)
        self.worker_memory = Gauge("worldserve_worker_memory_bytes", "Memory of the worker.", ["kind"], registry=r)
        self.started = Counter("worldserve_sessions_started", "Sessions started.", registry=r)
        self.ended = Counter("worldserve_sessions_ended", "Sessions ended, by reason.", ["reason"], registry=r)
        self.resumed = Counter("worldserve_sessions_resumed", "Sockets that took a session up again.", registry=r)
        self.events = Counter("worldserve_events", "Events by result.", ["result"], registry=r)
        self.chunks = Counter("worldserve_chunks", "Committed chunks.", registry=r)
        self.media_frames = Counter("worldserve_media_frames", "Media frames of committed chunks.", registry=r)
        self.ticks_failed = Counter(
            "worldserve_ticks_failed", "Ticks that did not commit, by code.", ["code"], registry=r
        )
        self.errors = Counter("worldserve_errors", "Errors sent to clients, by code.", ["code"], registry=r)
        self.sent_bytes = Counter("worldserve_sent_bytes", "Bytes of media sent.", registry=r)
        self.stage_s = Histogram(
            "worldserve_chunk_stage_seconds",
            "Time of each stage of a chunk.",
            ["stage"],
            buckets=_STAGE_BUCKETS_S,
            registry=r,
        )
        self.event_wait_s = Histogram(
            "worldserve_event_wait_seconds",
            "From the acceptance of an event to the start of its chunk.",
            buckets=_STAGE_BUCKETS_S,
            registry=r,
        )

    def set_memory(self, memory: MemoryStats | None) -> None:
        """Show the worker's latest accounting; nothing is known of a worker that loads."""
        if memory is None:
            self.pages.clear()
            self.worker_memory.clear()
            return
        self.pages.labels("free").set(memory.free_pages)
        self.pages.labels("used").set(memory.total_pages - memory.free_pages)
        self.worker_memory.labels("rss").set(memory.rss_bytes)
        self.worker_memory.labels("device").set(memory.device_bytes)

    def observe_stages(self, timings: StageTimings, *, queue_ms: float) -> None:
        """Count where the time of a committed chunk went."""
        self.stage_s.labels("queue").observe(queue_ms / 1000)
        self.stage_s.labels("denoise").observe(timings.denoise_ms / 1000)
        self.stage_s.labels("commit").observe(timings.commit_ms / 1000)
        self.stage_s.labels("decode").observe(timings.decode_ms / 1000)

    def render(self) -> bytes:
        """Return the text exposition format."""
        return generate_latest(self.registry)
