"""Start images: kept in their file form until a session needs pixels, decoded in threads, bounded before decoding.

PNG, JPEG and WebP only. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
from collections import OrderedDict
from dataclasses import dataclass

from PIL import Image, ImageOps, UnidentifiedImageError

from server.config import LimitsSection
from server.errors import BadInput, ErrorCode, UnknownId
from server.ids import UploadId, new_upload_id
from worldmodel.messages import ImageSize

FORMATS = ("PNG", "JPEG", "WEBP")
MIME_TYPES = ("image/png", "image/jpeg", "image/webp")

_DAMAGED = (OSError, ValueError, SyntaxError, EOFError, MemoryError, IndexError, KeyError, TypeError, struct.error)
"""Pillow's parsers raise all of these for damaged files; `struct.error` comes from EXIF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawImage:
    """uint8 RGB pixels, row by row."""

    size: ImageSize
    pixels: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StartImage:
    """A start image as a file, decoded, and the SHA-256 of the file. `name`: under which it is on offer, if it is."""

    file: bytes
    raw: RawImage
    sha256: str
    name: str | None = None


class UploadStore:
    """Keeps uploaded images for sessions to come, at most `max_uploads`.

    One too many takes the place of the one that its owner used least recently, or anybody if the owner has no other. An
    image may be used by any number of sessions of the owner who sent it.
    """

    def __init__(self, max_uploads: int) -> None:
        self._max_uploads = max_uploads
        self._images: OrderedDict[UploadId, tuple[str | None, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    def add(self, image: bytes, *, owner: str | None) -> UploadId:
        upload_id = new_upload_id()
        self._images[upload_id] = (owner, image)
        while len(self._images) > self._max_uploads:
            del self._images[self._least_needed(owner, but=upload_id)]
        return upload_id

    def _least_needed(self, owner: str | None, *, but: UploadId) -> UploadId:
        own = (each for each, (whose, _) in self._images.items() if whose == owner and each != but)
        return next(own, next(iter(self._images)))

    def get(self, upload_id: str, *, owner: str | None, field: str) -> bytes:
        """Return the image's file bytes. Raises `UnknownId`, also for another owner's upload."""
        key = UploadId(upload_id)
        entry = self._images.get(key)
        if entry is None or entry[0] != owner:
            raise UnknownId(
                ErrorCode.UNKNOWN_UPLOAD, f"there is no upload {upload_id[:64]!r}, or no longer", field=field
            )
        self._images.move_to_end(key)
        return entry[1]


def decode_base64(text: str, *, limits: LimitsSection, field: str) -> bytes:
    """Decode a base64 image; an optional `data:` prefix is accepted."""
    body = text.partition(",")[2] if text.startswith("data:") else text
    check_image_bytes(len(body) * 3 // 4 - body[-2:].count("="), limits=limits, field=field)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInput(ErrorCode.BAD_IMAGE, f"{field} is not base64: {error}", field=field) from error


def check_image_bytes(num_bytes: int, *, limits: LimitsSection, field: str) -> None:
    if num_bytes > limits.max_image_bytes:
        raise BadInput(
            ErrorCode.BAD_IMAGE,
            f"the image has {num_bytes} bytes: expected at most {limits.max_image_bytes} (limits.max_image_bytes)",
            field=field,
        )


def decode_image(image: bytes, *, limits: LimitsSection, field: str) -> RawImage:
    """Decode an image file to upright RGB; blocks, so call it in a thread.

    Raises `BadInput` with code `bad_image`, before any pixel is decoded if the size is the reason.
    """
    check_image_bytes(len(image), limits=limits, field=field)
    # Pillow has a bound of its own, which is not the configured one and does not say how large the image is.
    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            _check_pixels(opened.width, opened.height, limits=limits, field=field)
            upright = ImageOps.exif_transpose(opened)
            assert upright is not None
            rgb = _to_rgb(upright)
    except UnidentifiedImageError as error:
        raise BadInput(ErrorCode.BAD_IMAGE, "the image is no PNG, JPEG or WebP", field=field) from error
    except _DAMAGED as error:
        raise BadInput(ErrorCode.BAD_IMAGE, "the image is damaged and can't be decoded", field=field) from error
    return RawImage(size=ImageSize(width=rgb.width, height=rgb.height), pixels=rgb.tobytes())


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB: 16-bit grey keeps its upper byte, transparent parts are laid on white."""
    if image.mode.startswith("I;16"):
        return image.point(lambda value: value / 256, "L").convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    transparent = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), transparent).convert("RGB")


def _check_pixels(width: int, height: int, *, limits: LimitsSection, field: str) -> None:
    if width * height > limits.max_image_pixels:
        raise BadInput(
            ErrorCode.BAD_IMAGE,
            f"the image is {width}x{height}, {width * height} pixels: expected at most {limits.max_image_pixels} "
            "(limits.max_image_pixels)",
            field=field,
        )
