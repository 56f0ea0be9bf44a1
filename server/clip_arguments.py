"""What the verbs that make clips take on the command line, checked before a model is loaded for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from server.config import ServerConfig, StartImageConfig
from server.config_values import ConfigError
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
        targets = {"--out": self.out, "--latents": self.latents}
        paths = [path for path in targets.values() if path is not None]
        if not paths:
            raise ConfigError("expected --out or --latents, or nothing would be left of the clip")
        for flag, path in targets.items():
            if path is not None:
                _check_target(flag, path)
        if self.out is not None and self.out.suffix.lower() != ".mp4":
            raise ConfigError(f"--out: {self.out}: expected a name that ends in .mp4, which is what it will be")
        if len({path.resolve() for path in paths}) < len(paths):
            raise ConfigError(f"--out and --latents: expected two files, got {paths[0]} twice")


def partial_of(path: Path) -> Path:
    """Return the name that a file has until it is whole: one of this process, as another may make the same file."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _check_target(flag: str, path: Path) -> None:
    """Raise `ConfigError` if a file can't be made there. One is made to see it: nothing else tells for every disk."""
    try:
        problem = _problem_of(path)
    except (OSError, ValueError) as error:
        problem = f"cannot be written: {getattr(error, 'strerror', None) or error}"
    if problem is not None:
        raise ConfigError(f"{flag}: {path}: {problem}")


def _problem_of(path: Path) -> str | None:
    if path.is_dir():
        return "expected the name of a file, got a folder"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    if path.exists() and not path.is_file():
        return "expected a new or a regular file"
    partial = partial_of(path)
    partial.open("wb").close()
    partial.unlink()
    return None


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
