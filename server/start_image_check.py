"""Decode every start image on offer once, so that a missing or damaged one is found by who serves, not by who plays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from server.config import LimitsSection, ServerConfig
from server.config_values import ConfigError
from server.errors import BadInput
from server.uploads import check_image_bytes, decode_image
from worldmodel.clips import RANDOM_SCHEME


def check_start_images(config: ServerConfig) -> None:
    """Raise `ConfigError` for the first start image that cannot be shown; blocks, so call it in a thread."""
    for key, problem in start_image_problems(config):
        raise ConfigError(f"{key}: {problem}", key=key)


def start_image_problems(config: ServerConfig) -> Iterator[tuple[str, str]]:
    """Yield key and reason of each start image that cannot be shown. One image at a time is in memory.

    Where the whole checkpoint is missing nothing is said: that is for the worker, which knows what belongs into it.
    """
    checkpoint = config.checkpoint_path
    if not checkpoint.is_dir() and not config.model.checkpoint.startswith(RANDOM_SCHEME):
        return
    for index, image in enumerate(config.model.start_images):
        problem = _problem_of(checkpoint / image.file, config.limits)
        if problem is not None:
            yield f"model.start_images[{index}].file", f"{checkpoint / image.file}: {problem}"


def _problem_of(path: Path, limits: LimitsSection) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if not path.is_file():
            return "expected a PNG, JPEG or WebP file"
        check_image_bytes(num_bytes, limits=limits, field="file")
        decode_image(path.read_bytes(), limits=limits, field="file")
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    except BadInput as error:
        return error.message
    return None
