"""What a configuration's model needs of the host, from headers alone. Models without a planner need nothing known."""

from __future__ import annotations

import torch

from worldmodel.checkpoint.inspection import CONTEXT_BYTES, Inspection
from worldmodel.checkpoint.problems import Problem
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.inspection import inspect_dreamzero
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.inspection import inspect_checkpoint
from worldmodel.messages import StartWorker
from worldmodel.tools.amounts import bytes_text, parameters_text
from worldmodel.tools.doctor import STAGING_BYTES, Needs
from worldmodel.tools.doctor_offload import streamed_needs
from worldmodel.wan.text_names import TextPlacement


def checkpoint_needs(start: StartWorker, *, has_device: bool) -> tuple[str, tuple[Problem, ...], Needs | None]:
    """Return a description of the checkpoint, its problems, and what it needs.

    Choices that depend on the device are checked where `has_device` says that it is there.

    Raises `LoadFailed`, `RequestRefused` or ValueError if that cannot be found out.
    """
    match start.model:
        case "lingbot_world_v2":
            return _lingbot(start, torch.device(start.device) if has_device else None)
        case "dreamzero":
            return _dreamzero(start, torch.device(start.device) if has_device else None)
        case _:
            return f"{start.checkpoint or 'none'} (not looked into for this model)", (), None


def _dreamzero(start: StartWorker, device: torch.device | None) -> tuple[str, tuple[Problem, ...], Needs | None]:
    """Read settings and headers as a worker does. Raises what that raises, with all problems."""
    found = inspect_dreamzero(
        start.checkpoint,
        width=start.width,
        height=start.height,
        precision=start.precision,
        options=DreamZeroOptions.from_json(start.model_options),
        device=device,
    )
    weights = (
        "transformer_weights_bytes",
        "vae_weights_bytes",
        "image_encoder_weights_bytes",
        "text_encoder_on_device_bytes",
    )
    device_bytes = sum(found.memory[name] for name in (*weights, "first_session_bytes"))
    context_bytes = CONTEXT_BYTES if start.device.startswith("cuda") else 0
    needs = Needs(
        device_bytes=device_bytes + context_bytes,
        session_bytes=found.memory["first_session_bytes"],
        host_bytes=STAGING_BYTES,
        locked_bytes=0,
    )
    return _describe(found), found.problems, needs


def _lingbot(start: StartWorker, device: torch.device | None) -> tuple[str, tuple[Problem, ...], Needs | None]:
    options = LingBotOptions.from_json(start.model_options).for_worker()
    is_cuda = start.device.startswith("cuda")
    found = inspect_checkpoint(
        start.checkpoint,
        width=start.width,
        height=start.height,
        precision=start.precision,
        options=options,
        text_encoder=None if is_cuda else TextPlacement.RESIDENT.value,
        device=device,
    )
    return _describe(found), found.problems, streamed_needs(start, _needs(found, is_cuda=is_cuda))


def _describe(found: Inspection) -> str:
    parameters = sum(part.num_parameters for part in found.components)
    stored = sum(part.num_bytes for part in found.components)
    size = bytes_text(stored) if stored else "made up, not stored"
    return f"{found.checkpoint}: {parameters_text(parameters)}, {size}"


def _needs(found: Inspection, *, is_cuda: bool) -> Needs:
    weights = ("transformer_weights_bytes", "vae_weights_bytes", "text_encoder_on_device_bytes", "first_session_bytes")
    device_bytes = sum(found.memory[name] for name in weights)
    off_device = found.memory["text_encoder_on_host_bytes"]
    return Needs(
        device_bytes=device_bytes + (CONTEXT_BYTES if is_cuda else 0),
        session_bytes=found.memory["first_session_bytes"],
        host_bytes=STAGING_BYTES + off_device,
        locked_bytes=off_device if found.geometry["text_encoder_placement"] == TextPlacement.STREAMED else 0,
    )
