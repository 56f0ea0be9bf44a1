"""Start images on offer (by name, from the checkpoint folder) and the reading of all kinds of image references."""

from __future__ import annotations

import asyncio
from pathlib import Path

from server.config import LimitsSection, ModelSection
from server.errors import BadInput, ErrorCode, UnknownId
from server.event_log import image_digest
from server.uploads import RawImage, StartImage, UploadStore, decode_base64, decode_image
from server.wire.messages import ImageBase64, ImageName, ImageReference, ImageUpload
from server.wire.messages import StartImage as StartImageOffer


class StartImages:
    """Find start images by name. A client's name is looked up in the configuration, never in the file system."""

    def __init__(self, model: ModelSection, checkpoint: Path) -> None:
        self._files = {image.name: checkpoint / image.file for image in model.start_images}
        self._prompts = {image.name: image.prompt for image in model.start_images}

    @property
    def offers(self) -> list[StartImageOffer]:
        return [
            StartImageOffer(name=name, prompt=prompt, url=f"/v1/start-images/{name}")
            for name, prompt in self._prompts.items()
        ]

    async def read(self, name: str, *, field: str | None = None) -> bytes:
        """Return an image's file bytes. Raises `UnknownId`."""
        path = self._files.get(name)
        if path is None:
            known = ", ".join(self._files)
            raise UnknownId(
                ErrorCode.UNKNOWN_IMAGE if field else ErrorCode.NOT_FOUND,
                f"there is no start image {name[:64]!r}; {f'on offer: {known}' if known else 'none is on offer'}",
                field=field,
            )
        try:
            return await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise UnknownId(
                ErrorCode.UNKNOWN_IMAGE if field else ErrorCode.NOT_FOUND,
                f"the file of start image {name!r} can't be read",
                field=field,
            ) from error


class ImageReader:
    """Turn an image reference of a client into pixels, in threads.

    One image at a time is decoded: the largest that is allowed takes 120 MB, and a core for most of a second.
    """

    def __init__(self, start_images: StartImages, uploads: UploadStore, limits: LimitsSection) -> None:
        self._start_images = start_images
        self._uploads = uploads
        self._limits = limits
        self._turn = asyncio.Lock()

    async def decode(self, file: bytes, *, field: str) -> RawImage:
        """Decode an image file. Raises `BadInput` that names the field."""
        async with self._turn:
            return await asyncio.to_thread(decode_image, file, limits=self._limits, field=field)

    async def read(self, reference: ImageReference, *, owner: str | None) -> StartImage:
        """Read and decode a start image. Raises `BadInput` or `UnknownId` that name the field."""
        match reference:
            case ImageBase64():
                field = "image.base64"
                file = await asyncio.to_thread(decode_base64, reference.base64, limits=self._limits, field=field)
            case ImageUpload():
                field = "image.upload_id"
                file = self._uploads.get(reference.upload_id, owner=owner, field=field)
            case ImageName():
                field = "image.name"
                file = await self._start_images.read(reference.name, field=field)
        if not file:
            raise BadInput(ErrorCode.BAD_IMAGE, "the image is empty", field=field)
        raw = await self.decode(file, field=field)
        return StartImage(
            file=file,
            raw=raw,
            sha256=await asyncio.to_thread(image_digest, file),
            name=reference.name if isinstance(reference, ImageName) else None,
        )
