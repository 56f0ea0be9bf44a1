"""What `/metrics` shows of robots."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)


class RobotMetrics:
    """Counters, gauges and histograms in the registry of one application."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.sessions = Gauge("worldserve_robot_sessions", "Robot sessions by state.", ["state"], registry=registry)
        self.calls = Counter("worldserve_robot_calls", "Requests for actions by result.", ["result"], registry=registry)
        self.call_s = Histogram(
            "worldserve_robot_call_seconds",
            "From the arrival of a request for actions to its answer.",
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.wait_s = Histogram(
            "worldserve_robot_wait_seconds",
            "From the arrival of a request for actions to the start of its computation.",
            buckets=_BUCKETS_S,
            registry=registry,
        )
