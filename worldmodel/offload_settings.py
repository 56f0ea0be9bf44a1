"""What a configuration may say about weights that do not fit the device: the section `[offload]`. Torch-free.

It is the same object in the configuration and in the first message to a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """Where weights are and how they travel; the last four settings and `device_bytes` count for any weights.

    `host`: the memory of streamed weights. `transfer`: from page-locked memory at the speed of the link, or through
    small staging buffers. `on_unavailable`: what to do where one of the two can't be had: stop the start, or take
    ordinary memory and staging instead. `resident_bytes`: weights of layers that stay on the device, buffers included;
    None for what sessions leave of it. `device_bytes` bounds everything the worker takes of its device, None by what is
    free. `registered_bytes` bounds page-locked memory, `registration_timeout_s` the wait for the driver.
    `cache_folder` belongs to `host = "runtime_cache"`; an entry is checked as `cache_validation` says and waited for
    `cache_lock_timeout_s`; above `cache_max_bytes` the entries used longest ago are deleted. `vae`: "parked" keeps its
    weights on the host between uses. `camera_modulation`: "per_layer" computes the camera's scales and shifts where
    they are needed instead of keeping those of all layers for a chunk. `decode`: "per_latent_frame" decodes a chunk in
    parts. Both take less memory and more time; the second may round otherwise.
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
    cache_lock_timeout_s: float = 1800.0
    vae: str = "resident"
    camera_modulation: str = "per_chunk"
    decode: str = "whole_chunk"

    def __post_init__(self) -> None:
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
        for name in ("resident_bytes", "device_bytes", "registered_bytes", "cache_max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"offload.{name}: expected bytes from 0, got {value}")
        for name in ("registration_timeout_s", "cache_lock_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"offload.{name}: expected seconds above 0, got {getattr(self, name)}")
        if self.host == "runtime_cache" and not self.cache_folder.startswith("/"):
            raise ValueError(
                f"offload.cache_folder: expected an absolute path with host 'runtime_cache', got {self.cache_folder!r}"
            )

    @property
    def streams(self) -> bool:
        return self.weights == "streamed"

    @property
    def falls_back(self) -> bool:
        return self.on_unavailable == "ordinary"
