"""DreamZero transformer, golden extra: one training forward, in which every noisy frame sees only clean ones before it.

The serving forwards give the same: clean frames are committed, noisy ones drafted after those before them. They differ
in one place, which is put right here: in training a state sees itself alone, in serving all that its draft sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.dreamzero_golden import assert_close, tensors
from tests.support.dreamzero_network import cache_for, publish, transformer
from worldmodel.dreamzero.transformer import DreamZeroTransformer, FrameInputs, Velocity
from worldmodel.dreamzero.transformer_layers import Segment

CLEAN = 0


class StateAlone:
    """A draft whose last token, the state, attends to itself: what it gets is its own value."""

    def __init__(self, draft: Any) -> None:
        self._draft = draft
        self._state_values: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def write_registers_all(self, layer: int, k_BRHD: Tensor, v_BRHD: Tensor) -> None:
        self._state_values[layer] = v_BRHD[:, -1:]
        self._draft.write_registers_all(layer, k_BRHD, v_BRHD)

    def attend_all(self, layer: int, q_BTHD: Tensor) -> Tensor:
        seen_BTHD = self._draft.attend_all(layer, q_BTHD)
        return torch.cat([seen_BTHD[:, :-1], self._state_values[layer].expand_as(seen_BTHD[:, -1:])], dim=1)


class Training:
    """The forwards of one training example."""

    def __init__(self) -> None:
        self.network: DreamZeroTransformer = transformer()
        self.golden = tensors("train_teacher_forcing")
        self.chunk_frames = self.network.config.latent_frames_per_chunk
        self.chunk_actions = self.network.config.actions_per_chunk

    def inputs(self, start: int, num_frames: int, state_A: Tensor | None = None) -> FrameInputs:
        return self.network.frame_inputs(
            self.golden["y"][0, :, start : start + num_frames],
            first_latent_frame=start,
            shape_FYX=(num_frames, *self.golden["x"].shape[-2:]),
            state_A=state_A,
        )

    def commit(self, start: int, num_frames: int, chunk: Any) -> None:
        x_CFYX = self.golden["clean_x"][0, :, start : start + num_frames]
        self.network.commit(x_CFYX, self.network.time_constants(CLEAN), self.inputs(start, num_frames), chunk)

    def first_frame(self, chunk: Any) -> Tensor:
        """Return the flow of the noisy first frame, which has nothing before it."""
        inputs, time = self.inputs(0, 1), self.network.time_constants(int(self.golden["timestep"][0, 0]))
        h = self.network.embed_video(self.golden["x"][0, :, :1], inputs)[None]
        segments = (Segment(rows=slice(0, h.shape[1]), time=time),)
        for index in range(self.network.config.num_layers):
            h = self.network._run_layer(index, h, inputs, segments, chunk)
        return self.network._video_flow(h, time, inputs)[0]

    def draft(self, index: int, chunk: Any) -> Velocity:
        golden, frames = self.golden, self.chunk_frames
        start = 1 + frames * index
        actions = slice(self.chunk_actions * index, self.chunk_actions * (index + 1))
        [video_time] = set(golden["timestep"][0, start : start + frames].tolist())
        [action_time] = set(golden["timestep_action"][0, actions].tolist())
        video = self.network.time_constants(video_time)
        action = video if action_time == video_time else self.network.time_constants(action_time)
        return self.network.velocity(
            golden["x"][0, :, start : start + frames],
            golden["action"][0, actions],
            self.network.step_time(video, action),
            self.inputs(start, frames, golden["state"][0, index]),
            StateAlone(chunk.draft(frames)),
        )


@torch.inference_mode()
def test_dreamzero_training_forward() -> None:
    training = Training()
    golden, num_frames = training.golden, training.golden["x"].shape[2]
    cache = cache_for(training.network, *golden["x"].shape[-2:], capacity=2)
    cache.open("noisy")
    cache.open("clean")
    with cache.lease("noisy") as lease:
        chunk = lease.begin_chunk(1)
        publish(training.network, chunk, golden["context"][0], golden["clip_feature"][0])
        videos, actions = [training.first_frame(chunk)], []
    committed = 0
    for index in range((num_frames - 1) // training.chunk_frames):
        with cache.lease("clean") as lease:
            chunk = lease.begin_chunk(training.chunk_frames if committed else 1)
            if not committed:
                publish(training.network, chunk, golden["context"][0], golden["clip_feature"][0])
            training.commit(committed, chunk.num_latent_frames, chunk)
            committed += chunk.num_latent_frames
            flow = training.draft(index, chunk)
            videos.append(flow.video_BCFYX[0])
            actions.append(flow.action_NA)
            chunk.commit()
    assert_close(torch.cat(videos, dim=1), golden["out_video"][0])
    assert_close(torch.cat(actions), golden["out_action"][0])
