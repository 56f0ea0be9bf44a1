"""What a server says about itself before and while it is measured. Plain HTTP; every wrong address is one sentence."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request

from pydantic import ValidationError

from clients.bench.errors import BenchError
from clients.bench.samples import MemorySample
from clients.python.offers import info_url
from server.wire.rest import ServerInfo

TIMEOUT_S = 10.0
MAX_INFO_BYTES = 8 * 1024 * 1024
MEMORY_EVERY_S = 1.0


def read_info(url: str, token: str | None) -> ServerInfo:
    """Ask a server what it is. Blocks. Raises `BenchError` if nothing of ours answers there."""
    try:
        address = info_url(url)
    except ValueError as error:
        raise BenchError(str(error)) from error
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        # No proxy: the WebSocket goes straight to the same address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(address, headers=headers), timeout=TIMEOUT_S) as answer:
            body = answer.read(MAX_INFO_BYTES)
    except urllib.error.HTTPError as error:
        reason = "it asks for a token: --token" if error.code == 401 else f"it answered {error.code} {error.reason}"
        raise BenchError(f"{address} can't be read: {reason}") from error
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise BenchError(f"no server answers at {address}: {cause}") from error
    try:
        return ServerInfo.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BenchError(f"{address} is no worldserve of this version: {where or 'body'}: {first['msg']}") from error


def require_room(info: ServerInfo, *, url: str, num_sessions: int) -> None:
    """Raise `BenchError` unless the server is ready and has a place for each session now."""
    if not info.ready:
        raise BenchError(f"the server at {url} is not ready: {info.reason}")
    if info.capacity is None:
        raise BenchError(f"the server at {url} does not say how many sessions it has room for")
    free = info.capacity.sessions - info.capacity.resident
    if free < num_sessions:
        raise BenchError(
            f"{num_sessions} sessions were asked for, and the server at {url} has room for {free}: "
            f"{info.capacity.sessions} places (kvcache.requested_sessions, and what memory allows), "
            f"{info.capacity.resident} taken"
        )


def memory_sample(info: ServerInfo) -> MemorySample:
    """Read the memory of the server and its worker from an answer; 0 device bytes mean that there is no device."""
    memory = info.memory
    return MemorySample(
        at_s=time.perf_counter(),
        server_bytes=None if memory is None else memory.server_peak_rss_bytes,
        worker_bytes=None if memory is None else memory.worker_rss_bytes,
        device_bytes=None if memory is None or not memory.device_bytes else memory.device_bytes,
    )


async def watch_memory(url: str, token: str | None, samples: list[MemorySample]) -> None:
    """Append a sample now and then until cancelled, or until the server answers no more."""
    while True:
        try:
            samples.append(memory_sample(await asyncio.to_thread(read_info, url, token)))
        except BenchError:
            # The sessions find out for themselves, and say what happened.
            return
        await asyncio.sleep(MEMORY_EVERY_S)
