"""The configuration tree: every section and setting, its default and what it may be. `config_reading` reads it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from server.config_values import ConfigError, require
from server.package_files import resolve_checkpoint
from worldmodel.offload_settings import OffloadSettings

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
SAME_SESSION = ("refuse", "take_over")
LAST_SHARE = 0.4
"""Share of `server.shutdown_s` for the worker and the disk; clients and requests before them get half of it."""

MAX_FPS = 1000
MAX_PIXELS = 16384
"""Widest picture that the encoder takes."""

MAX_JSON_DEPTH = 200
"""What is parsed and checked by recursion, with room on the stack for who called."""

MAX_CPU_THREADS = 4096

DEFAULT_CPU_THREADS = 8
"""At most, by default: more threads wait for each other on a machine that does other things too, and gain nothing."""

TOKEN = re.compile(r"[A-Za-z0-9._~+/=!#$%&*^|:@?-]+")
"""What a client can send in a header; no brackets and quotes, as of a list that was meant as one."""

DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSection:
    """Sockets and shutdown. No `tokens`: no authentication. No `allowed_origins`: same origin only.

    Tokens have the characters that headers carry; in a flag or a variable they stand with commas between them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tokens: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    shutdown_s: float = 8.0
    log_level: str = "info"
    log_format: str = "text"

    @property
    def last_s(self) -> float:
        """How long the worker and the disk have at the end, at the same time, once clients and requests are gone."""
        return self.shutdown_s * LAST_SHARE

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "server.port", "0 to 65535", self.port)
        require(self.shutdown_s > 0, "server.shutdown_s", "seconds above 0", self.shutdown_s)
        self._check_tokens()
        require(self.log_level in LOG_LEVELS, "server.log_level", f"one of {', '.join(LOG_LEVELS)}", self.log_level)
        formats = f"one of {', '.join(LOG_FORMATS)}"
        require(self.log_format in LOG_FORMATS, "server.log_format", formats, self.log_format)

    def _check_tokens(self) -> None:
        """Refuse what no client could send, such as a list in brackets. The text shows no token."""
        if all(TOKEN.fullmatch(token) for token in self.tokens):
            return
        raise ConfigError(
            "server.tokens: expected tokens of ASCII without blanks, brackets, quotes, semicolons and backslashes; a "
            "flag or a variable has commas between them: t1,t2",
            key="server.tokens",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSection:
    """The session contract. `resume_s = 0` closes at once; `max_session_s` and `idle_s` of None mean no limit.

    A socket that begins nothing within `start_timeout_s` is closed. `max_watchers` bounds a session's spectators;
    0 lets nobody watch.
    """

    resume_s: float = 15.0
    lead_chunks: int = 1
    max_pending_events: int = 64
    retry_rolled_back_ticks: int = 0
    tick_timeout_s: float = 120.0
    request_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    start_timeout_s: float = 30.0
    idle_s: float | None = None
    max_session_s: float | None = None
    max_queued: int = 16
    max_watchers: int = 16
    allow_latents: bool = False

    def __post_init__(self) -> None:
        require(self.resume_s >= 0, "session.resume_s", "seconds from 0", self.resume_s)
        require(self.lead_chunks >= 0, "session.lead_chunks", "a number from 0", self.lead_chunks)
        require(self.max_pending_events >= 1, "session.max_pending_events", "a number from 1", self.max_pending_events)
        require(
            self.retry_rolled_back_ticks in (0, 1),
            "session.retry_rolled_back_ticks",
            "0 or 1",
            self.retry_rolled_back_ticks,
        )
        for name in ("max_queued", "max_watchers"):
            require(getattr(self, name) >= 0, f"session.{name}", "a number from 0", getattr(self, name))
        for name in ("tick_timeout_s", "request_timeout_s", "stall_timeout_s", "start_timeout_s"):
            require(getattr(self, name) > 0, f"session.{name}", "seconds above 0", getattr(self, name))
        for name in ("idle_s", "max_session_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"session.{name}", "seconds above 0", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSection:
    """What a client may send. Each refusal names the key.

    Who sends more than `max_messages_per_second` is refused nothing: the socket is read no faster. A socket that sends
    a message in more than `max_fragments`, or more than `max_control_frames_per_second` pings and pongs, is closed.
    `max_connections` bounds the open WebSockets, `max_connections_per_token` those of one token, `max_bodies_bytes` the
    bodies of all requests that are not answered yet, `body_timeout_s` how long a body may take. `max_json_parts` is how
    many brackets, commas and strings a message may have: it is parsed at once with everybody waiting, and 12 MiB can
    hold six million. A script of an hour, with a key in each latent frame, has half of the default.
    """

    max_message_bytes: int = 12 * 1024 * 1024
    max_events_per_second: float = 240.0
    max_messages_per_second: float = 1000.0
    max_control_frames_per_second: float = 100.0
    max_fragments: int = 1024
    max_connections: int = 512
    max_bodies_bytes: int = 128 * 1024 * 1024
    body_timeout_s: float = 60.0
    max_prompt_chars: int = 2000
    max_json_depth: int = 16
    max_json_parts: int = 200_000
    max_image_bytes: int = 8 * 1024 * 1024
    max_image_pixels: int = 40_000_000
    max_uploads: int = 64
    max_sessions_per_token: int | None = None
    max_connections_per_token: int | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            require(value is None or value > 0, f"limits.{entry.name}", "a number above 0", value)
        depth, most = self.max_json_depth, MAX_JSON_DEPTH
        require(depth <= most, "limits.max_json_depth", f"1 to {most}", depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSection:
    """H.264 settings; clients cannot change them. `encoder_threads` bounds all encoding of the server."""

    crf: int = 20
    preset: str = "veryfast"
    encoder_threads: int = 2

    def __post_init__(self) -> None:
        require(1 <= self.crf <= 51, "media.crf", "1 to 51", self.crf)
        require(self.encoder_threads >= 1, "media.encoder_threads", "a number from 1", self.encoder_threads)
        require(self.preset in PRESETS, "media.preset", f"one of {', '.join(PRESETS)}", self.preset)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSection:
    """Recordings of sessions. An empty `folder` turns them off; `max_bytes` of None means no limit.

    Above `max_bytes` the oldest recordings of ended sessions are deleted.
    """

    folder: str = ""
    max_bytes: int | None = 10 * 1024**3

    def __post_init__(self) -> None:
        require(self.max_bytes is None or self.max_bytes > 0, "recording.max_bytes", "a number above 0", self.max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSection:
    """The worker process. `cpu_threads = None` means cores - 1, from 1 to 8.

    `stop_timeout_s` counts as far as `server.shutdown_s` leaves time for it.
    """

    device: str = "cpu"
    cpu_threads: int | None = None
    start_timeout_s: float = 900.0
    stop_timeout_s: float = 5.0
    restart_backoff_s: float = 0.5
    max_restart_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        threads = self.cpu_threads
        in_range = threads is None or 1 <= threads <= MAX_CPU_THREADS
        require(in_range, "worker.cpu_threads", f"1 to {MAX_CPU_THREADS}", threads)
        require(DEVICE.fullmatch(self.device) is not None, "worker.device", "cpu, cuda or cuda:N", self.device)
        for name in ("start_timeout_s", "stop_timeout_s", "restart_backoff_s", "max_restart_backoff_s"):
            require(getattr(self, name) > 0, f"worker.{name}", "seconds above 0", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSection:
    """Session capacity. `requested_sessions` is an upper bound; memory decides."""

    requested_sessions: int = 4
    gpu_memory_fraction: float = 0.9
    cpu_memory_bytes: int = 2 * 1024**3

    def __post_init__(self) -> None:
        require(self.requested_sessions >= 1, "kvcache.requested_sessions", "a number from 1", self.requested_sessions)
        require(
            0 < self.gpu_memory_fraction <= 1,
            "kvcache.gpu_memory_fraction",
            "above 0, at most 1",
            self.gpu_memory_fraction,
        )
        require(self.cpu_memory_bytes > 0, "kvcache.cpu_memory_bytes", "bytes above 0", self.cpu_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotSection:
    """Robot clients; these values count where a robot model is served.

    A connection that asks for nothing for `idle_s` is closed, a session of the REST interface after `rest_idle_s`; None
    means no limit. `same_session`: whether a second connection that names a session "refuse"s or does "take_over". A
    connection that names more than `max_sessions_per_connection` sessions gives up the one it used longest ago.
    """

    idle_s: float | None = 30.0
    rest_idle_s: float | None = 600.0
    max_message_bytes: int = 64 * 1024 * 1024
    same_session: str = "refuse"
    max_sessions_per_connection: int = 4

    def __post_init__(self) -> None:
        for name in ("idle_s", "rest_idle_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"robot.{name}", "seconds above 0", value)
        for name in ("max_message_bytes", "max_sessions_per_connection"):
            require(getattr(self, name) >= 1, f"robot.{name}", "a number from 1", getattr(self, name))
        policies = f"one of {', '.join(SAME_SESSION)}"
        require(self.same_session in SAME_SESSION, "robot.same_session", policies, self.same_session)


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniSection:
    """Clients of vLLM-Omni's realtime video interface, on worlds.

    `model_names` are accepted in `session.start` beside the model's own name. Where all places are taken, a client
    waits and is told its position; `queue_when_full = false` refuses it, for clients that know no other messages than
    the original ones.
    """

    model_names: tuple[str, ...] = (
        "robbyant/lingbot-world-v2-14b-causal-fast-diffusers",
        "robbyant/lingbot-world-v2-14b-causal-fast",
    )
    queue_when_full: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StartImageConfig:
    """A start image on offer and the prompt that suits it. `file` is relative to the checkpoint folder."""

    name: str
    file: str
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The model and its geometry. `options` is checked by the model's own option parser.

    The page opens `begin_image` at once; None lets the visitor choose. `checkpoint` is a path, or "package:FOLDER" for
    a folder inside an installed package.
    """

    name: str
    checkpoint: str
    width: int
    height: int
    fps: int = 16
    precision: str = "bf16"
    start_images: tuple[StartImageConfig, ...] = ()
    prompts: tuple[str, ...] = ()
    notice: str = ""
    begin_image: str | None = None
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, most in (("width", MAX_PIXELS), ("height", MAX_PIXELS), ("fps", MAX_FPS)):
            require(1 <= getattr(self, name) <= most, f"model.{name}", f"1 to {most}", getattr(self, name))
        names = [image.name for image in self.start_images]
        require(len(set(names)) == len(names), "model.start_images", "unique names", names)
        offered = self.begin_image is None or self.begin_image in names
        require(offered, "model.begin_image", f"one of {', '.join(names) or 'no start images'}", self.begin_image)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything a server process needs, read once. Raises `ConfigError` for sections that contradict each other."""

    model: ModelSection
    server: ServerSection = ServerSection()
    session: SessionSection = SessionSection()
    limits: LimitsSection = LimitsSection()
    media: MediaSection = MediaSection()
    recording: RecordingSection = RecordingSection()
    robot: RobotSection = RobotSection()
    omni: OmniSection = OmniSection()
    worker: WorkerSection = WorkerSection()
    kvcache: KVCacheSection = KVCacheSection()
    offload: OffloadSettings = field(default_factory=OffloadSettings)

    def __post_init__(self) -> None:
        try:
            self.offload.check_model(self.model.name)
        except ValueError as error:
            raise ConfigError(str(error), key=str(error).partition(":")[0]) from error
        start_s = self.worker.start_timeout_s
        bound = f"less than worker.start_timeout_s, {start_s:g}, after which the worker is stopped"
        for name, has_effect in (
            ("cache_lock_timeout_s", self.offload.host == "runtime_cache"),
            ("registration_timeout_s", self.offload.streams and self.offload.transfer == "registered"),
        ):
            wait_s = getattr(self.offload, name)
            require(not has_effect or wait_s < start_s, f"offload.{name}", bound, wait_s)

    @property
    def checkpoint_path(self) -> Path:
        return resolve_checkpoint(self.model.checkpoint)

    @property
    def cpu_threads(self) -> int:
        """Compute threads of the worker; one core stays free for the server, the encoder and the browser."""
        return self.worker.cpu_threads or min(max(1, (os.cpu_count() or 1) - 1), DEFAULT_CPU_THREADS)


SECTIONS: dict[str, type] = {
    "server": ServerSection,
    "session": SessionSection,
    "limits": LimitsSection,
    "media": MediaSection,
    "recording": RecordingSection,
    "robot": RobotSection,
    "omni": OmniSection,
    "worker": WorkerSection,
    "kvcache": KVCacheSection,
    "offload": OffloadSettings,
    "model": ModelSection,
}
