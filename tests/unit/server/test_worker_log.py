"""A worker that was lost and is back: two lines in the log."""

from __future__ import annotations

import logging

import pytest

from server.worker_log import WorkerLog
from tests.support.server_worker import ScriptedWorker
from worldmodel.messages import LoadStage


def test_a_loss_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="server")
    worker = ScriptedWorker()
    worker.subscribe(WorkerLog(worker).note)
    worker.progresses(LoadStage.READY, 1.0)
    assert caplog.messages == []
    worker.dies("the worker process was ended by SIGKILL")
    worker.progresses(LoadStage.SPAWN, 0.0)
    worker.is_back()
    worker.progresses(LoadStage.READY, 1.0)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the worker is restarting: the worker process was ended by SIGKILL"),
        ("INFO", f"the worker is ready again (generation {worker.generation})"),
    ]
