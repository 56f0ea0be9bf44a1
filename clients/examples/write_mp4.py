"""Walk through a world for some chunks and write what was seen: `python -m clients.examples.write_mp4 [URL] [FILE]`."""

from __future__ import annotations

import argparse
import asyncio

from clients.python import WorldClient


async def main(url: str = "ws://127.0.0.1:8000", path: str = "walk.mp4") -> None:
    async with WorldClient(url, pacing="free") as world:
        await world.hold("w")
        receipt = await world.tap("l")
        num_chunks = await world.save_mp4(path, num_chunks=8)
        turned = await receipt
        print(f"{num_chunks} chunks in {path}; the turn is in chunk {turned.chunk_index}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("url", nargs="?", default="ws://127.0.0.1:8000", metavar="URL")
    arguments.add_argument("path", nargs="?", default="walk.mp4", metavar="FILE")
    asyncio.run(main(**vars(arguments.parse_args())))
