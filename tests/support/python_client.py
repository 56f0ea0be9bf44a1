"""What tests of the Python client share."""

from __future__ import annotations

import asyncio

from clients.python import Chunk, WorldClient

PROMPT = "a small town, day"


class FakeTime:
    """A clock that only moves when someone sleeps; sleeping takes no time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


async def take(world: WorldClient, count: int) -> list[Chunk]:
    taken: list[Chunk] = []
    if count:
        async for chunk in world.chunks():
            taken.append(chunk)
            if len(taken) == count:
                break
    return taken


def indices(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.run, chunk.chunk_index) for chunk in chunks]
