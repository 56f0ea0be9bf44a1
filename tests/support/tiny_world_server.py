"""`worldserve serve CONFIG` with the golden model in its worker: `python -m tests.support.tiny_world_server CONFIG`."""

from __future__ import annotations

import sys
from pathlib import Path

from fastapi import FastAPI

from server import serving
from server.app import create_app, start_message
from server.config import ServerConfig
from server.config_reading import load_config
from server.worker_client import WorkerClient, WorkerPolicy

WORKER = "tests.support.tiny_world_worker"


def create_tiny_app(config: ServerConfig) -> FastAPI:
    worker = WorkerClient(start_message(config), WorkerPolicy.from_config(config), module=WORKER)
    return create_app(config, worker=worker)


def main(path: str) -> None:
    serving.create_app = create_tiny_app  # type: ignore[assignment]
    serving.serve(load_config(Path(path), environment={}))


if __name__ == "__main__":
    main(sys.argv[1])
