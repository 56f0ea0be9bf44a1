"""A worker process that serves LingBot-World out of the golden weights: all of the real code, in a few milliseconds.

Run like `worldmodel.worker`; only where the model's weights come from differs.
"""

from __future__ import annotations

import os
from dataclasses import replace

from worldmodel import catalog, worker
from worldmodel.messages import StartWorker

MODEL = "lingbot_world_v2"


def create_adapter(start: StartWorker, progress: object) -> object:
    """Build the tiny adapter. torch is imported here, as late as in the real worker."""
    from tests.support.lingbot_tiny import tiny_adapter

    # Its sizes are those of the repository's own set, whichever one golden tests compare with.
    os.environ.pop("WORLDSERVE_GOLDEN_DIR", None)
    return tiny_adapter(sessions=start.requested_sessions, width=start.width)


def main() -> int:
    here = f"{__spec__.name}:{create_adapter.__name__}"
    catalog.ENTRIES = tuple(replace(entry, adapter=here) if entry.name == MODEL else entry for entry in catalog.ENTRIES)
    return worker.main()


if __name__ == "__main__":
    raise SystemExit(main())
