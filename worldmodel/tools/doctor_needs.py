"""What a configuration's model needs of the host, from headers alone. Models without a planner need nothing known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worldmodel.checkpoint.inspection import CONTEXT_BYTES, Inspection
from worldmodel.checkpoint.problems import Problem
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.inspection import inspect_dreamzero
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import build_empty, open_any
from worldmodel.lingbot.inspection import inspect_empty
from worldmodel.messages import StartWorker
from worldmodel.tools.amounts import bytes_text, parameters_text
from worldmodel.tools.doctor import STAGING_BYTES, Needs
from worldmodel.tools.doctor_offload import Outlook, look_ahead, preview, streamed_needs
from worldmodel.wan.text_names import TextPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """A description of the checkpoint, its problems, what it needs, and the plan if its layers are streamed.

    `needs` of None: they are not known. `outlook` of None: nothing is streamed, or the device is not there.
    """

    about: str
    problems: tuple[Problem, ...] = ()
    needs: Needs | None = None
    outlook: Outlook | None = None


def look_into(start: StartWorker, *, has_device: bool) -> Findings:
    """Look into the checkpoint of a configuration.

    Choices that depend on the device are checked where `has_device` says that it is there.

    Raises `LoadFailed`, `RequestRefused` or ValueError if that cannot be found out.
    """
    match start.model:
        case "lingbot_world_v2":
            return _lingbot(start, torch.device(start.device) if has_device else None)
        case "dreamzero":
            return _dreamzero(start, torch.device(start.device) if has_device else None)
        case _:
            return Findings(about=f"{start.checkpoint or 'none'} (not looked into for this model)")


def _dreamzero(start: StartWorker, device: torch.device | None) -> Findings:
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
    needs = Needs(
        device=_device(found, weights, is_cuda=start.device.startswith("cuda")),
        session_bytes=found.memory["first_session_bytes"],
        host={"loading": STAGING_BYTES},
        locked={},
    )
    return Findings(about=_describe(found), problems=found.problems, needs=needs)


def _lingbot(start: StartWorker, device: torch.device | None) -> Findings:
    options = LingBotOptions.from_json(start.model_options).for_worker()
    is_cuda = start.device.startswith("cuda")
    checkpoint = open_any(start.checkpoint)
    empty = build_empty(checkpoint, options)
    found = inspect_empty(
        checkpoint,
        empty,
        width=start.width,
        height=start.height,
        precision=start.precision,
        options=options,
        text_encoder=None if is_cuda else TextPlacement.RESIDENT.value,
        offload=start.offload,
        device=device,
    )
    needs = _needs(found, is_cuda=is_cuda)
    if not start.offload.streams:
        return Findings(about=_describe(found), problems=found.problems, needs=needs)
    before = preview(start, checkpoint, empty, options)
    outlook = None if device is None else look_ahead(before)
    return Findings(
        about=_describe(found),
        problems=found.problems,
        needs=streamed_needs(before, needs, None if outlook is None else outlook.plan),
        outlook=outlook,
    )


def _describe(found: Inspection) -> str:
    parameters = sum(part.num_parameters for part in found.components)
    stored = sum(part.num_bytes for part in found.components)
    size = bytes_text(stored) if stored else "made up, not stored"
    return f"{found.checkpoint}: {parameters_text(parameters)}, {size}"


def _needs(found: Inspection, *, is_cuda: bool) -> Needs:
    weights = ("transformer_weights_bytes", "vae_weights_bytes", "text_encoder_on_device_bytes")
    text_bytes, vae_bytes = found.memory["text_encoder_on_host_bytes"], found.memory["vae_on_host_bytes"]
    is_text_streamed = found.geometry["text_encoder_placement"] == TextPlacement.STREAMED
    return Needs(
        device=_device(found, weights, is_cuda=is_cuda),
        session_bytes=found.memory["first_session_bytes"],
        host={"loading": STAGING_BYTES, "the text encoder": text_bytes, "the parked VAE": vae_bytes},
        locked={
            "the streamed text encoder": text_bytes if is_text_streamed else 0,
            "the parked VAE": vae_bytes if is_cuda else 0,
        },
    )


def _device(found: Inspection, weights: Sequence[str], *, is_cuda: bool) -> dict[str, int]:
    return {
        "weights": sum(found.memory[name] for name in weights),
        "CUDA context": CONTEXT_BYTES if is_cuda else 0,
        "one session": found.memory["first_session_bytes"],
    }
