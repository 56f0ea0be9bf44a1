"""What the verbs that make clips take on the command line, checked before a model is loaded for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from server.config import ConfigError, ServerConfig, StartImageConfig
from server.errors import ServerError
from server.uploads import RawImage, decode_image
from server.wire.messages import MAX_SAFE_INTEGER
from worldmodel.messages import MediaFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipFiles:
    """Where a clip goes. `out` is an mp4, `latents` a safetensors file; what is None is not made."""

    out: Path | None
    latents: Path | None

    @property
    def outputs(self) -> tuple[MediaFormat, ...]:
        """What the worker must send."""
        video = () if self.out is None else (MediaFormat.YUV420,)
        return video if self.latents is None else (*video, MediaFormat.LATENT)

    def check(self) -> None:
        """Raise `ConfigError` if there is nothing to write, or a file cannot be written where it should be."""
        paths = [path for path in (self.out, self.latents) if path is not None]
        if not paths:
            raise ConfigError("expected --out or --latents, or nothing would be left of the clip")
        for path in paths:
            if not path.parent.is_dir():
                raise ConfigError(f"{path}: the folder {path.parent} does not exist")
            if path.is_dir():
                raise ConfigError(f"{path}: expected the name of a file, got a folder")
            if not os.access(path.parent, os.W_OK):
                raise ConfigError(f"{path}: the folder {path.parent} is not writable")
        if len({path.resolve() for path in paths}) < len(paths):
            raise ConfigError(f"--out and --latents: expected two files, got {paths[0]} twice")


def check_seed(seed: int) -> None:
    """Raise `ConfigError` for a seed that a session could not have either."""
    if not 0 <= seed <= MAX_SAFE_INTEGER:
        raise ConfigError(f"--seed: expected a number from 0 to {MAX_SAFE_INTEGER}, got {seed}")


def read_image(config: ServerConfig, image: str) -> tuple[bytes, StartImageConfig | None]:
    """Read a start image: a name the configuration offers, which is returned too, or a file. Raises `ConfigError`."""
    offered = next((each for each in config.model.start_images if each.name == image), None)
    path = config.checkpoint_path / offered.file if offered else Path(image)
    try:
        return path.read_bytes(), offered
    except OSError as error:
        names = ", ".join(each.name for each in config.model.start_images) or "none"
        reason = error.strerror or str(error)
        raise ConfigError(f"--image: {image!r} is no start image ({names}) and no file: {reason}") from error


def decode(config: ServerConfig, file: bytes, *, what: str) -> RawImage:
    """Decode an image file. Raises `ConfigError` that names `what` it is."""
    try:
        return decode_image(file, limits=config.limits, field="image")
    except ServerError as error:
        raise ConfigError(f"{what}: {error.message}") from error
