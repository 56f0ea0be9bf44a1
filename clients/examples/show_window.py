"""Walk through a world in a window: `python -m clients.examples.show_window [URL]`.

W A S D walk, I J K L look, Esc ends.
"""

from __future__ import annotations

import asyncio
import sys

from clients.examples.window import pressed_keys, walk

if __name__ == "__main__":
    asyncio.run(walk(sys.argv[1] if len(sys.argv) > 1 else "ws://127.0.0.1:8000", lambda: pressed_keys("wasdijkl")))
