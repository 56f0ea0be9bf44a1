"""A start image for servers that offer none."""

from __future__ import annotations

import io

from PIL import Image

PROMPT = "a quiet street"


def png(width: int = 128, height: int = 96) -> bytes:
    """Return a PNG of a sky above a ground."""
    picture = Image.new("RGB", (width, height), (120, 170, 230))
    picture.paste((110, 105, 95), (0, height // 2, width, height))
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()
