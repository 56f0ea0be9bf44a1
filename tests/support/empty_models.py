"""Random models laid out without memory, each once: at full size that takes a second, and no test changes them."""

from __future__ import annotations

from functools import cache

import pytest

from worldmodel.checkpoint.component import Checkpoint
from worldmodel.checkpoint.random_checkpoint import is_random
from worldmodel.lingbot import empty_model
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import EmptyModel

USERS = ("worldmodel.lingbot.inspection", "worldmodel.tools.doctor_needs", "worldmodel.tools.doctor_offload")


@cache
def _laid_out(name: str, options: LingBotOptions) -> EmptyModel:
    return empty_model.build_empty(empty_model.open_any(name), options)


def lay_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `inspect` and `doctor` share the modules of random checkpoints; those of folders are laid out every time."""

    def build(checkpoint: Checkpoint, options: LingBotOptions) -> EmptyModel:
        if is_random(checkpoint.name):
            return _laid_out(checkpoint.name, options)
        return empty_model.build_empty(checkpoint, options)

    for user in USERS:
        monkeypatch.setattr(f"{user}.build_empty", build)
