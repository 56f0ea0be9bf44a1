"""Walk through a world for some chunks, at least until a turn is in sight, and write what was seen.

`python -m clients.examples.write_mp4 [URL] [FILE] [--token TOKEN]`
"""

from __future__ import annotations

import sys

from clients.examples.command import URL, arguments_of, run
from clients.python import WorldClient


async def main(url: str = URL, path: str = "walk.mp4", token: str | None = None) -> None:
    async with WorldClient(url, token=token, pacing="free") as world, world.recording(path) as writer:
        await world.hold("w")
        receipt = await world.tap("l")
        async for chunk in world.chunks():
            # A model that is quicker than this program has made many chunks before it hears of the turn.
            is_seen = receipt.applied.done() and (await receipt).chunk_index <= chunk.chunk_index
            if is_seen and writer.num_chunks >= 8:
                break
        turned = await receipt
        print(f"{writer.num_chunks} chunks in {path}; the turn is in chunk {turned.chunk_index}")


if __name__ == "__main__":
    url, path, token = arguments_of(__doc__, optional=[("URL", URL), ("FILE", "walk.mp4")])
    sys.exit(run(lambda: main(url, path, token)))
