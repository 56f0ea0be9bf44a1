"""What a model needs of a checkpoint, whatever its files look like: components by name that fill a module.

Implemented by `diffusers.py` for its layout, by `random_checkpoint.py`, and by the models for layouts of their own,
out of the parts of `stored_component.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from worldmodel.checkpoint.loading import DTypeChoice, NameChoice, Progress
from worldmodel.checkpoint.problems import Problem
from worldmodel.checkpoint.safetensors_header import TensorInfo


class Component(Protocol):
    """One part of a checkpoint. `config` has the keys of the diffusers layout, `subject` names the part in errors.

    `folder` is where its files lie, None if it has none.
    """

    @property
    def subject(self) -> str: ...

    @property
    def class_name(self) -> str: ...

    @property
    def folder(self) -> Path | None: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is stored, by the module's names; empty where tensors are made up.

        `TensorInfo.name` is the key in the file. Raises `CheckpointError` with all that cannot be read.
        """
        ...

    def misfits(self, module: nn.Module) -> tuple[Problem, ...]:
        """Say what of the stored tensors does not fit a module, and what cannot be read; reads no tensor data.

        Raises `CheckpointError` if nothing can be said.
        """
        ...

    def load_into(
        self,
        module: nn.Module,
        *,
        dtype: DTypeChoice,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        only: NameChoice | None = None,
    ) -> None:
        """Fill a module with this component's tensors.

        Args:
            module: Its parameters and persistent buffers are replaced, so it may be on the meta device. Names that
                share one parameter need one stored tensor. Other buffers move to `device` and keep their type.
            dtype: Type of the floating tensors, or a function from a tensor's name to its type.
            device: Where the tensors go.
            progress: Called with the fraction of bytes read and a short text.
            only: Fill the tensors that it accepts by name and leave the others alone; None fills all.

        Raises:
            CheckpointError: naming every missing, extra, misshaped and wrongly typed tensor; the module is untouched.
        """
        ...


class Checkpoint(Protocol):
    """An opened checkpoint. `name` says which in errors and logs, `digest` tells it apart from others."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    def component(self, name: str) -> Component:
        """Return a component. Raises `CheckpointError` naming the ones that exist."""
        ...
