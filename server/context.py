"""What every request handler of one application needs, in one frozen object. Made in `app.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.auth import Authenticator
from server.clock import Clock
from server.config import ServerConfig
from server.metrics import Metrics
from server.recording import Recordings
from server.robot_table import RobotTable
from server.session_table import SessionTable
from server.start_images import ImageReader, StartImages
from server.uploads import UploadStore
from server.watch_metrics import WatchMetrics
from server.worker import Worker
from worldmodel.catalog import ControlParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """The parts of one application. `control_schemas` maps a control schema's name to its JSON Schema."""

    config: ServerConfig
    worker: Worker
    table: SessionTable
    robots: RobotTable
    metrics: Metrics
    watching: WatchMetrics
    recordings: Recordings
    auth: Authenticator
    uploads: UploadStore
    start_images: StartImages
    images: ImageReader
    clock: Clock
    parse_control: ControlParser
    control_schemas: Mapping[str, object]

    def say_goodbye(self) -> None:
        """Tell every client that the server ends and close its socket; nothing is started any more."""
        self.table.say_goodbye()
        self.robots.say_goodbye()
