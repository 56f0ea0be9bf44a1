"""What a configuration may say about weights that do not fit the device: the section `[offload]`. Torch-free.

It is the same object in the configuration and in the first message to a worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

STREAMED_MODELS = ("lingbot_world_v2",)
"""Models whose layer loops ask for the weights they are about to use."""

WEIGHTS = ("resident", "streamed")
HOSTS = ("ordinary", "checkpoint_mmap", "runtime_cache")
TRANSFERS = ("registered", "staged")
ON_UNAVAILABLE = ("stop", "ordinary")
VALIDATIONS = ("fast", "full")
VAE = ("resident", "parked")
CAMERA = ("per_chunk", "per_layer")
DECODE = ("whole_chunk", "per_latent_frame")


FOR_STREAMED = (
    *("host", "transfer", "on_unavailable", "resident_bytes", "device_bytes", "registered_bytes"),
    *("registration_timeout_s", "cache_folder", "cache_max_bytes", "cache_validation", "cache_lock_timeout_s"),
)
"""Settings that do nothing where weights are resident."""

FOR_REGISTERED = ("registered_bytes", "registration_timeout_s")
FOR_CACHE = ("cache_folder", "cache_max_bytes", "cache_validation", "cache_lock_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """Where weights are and how they travel. The last three settings count for any weights, the others for streamed.

    `host`: the memory of streamed weights. `transfer`: from page-locked memory at the speed of the link, or through
    small staging buffers. `on_unavailable`: what to do where one of the two can't be had: stop the start, or take
    ordinary memory and staging instead. `resident_bytes`: weights of layers that stay on the device, buffers included;
    None for what sessions leave of it. `device_bytes` bounds what the worker takes of its device, None by what is free:
    weights, sessions, working memory and an estimate of the CUDA context. `registered_bytes` bounds the page-locked
    memory of streamed layers, not that of a streamed text encoder and a parked VAE; `registration_timeout_s` bounds the
    wait for the driver that locks it. What begins with `cache_` belongs to `host = "runtime_cache"`: an entry is
    checked as `cache_validation` says, who builds or evicts it is waited for `cache_lock_timeout_s`, and above
    `cache_max_bytes` the entries used longest ago are deleted. `vae`: "parked" keeps its weights on the host between
    uses. `camera_modulation`: "per_layer" computes the camera's scales and shifts where
    they are needed instead of keeping those of all layers for a chunk. `decode`: "per_latent_frame" decodes a chunk,
    and encodes its condition, in parts. Each of the three takes less memory and more time; the last one may round
    otherwise.

    A setting that would have no effect is refused. Raises ValueError that begins with the setting's name.
    """

    weights: str = "resident"
    host: str = "ordinary"
    transfer: str = "registered"
    on_unavailable: str = "stop"
    resident_bytes: int | None = None
    device_bytes: int | None = None
    registered_bytes: int | None = None
    registration_timeout_s: float = 120.0
    cache_folder: str = ""
    cache_max_bytes: int | None = None
    cache_validation: str = "fast"
    cache_lock_timeout_s: float = 600.0
    vae: str = "resident"
    camera_modulation: str = "per_chunk"
    decode: str = "whole_chunk"

    def __post_init__(self) -> None:
        self._check_words()
        self._check_numbers()
        self._check_folder()
        self._check_effects()

    def _check_words(self) -> None:
        words = {
            "weights": WEIGHTS,
            "host": HOSTS,
            "transfer": TRANSFERS,
            "on_unavailable": ON_UNAVAILABLE,
            "cache_validation": VALIDATIONS,
            "vae": VAE,
            "camera_modulation": CAMERA,
            "decode": DECODE,
        }
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"offload.{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")

    def _check_numbers(self) -> None:
        for name in ("resident_bytes", "device_bytes", "registered_bytes", "cache_max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"offload.{name}: expected bytes from 0, got {value}")
        for name in ("registration_timeout_s", "cache_lock_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"offload.{name}: expected seconds above 0, got {getattr(self, name)}")

    def _check_folder(self) -> None:
        is_path = self.cache_folder.startswith("/") and "\0" not in self.cache_folder
        if self.host == "runtime_cache" and not is_path:
            raise ValueError(
                f"offload.cache_folder: expected an absolute path with host 'runtime_cache', got {self.cache_folder!r}"
            )

    def _check_effects(self) -> None:
        for names, needed, is_so in (
            (FOR_STREAMED, "weights 'streamed'", self.streams),
            (FOR_REGISTERED, "transfer 'registered'", self.transfer == "registered"),
            (FOR_CACHE, "host 'runtime_cache'", self.host == "runtime_cache"),
        ):
            if not is_so:
                self._require_defaults(names, f"without {needed}")

    def _require_defaults(self, names: Iterable[str], where: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                raise ValueError(f"offload.{name}: has no effect {where}; expected to be left out there, got {value!r}")

    def check_model(self, model: str) -> None:
        """Refuse settings of another model than those that know them. Raises ValueError as the class does."""
        if model in STREAMED_MODELS:
            return
        if self.streams:
            raise ValueError(
                f"offload.weights: expected 'resident' for {model}, only {', '.join(STREAMED_MODELS)} streams"
            )
        self._require_defaults(_DEFAULTS, f"on {model}")

    @property
    def streams(self) -> bool:
        return self.weights == "streamed"

    @property
    def falls_back(self) -> bool:
        return self.on_unavailable == "ordinary"


_DEFAULTS = {each.name: each.default for each in fields(OffloadSettings)}
