"""Reading start images: one large picture at a time."""

from __future__ import annotations

import asyncio
import base64
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from server import start_images
from server.config import LimitsSection, StartImageConfig
from server.errors import BadInput, UnknownId
from server.start_images import ImageReader, StartImages
from server.uploads import RawImage, UploadStore
from server.wire.messages import ImageBase64, ImageName
from tests.support.server_client import fake_config, png
from worldmodel.messages import ImageSize


def reader() -> ImageReader:
    config = fake_config()
    return ImageReader(StartImages(config.model, config.checkpoint_path), UploadStore(4), LimitsSection())


async def test_one_image_is_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    others = threading.Barrier(2)
    met: list[bool] = []

    def decode(image: bytes, *, limits: LimitsSection, field: str) -> RawImage:
        try:
            others.wait(timeout=0.05)
        except threading.BrokenBarrierError:
            others.reset()
            return RawImage(size=ImageSize(width=1, height=1), pixels=bytes(3))
        met.append(True)
        raise AssertionError("two at a time")

    monkeypatch.setattr(start_images, "decode_image", decode)
    images = reader()
    await asyncio.gather(*(images.decode(b"", field="image") for _ in range(3)))
    assert met == []


async def test_an_image_that_is_on_offer_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "day.png").write_bytes(png(3, 5))
    offered = (StartImageConfig(name="day", file="day.png", prompt="a town"),)
    model = replace(fake_config().model, start_images=offered)
    images = ImageReader(StartImages(model, tmp_path), UploadStore(4), LimitsSection())
    assert (await images.read(ImageName(name="day"), owner=None)).name == "day"
    sent = ImageBase64(base64=base64.b64encode(png(3, 5)).decode())
    assert (await images.read(sent, owner=None)).name is None


async def test_a_bad_image_does_not_keep_the_next_from_its_turn() -> None:
    images = reader()
    with pytest.raises(BadInput):
        await images.decode(b"no image", field="image")
    assert (await images.decode(png(3, 5), field="image")).size == ImageSize(width=3, height=5)


@pytest.mark.parametrize(("names", "text"), [(("day", "night"), "on offer: day, night"), ((), "none is on offer")])
async def test_an_unknown_name_is_told_what_there_is(names: tuple[str, ...], text: str) -> None:
    config = fake_config()
    offers = tuple(StartImageConfig(name=name, file=f"{name}.png", prompt="a town") for name in names)
    images = StartImages(replace(config.model, start_images=offers), config.checkpoint_path)
    with pytest.raises(UnknownId) as caught:
        await images.read("mars")
    assert caught.value.message == f"there is no start image 'mars'; {text}"
