"""Start images: what is decoded, what is refused before it costs anything, and who may use an upload."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from server.config import LimitsSection
from server.errors import BadInput, ErrorCode, UnknownId
from server.uploads import UploadStore, decode_base64, decode_image

LIMITS = LimitsSection(max_image_bytes=100_000, max_image_pixels=10_000)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def red(mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.new("RGB", size, (255, 0, 0)).convert(mode)


def refusal(image: bytes, limits: LimitsSection = LIMITS) -> BadInput:
    with pytest.raises(BadInput) as caught:
        decode_image(image, limits=limits, field="image.base64")
    assert (caught.value.code, caught.value.field) == (ErrorCode.BAD_IMAGE, "image.base64")
    return caught.value


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_the_three_formats_become_rgb(format: str) -> None:
    raw = decode_image(encoded(red(), format), limits=LIMITS, field="image")
    assert (raw.size.width, raw.size.height) == (6, 4)
    assert len(raw.pixels) == 6 * 4 * 3
    assert raw.pixels[0] > 240
    assert max(raw.pixels[1], raw.pixels[2]) < 20


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "L", "1"])
def test_other_colour_modes_become_rgb(mode: str) -> None:
    raw = decode_image(encoded(red(mode)), limits=LIMITS, field="image")
    assert len(raw.pixels) == 6 * 4 * 3


def test_a_photo_taken_sideways_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = decode_image(encoded(red(), "JPEG", exif=exif), limits=LIMITS, field="image")
    assert (raw.size.width, raw.size.height) == (4, 6)


@pytest.mark.parametrize("format", ["GIF", "BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(format: str) -> None:
    assert "PNG, JPEG or WebP" in refusal(encoded(red(size=(16, 16)), format)).message


@pytest.mark.parametrize("image", [b"", b"\x89PNG\r\n\x1a\n", b"not an image", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP"])
def test_what_is_no_image_is_refused(image: bytes) -> None:
    refusal(image)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_truncated_images_are_refused(format: str) -> None:
    whole = encoded(Image.effect_noise((60, 60), 90).convert("RGB"), format)
    assert decode_image(whole, limits=LIMITS, field="image")
    refusal(whole[: len(whole) // 2])


def test_too_many_bytes_are_refused_with_the_key() -> None:
    assert "limits.max_image_bytes" in refusal(b"\x89PNG" + b"\0" * 100_000).message


def test_too_many_pixels_are_refused_with_the_key() -> None:
    assert "101x100, 10100 pixels" in refusal(encoded(red(size=(101, 100)))).message


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost nothing."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"\0" * 64)) + part(b"IEND", b"")


@pytest.mark.parametrize("size", [(8000, 8000), (10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_bombs_are_refused_from_their_header(size: tuple[int, int]) -> None:
    width, height = size
    text = f"the image is {width}x{height}, {width * height} pixels: expected at most 10000 (limits.max_image_pixels)"
    assert refusal(png_header(*size)).message == text


def test_the_configured_bound_is_the_only_one() -> None:
    """Pillow's own one is 179 million pixels."""
    limits = LimitsSection(max_image_pixels=200_000_000)
    with pytest.raises(BadInput, match="damaged"):
        decode_image(png_header(14_000, 14_000), limits=limits, field="image")


@given(noise=st.binary(max_size=60), cut=st.integers(0, 120), format=st.sampled_from(["PNG", "JPEG", "WEBP"]))
@settings(max_examples=120, deadline=None)
def test_damaged_files_give_pixels_or_one_clear_error(noise: bytes, cut: int, format: str) -> None:
    whole = encoded(red(size=(20, 20)), format)
    damaged = whole[:cut] + noise + whole[cut + len(noise) :]
    # Anything but pixels or `BadInput` fails the test.
    with contextlib.suppress(BadInput):
        raw = decode_image(damaged, limits=LIMITS, field="image")
        assert len(raw.pixels) == raw.size.width * raw.size.height * 3


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_an_orientation_beside_damaged_exif_is_refused(format: str) -> None:
    """Standing a picture upright writes its EXIF anew, which fails for a strip length (tag 0x117) that is text."""
    orientation = struct.pack("<HHII", 0x0112, 3, 1, 6)
    strip_length = struct.pack("<HHII", 0x0117, 7, 12, 38)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + orientation + strip_length + bytes(4) + b"not a length"
    assert "damaged" in refusal(encoded(red(), format, exif=exif)).message


# ---------------------------------------------------------------- base64


def test_base64_with_and_without_a_data_prefix() -> None:
    text = base64.b64encode(b"image").decode()
    assert decode_base64(text, limits=LIMITS, field="f") == b"image"
    assert decode_base64(f"data:image/png;base64,{text}", limits=LIMITS, field="f") == b"image"


@pytest.mark.parametrize("text", ["?", "abc", "é", "AAAA AAAA"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        decode_base64(text, limits=LIMITS, field="image.base64")
    assert caught.value.code is ErrorCode.BAD_IMAGE


def test_base64_is_bounded_exactly() -> None:
    limits = LimitsSection(max_image_bytes=10)
    assert decode_base64(base64.b64encode(b"x" * 10).decode(), limits=limits, field="f") == b"x" * 10
    with pytest.raises(BadInput, match="has 11 bytes"):
        decode_base64(base64.b64encode(b"x" * 11).decode(), limits=limits, field="f")


# ---------------------------------------------------------------- store


def test_uploads_belong_to_their_owner() -> None:
    store = UploadStore(4)
    upload_id = store.add(b"image", owner="a")
    assert store.get(upload_id, owner="a", field="f") == b"image"
    for owner in (None, "b"):
        with pytest.raises(UnknownId) as caught:
            store.get(upload_id, owner=owner, field="image.upload_id")
        assert (caught.value.code, caught.value.field) == (ErrorCode.UNKNOWN_UPLOAD, "image.upload_id")


def test_the_least_recently_used_upload_goes_first() -> None:
    store = UploadStore(2)
    first, second = store.add(b"1", owner=None), store.add(b"2", owner=None)
    store.get(first, owner=None, field="f")
    third = store.add(b"3", owner=None)
    assert len(store) == 2
    assert store.get(first, owner=None, field="f") == b"1"
    assert store.get(third, owner=None, field="f") == b"3"
    with pytest.raises(UnknownId):
        store.get(second, owner=None, field="f")


def test_who_uploads_much_takes_nobody_elses_place() -> None:
    store = UploadStore(3)
    other = store.add(b"other", owner="other")
    own = [store.add(bytes([number]), owner="own") for number in range(9)]
    assert store.get(other, owner="other", field="f") == b"other"
    assert [store.get(upload_id, owner="own", field="f") for upload_id in own[-2:]] == [b"\7", b"\10"]
    newcomer = store.add(b"new", owner="newcomer")
    assert (len(store), store.get(newcomer, owner="newcomer", field="f")) == (3, b"new")


def test_sixteen_bit_grey_keeps_its_upper_byte() -> None:
    ramp = Image.frombytes("I;16", (256, 1), b"".join(struct.pack("<H", value * 257) for value in range(256)))
    raw = decode_image(encoded(ramp), limits=LIMITS, field="image")
    assert raw.pixels[::3] == bytes(range(256))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_parts_are_laid_on_white(mode: str) -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    raw = decode_image(encoded(image.convert(mode), "PNG"), limits=LIMITS, field="image")
    assert raw.pixels == bytes([255] * 3 + [0] * 3)
