"""`worldserve` whose worker has the stored noise of golden case 9: `-m tests.support.golden_noise_command VERB ...`."""

from __future__ import annotations

import functools

from server import cli, clip
from server.worker_client import WorkerClient

WORKER = "tests.support.golden_noise_worker"


def main() -> int:
    clip.WorkerClient = functools.partial(WorkerClient, module=WORKER)  # type: ignore[misc, assignment]
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
