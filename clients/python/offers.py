"""What a server offers to begin with, for a client that names no image or no prompt of its own."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from dataclasses import dataclass

from pydantic import ValidationError

from clients.python.errors import BadServerMessage, ConnectFailed
from clients.python.link import server_url
from server.wire.rest import RestError, ServerInfo

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A start image by name, and the prompt that suits it."""

    image: str
    prompt: str


async def read_beginning(url: str, *, token: str | None, image: str | None) -> Beginning:
    """Ask the server of a world's URL for the start image `image`, or for the one it begins with.

    Raises `ConnectFailed` if the server does not answer or does not offer it, and `ValueError` for another URL.
    """
    info = await asyncio.to_thread(_read_info, info_url(url), token)
    wanted = image if image is not None else info.begin_image
    offers = {offer.name: offer for offer in info.start_images}
    offer = offers.get(wanted) if wanted is not None else next(iter(offers.values()), None)
    if offer is None:
        known = ", ".join(offers) or "none"
        missing = "no start image" if wanted is None else f"no start image {wanted!r}"
        raise ConnectFailed(f"the server offers {missing} (on offer: {known}): give both image and prompt")
    return Beginning(image=offer.name, prompt=offer.prompt)


def info_url(url: str) -> str:
    """Return where the server of a world tells of itself. Raises `ValueError`."""
    return f"{server_url(url)}/v1/info"


def _read_info(url: str, token: str | None) -> ServerInfo:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        # No proxy: the WebSocket goes straight to the same address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as response:
            body = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise ConnectFailed(f"{url} could not be read: {_refusal(error)}") from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConnectFailed(f"{url} could not be read: {reason}") from error
    try:
        return ServerInfo.model_validate_json(body, extra="ignore")
    except ValidationError as error:
        raise BadServerMessage(f"{url} is no worldserve information: {error}") from error


def _refusal(error: urllib.error.HTTPError) -> str:
    """Return the server's own words where there are some."""
    try:
        said = RestError.model_validate_json(error.read(), extra="ignore").error
    except ValidationError:
        return str(error)
    return f"HTTP {error.code}: {said.code}: {said.message}"
