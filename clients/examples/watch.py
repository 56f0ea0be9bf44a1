"""Watch somebody else's session: `python -m clients.examples.watch URL WATCH_TOKEN [FILE] [--token TOKEN]`.

The owner finds the watch token in `session.started`; the page offers it as a link. With a file, what was seen is
written as MP4. A slow spectator misses chunks and never slows the owner.
"""

from __future__ import annotations

import contextlib
import sys

from clients.examples.command import arguments_of, run
from clients.python import Mp4Writer, watch


def main(url: str, watch_token: str, path: str | None = None, token: str | None = None) -> None:
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(watch(url, watch_token=watch_token, token=token))
        film = None if path is None else stack.enter_context(Mp4Writer(path))
        print(
            f"watching {world.session.session_id}: {world.session.model}, {world.session.width}x{world.session.height}"
        )
        for chunk in world.chunks():
            applied = [event.event_id for event in chunk.header.applied]
            print(f"run {chunk.run} chunk {chunk.chunk_index}" + (f", events {applied}" if applied else ""))
            if film is not None:
                film.add(chunk)
        print("the session is over")


if __name__ == "__main__":
    url, watch_token, path, token = arguments_of(__doc__, "URL", "WATCH_TOKEN", optional=[("FILE", None)])
    sys.exit(run(lambda: main(url, watch_token, path, token)))
