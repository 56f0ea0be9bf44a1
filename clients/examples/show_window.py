"""Walk through a world in a window: `python -m clients.examples.show_window [URL] [--token TOKEN]`.

W A S D walk, I J K L look, Esc ends.
"""

from __future__ import annotations

import sys

from clients.examples.command import URL, arguments_of, run
from clients.examples.window import pressed_keys, walk

if __name__ == "__main__":
    url, token = arguments_of(__doc__, optional=[("URL", URL)])
    sys.exit(run(lambda: walk(url, lambda: pressed_keys("wasdijkl"), token=token)))
