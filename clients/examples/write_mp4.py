"""Walk through a world for some chunks and write what was seen.

`python -m clients.examples.write_mp4 [URL] [FILE] [--token TOKEN]`
"""

from __future__ import annotations

import sys

from clients.examples.command import URL, arguments_of, run
from clients.python import WorldClient


async def main(url: str = URL, path: str = "walk.mp4", token: str | None = None) -> None:
    async with WorldClient(url, token=token, pacing="free") as world:
        await world.hold("w")
        receipt = await world.tap("l")
        num_chunks = await world.save_mp4(path, num_chunks=8)
        turned = await receipt
        print(f"{num_chunks} chunks in {path}; the turn is in chunk {turned.chunk_index}")


if __name__ == "__main__":
    url, path, token = arguments_of(__doc__, optional=[("URL", URL), ("FILE", "walk.mp4")])
    sys.exit(run(lambda: main(url, path, token)))
