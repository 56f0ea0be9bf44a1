"""What the server serves for the page beside its files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import httpx
from fastapi import FastAPI

from server import rest


async def test_the_layout_of_a_world_is_that_of_its_checkpoint_or_null(tmp_path: Path) -> None:
    app = FastAPI()
    app.include_router(rest.router)
    app.state.context = SimpleNamespace(config=SimpleNamespace(checkpoint_path=tmp_path))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as client:
        assert (await client.get("/v1/layout")).json() is None
        (tmp_path / "layout.json").write_text('{"period": 12.0}')
        assert (await client.get("/v1/layout")).json() == {"period": 12.0}
