"""Fly a square, without asyncio: `python -m clients.examples.scripted_flight [URL] [FILE] [--token TOKEN]`.

The whole flight is one script: a set of keys for each latent frame, then none. Its receipt names the latent frame in
which it begins, so the film ends with the flight.
"""

from __future__ import annotations

import sys

from clients.examples.command import URL, arguments_of, run
from clients.python import connect

LEG = [["w"]] * 6 + [["w", "l"]] * 3
"""Straight on, then a turn to the right while walking; one entry a latent frame."""

FLIGHT = LEG * 4


def main(url: str = URL, path: str = "flight.mp4", token: str | None = None) -> None:
    with connect(url, token=token) as world, world.recording(path) as film:
        receipt = world.script(FLIGHT)
        for chunk in world.chunks():
            if not receipt.is_settled:
                continue
            begun = receipt.wait()
            flown = (chunk.chunk_index + 1 - begun.chunk_index) * world.session.latent_frames_per_chunk
            if flown - begun.latent_frame >= len(FLIGHT):
                break
        print(f"{film.num_chunks} chunks in {path}; the flight begins in chunk {receipt.wait().chunk_index}")


if __name__ == "__main__":
    url, path, token = arguments_of(__doc__, optional=[("URL", URL), ("FILE", "flight.mp4")])
    sys.exit(run(lambda: main(url, path, token)))
