"""What `/metrics` shows of spectators."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class WatchMetrics:
    """Counters in the registry of one application."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.joined = Counter("worldserve_watchers_joined", "Spectators that joined a session.", registry=registry)
        self.skipped_chunks = Counter(
            "worldserve_watch_skipped_chunks", "Chunks that slow spectators were not sent.", registry=registry
        )
