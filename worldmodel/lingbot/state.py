"""What a LingBot-World session owns between two ticks, besides its K/V."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worldmodel.lingbot.camera_sources import CameraReducerState
from worldmodel.lingbot.condition import ConditionState
from worldmodel.lingbot.noise import NoiseState
from worldmodel.lingbot.prompt_transition import PromptCourse
from worldmodel.lingbot.recache import CleanHistory
from worldmodel.messages import MediaFormat
from worldmodel.wan.vae import VAECache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LingBotState:
    """Committed state of a session. Never changed in place; a tick returns the next one.

    `image_3HW` is the start image as the encoder takes it, kept for a reset. `decoder_cache` is None before the first
    chunk, and for ever in a session that wants no pixels. `history` is kept for `recache_on_prompt` only.
    """

    outputs: tuple[MediaFormat, ...]
    image_3HW: torch.Tensor
    text: PromptCourse
    noise: NoiseState
    condition: ConditionState
    camera: CameraReducerState
    decoder_cache: VAECache | None = None
    history: CleanHistory = ()
