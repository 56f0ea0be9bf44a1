"""The sampler of DreamZero around the transformer: noise to the next video latents and actions.

Video is guided, actions are those of the positive branch alone; each has a UniPC trajectory of its own. Holds no state
of any session.

Shapes: B branches, C channels, F latent frames, Y and X latent rows and columns, N actions, A action width.
Source: DreamZero official code, its action head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcache.indexed import IndexableKV
from kvcache.transaction import BranchedLayerKV
from worldmodel.dreamzero.config import DreamZeroOptions
from worldmodel.dreamzero.config import StepSkipping as SkippingRule
from worldmodel.dreamzero.noise import Noise
from worldmodel.dreamzero.step_skip import NUM_STEPS, DynamicSkipping, StepSkipping, static_skipping
from worldmodel.dreamzero.transformer import (
    NEGATIVE,
    POSITIVE,
    DraftKV,
    DreamZeroTransformer,
    FrameInputs,
    StepTime,
    Velocity,
)
from worldmodel.dreamzero.unipc import UniPC, noise_levels
from worldmodel.wan.transformer import TimeConstants

COMMIT_TIMESTEP = 0


class Forward(Protocol):
    """The forwards of the network: the transformer's own, or equal ones that are faster."""

    def commit(self, x_CFYX: Tensor, time: TimeConstants, inputs: FrameInputs, chunk: BranchedLayerKV) -> None: ...

    def velocity(
        self, x_CFYX: Tensor, action_NA: Tensor, step: StepTime, inputs: FrameInputs, draft: DraftKV
    ) -> Velocity: ...


class ServedChunk(IndexableKV, BranchedLayerKV, Protocol):
    """A chunk in flight; `kvcache.transaction.ChunkTransaction`."""


class ServedDraft(IndexableKV, DraftKV, Protocol):
    """What follows it; `kvcache.draft.ChunkDraft`."""


class ServedForward(Protocol):
    """What a sampler needs of a forward: one that also takes the K/V of sessions alone, as a captured one does."""

    def commit(self, x_CFYX: Tensor, time: TimeConstants, inputs: FrameInputs, chunk: ServedChunk) -> None: ...

    def velocity(
        self, x_CFYX: Tensor, action_NA: Tensor, step: StepTime, inputs: FrameInputs, draft: ServedDraft
    ) -> Velocity: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What a call predicts, float32: latents of the next frames, and the normalised actions until then."""

    video_CFYX: Tensor
    action_NA: Tensor
    num_computed: int


def skipping_rule(options: DreamZeroOptions) -> Callable[[], StepSkipping]:
    """Return what makes the rule of one call."""
    if options.step_skipping is SkippingRule.DYNAMIC:
        return DynamicSkipping
    static = static_skipping(options.computed_steps)
    return lambda: static


class DreamZeroSampler:
    """Denoise calls.

    `forward` runs the network, None: the transformer itself. `final_noise` is where the video's noise ends if it is
    decoupled from that of the actions.
    """

    def __init__(
        self,
        transformer: DreamZeroTransformer,
        options: DreamZeroOptions,
        *,
        forward: ServedForward | None = None,
        final_noise: float | None = None,
    ) -> None:
        self._transformer = transformer
        self._forward: ServedForward = transformer if forward is None else forward
        self._new_skipping = skipping_rule(options)
        self._guidance = options.guidance
        self._video = UniPC(noise_levels(NUM_STEPS, options.shift, final_noise=final_noise))
        self._action = UniPC(noise_levels(NUM_STEPS, options.shift))
        self._times = self._all_times()
        self._commit_time = transformer.time_constants(COMMIT_TIMESTEP)

    def _all_times(self) -> tuple[StepTime, ...]:
        """Derive the constants of every step once; a timestep that occurs twice is derived once."""
        pairs = list(zip(self._video.levels.timesteps, self._action.levels.timesteps, strict=True))
        constants: dict[int, TimeConstants] = {
            timestep: self._transformer.time_constants(timestep)
            for timestep in {each for pair in pairs for each in pair}
        }
        return tuple(self._transformer.step_time(constants[video], constants[action]) for video, action in pairs)

    def commit(self, latents_CFYX: Tensor, inputs: FrameInputs, chunk: ServedChunk) -> None:
        """Store K and V of observed latents."""
        self._forward.commit(latents_CFYX, self._commit_time, inputs, chunk)

    def denoise(self, noise: Noise, inputs: FrameInputs, draft: ServedDraft) -> Sample:
        """Return the prediction of one call. K and V of the noisy frames go to `draft`."""
        skipping = self._new_skipping()
        video, action = self._video.start(noise.video_CFYX), self._action.start(noise.action_NA)
        guided_CFYX: Tensor | None = None
        action_flow_NA: Tensor | None = None
        num_computed = 0
        for step in range(NUM_STEPS):
            if skipping.runs(step):
                velocity = self._forward.velocity(video.sample, action.sample, self._times[step], inputs, draft)
                guided_CFYX, action_flow_NA = guide(velocity, self._guidance), velocity.action_NA
                skipping.computed(guided_CFYX)
                num_computed += 1
            assert guided_CFYX is not None
            assert action_flow_NA is not None
            video = self._video.advance(video, guided_CFYX)
            action = self._action.advance(action, action_flow_NA)
        return Sample(video_CFYX=video.sample, action_NA=action.sample, num_computed=num_computed)


def guide(velocity: Velocity, guidance: float) -> Tensor:
    """Push the video away from what the negative branch predicts."""
    positive, negative = velocity.video_BCFYX[POSITIVE], velocity.video_BCFYX[NEGATIVE]
    return torch.add(negative, positive - negative, alpha=guidance)
