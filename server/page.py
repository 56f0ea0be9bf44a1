"""The browser page: static files of the `clients/browser` folder, found as package data and never imported."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from server.rest_requests import context_of
from worldmodel import catalog
from worldmodel.catalog import ModelKind

INDEX = {ModelKind.WORLD: "index.html", ModelKind.ROBOT: "robot.html"}
"""A world is steered here; of a robot server the page shows what its robots do."""

MIME_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
"""What is served; anything else in the folder is not. Not the system's table, which differs between machines."""

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' data: blob:; media-src 'self' blob:; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

router = APIRouter(include_in_schema=False)


def page_folder() -> Path:
    return Path(str(files("clients") / "browser"))


@router.head("/")
@router.get("/")
async def index(request: Request) -> FileResponse:
    model = context_of(request).config.model.name
    return _file(INDEX[catalog.lookup(model).kind])


@router.head("/static/{path:path}")
@router.get("/static/{path:path}")
async def static(path: str) -> FileResponse:
    return _file(path)


def _file(path: str) -> FileResponse:
    """Return a file inside the folder. Raises 404 for anything else, also through links out of it."""
    folder = page_folder().resolve()
    try:
        found = (folder / path).resolve()
        exists = found.is_relative_to(folder) and found.suffix in MIME_TYPES and found.is_file()
    except (OSError, ValueError):
        exists = False
    if not exists:
        raise HTTPException(404)
    return FileResponse(found, media_type=MIME_TYPES[found.suffix], headers=HEADERS)
