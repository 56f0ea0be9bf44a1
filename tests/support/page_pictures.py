"""Take the pictures of the page in the documents: `python tests/support/page_pictures.py docs/images`.

They show the demo world as it is served on this machine, the numbers included.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.browser_chromium import WatchedPage, chromium
from tests.support.browser_demo import demo_server

JPEG_QUALITY = 88
MAX_BYTES = 200_000
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def save(page: WatchedPage, path: Path) -> None:
    page.page.mouse.move(640, 300)
    page.page.wait_for_timeout(400)
    buffer = io.BytesIO()
    Image.open(io.BytesIO(page.page.screenshot())).convert("RGB").save(
        buffer, "JPEG", quality=JPEG_QUALITY, optimize=True
    )
    content = buffer.getvalue()
    if len(content) > MAX_BYTES:
        raise SystemExit(f"{path}: expected at most {MAX_BYTES} bytes, got {len(content)}")
    path.write_bytes(content)
    print(f"{path}: {len(content)} bytes")


def walk(page: WatchedPage, *keys: str) -> None:
    """Hold keys one after the other, each until a frame shows it and a chunk more; the last stays down."""
    page.wait_for_picture()
    for key in keys:
        page.page.keyboard.down(key)
        page.page.wait_for_selector(f"[data-action={key}].applied")
        page.wait("app.world.shown.chunkIndex > argument", page.read("app.world.shown.chunkIndex"))


def choose(page: WatchedPage, image: str) -> None:
    """Begin again from another start image."""
    page.wait_for_picture()
    page.page.click("#worlds")
    page.page.click(f"#tiles button:has-text('{image}')")
    page.page.click("#begin")
    page.wait("app.world.walk.startImage === argument && app.world.shown.chunkIndex >= 1", image)


def open_page(browser: Browser, url: str, **context: Any) -> WatchedPage:
    page = WatchedPage(browser, url, **context)
    page.page.set_default_timeout(120_000)
    return page


def take(browser: Browser, url: str, folder: Path) -> None:
    page = open_page(browser, url, color_scheme="dark")
    page.page.wait_for_selector("#loading-stages .done >> nth=2")
    save(page, folder / "page_loading.jpg")
    choose(page, "desert")
    walk(page, "w")
    save(page, folder / "page.jpg")
    page.close()
    page = open_page(browser, url, color_scheme="light")
    page.wait_for_picture()
    page.page.click("#worlds")
    save(page, folder / "page_worlds.jpg")
    page.close()
    page = open_page(browser, url, color_scheme="light", **PHONE)
    walk(page, "w")
    save(page, folder / "page_phone.jpg")
    page.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    with (
        tempfile.TemporaryDirectory() as logs,
        chromium() as browser,
        demo_server(Path(logs) / "server.log", wait=False) as url,
    ):
        take(browser, url, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
