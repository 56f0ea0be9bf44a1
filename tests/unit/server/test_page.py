"""What the server serves for the page beside its files."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from server import rest
from server.errors import ServerError

SHIPPED = files("worldmodel") / "data" / "demo_world" / "layout.json"


async def test_the_layout_of_a_world_is_that_of_its_checkpoint_or_null(tmp_path: Path) -> None:
    known = json.loads(SHIPPED.read_bytes())
    async with _client(tmp_path) as client:
        assert (await client.get("/v1/layout")).json() is None
        (tmp_path / "layout.json").write_text(json.dumps(known))
        answer = await client.get("/v1/layout")
    assert answer.json() == known
    assert answer.headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"period": -12.0}, "period: Input should be greater than 0"),
        ({"paths": {"x": [], "z": []}}, "paths.width: Field required"),
        ({"starts": {"day": {"x": 0, "z": 0, "heading_deg": "north"}}}, "starts.day.heading_deg: Input should be"),
    ],
)
async def test_a_layout_that_no_map_can_draw_is_an_error_that_names_the_field(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    (tmp_path / "layout.json").write_text(json.dumps(json.loads(SHIPPED.read_bytes()) | change))
    async with _client(tmp_path) as client:
        with pytest.raises(ServerError, match=re.escape(f"layout.json of the checkpoint: {words}")):
            await client.get("/v1/layout")


async def test_a_layout_that_is_no_object_is_an_error_without_a_field(tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_text("[]")
    async with _client(tmp_path) as client:
        with pytest.raises(ServerError, match=r"layout\.json of the checkpoint: Input should be an object"):
            await client.get("/v1/layout")


def _client(checkpoint: Path) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(rest.router)
    app.state.context = SimpleNamespace(config=SimpleNamespace(checkpoint_path=checkpoint))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page")
