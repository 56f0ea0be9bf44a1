"""The real worker with the stored noise of golden case 9: run like `worldmodel.worker`, all else is real."""

from __future__ import annotations

from dataclasses import replace

from worldmodel import catalog, worker
from worldmodel.messages import StartWorker

MODEL = "lingbot_world_v2"


def create_adapter(start: StartWorker, progress: object) -> object:
    """Load the checkpoint as ever. torch is imported here, as late as in the real worker."""
    from tests.support.lingbot_golden_noise import GivenNoise
    from worldmodel.lingbot import adapter

    adapter._noise_source = lambda options, device, num_draws: GivenNoise(num_steps=num_draws)
    return adapter.create_adapter(start, progress)  # type: ignore[arg-type]


def main() -> int:
    here = f"{__spec__.name}:{create_adapter.__name__}"
    catalog.ENTRIES = tuple(replace(entry, adapter=here) if entry.name == MODEL else entry for entry in catalog.ENTRIES)
    return worker.main()


if __name__ == "__main__":
    raise SystemExit(main())
