"""The training layouts compute what a served session computes."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache.cache import KVCache
from tests.support.lingbot_network import SESSION, transformer, transformer_config
from training.demo_world.network import Geometry, Rollouts, SegmentInputs, TrainingNetwork, history_of
from worldmodel.lingbot.camera import camera_features
from worldmodel.lingbot.transformer import LingBotTransformer, kv_geometry

HEIGHT, WIDTH = 4, 6
CHUNKS, FRAMES = 7, 3
INTRINSICS = (30.0, 28.0, 24.0, 16.0)
TIMESTEPS = (1000.0, 937.5, 833.33, 625.0, 500.0, 250.0, 90.0)
GEOMETRY = Geometry(latent_height=HEIGHT, latent_width=WIDTH, intrinsics=INTRINSICS)


class Clip:
    """One random clip: latents, condition, cameras and text."""

    def __init__(self, model: LingBotTransformer) -> None:
        rng = torch.Generator().manual_seed(5)
        frames = CHUNKS * FRAMES
        self.clean, self.noisy = torch.randn(2, 16, frames, HEIGHT, WIDTH, generator=rng)
        self.condition = torch.randn(20, frames, HEIGHT, WIDTH, generator=rng)
        angles = torch.randn(frames, generator=rng) * 0.2
        self.poses = torch.eye(4).repeat(frames, 1, 1)
        self.poses[:, 0, 0] = self.poses[:, 2, 2] = angles.cos()
        self.poses[:, 0, 2], self.poses[:, 2, 0] = angles.sin(), -angles.sin()
        self.poses[:, :3, 3] = torch.randn(frames, 3, generator=rng)
        self.text = torch.randn(5, model.config.text_dim, generator=rng)

    def part(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        return x[:, chunk * FRAMES : (chunk + 1) * FRAMES]


@pytest.fixture(scope="module")
def model() -> LingBotTransformer:
    return transformer(
        transformer_config(sink_latent_frames=3, visible_latent_frames=9, latent_frames_per_chunk=FRAMES)
    )


@pytest.fixture(scope="module")
def clip(model: LingBotTransformer) -> Clip:
    return Clip(model)


@pytest.fixture(scope="module")
def served(model: LingBotTransformer, clip: Clip) -> torch.Tensor:
    """The flow of each noisy chunk after the clean chunks before it, through the K/V cache: [16, F, Y, X]."""
    spec = kv_geometry(model.config, model.plan, latent_height=HEIGHT, latent_width=WIDTH)
    cache = KVCache(spec, capacity=1, device="cpu", dtype=model.plan.linear)
    cache.open(SESSION)
    features = camera_features(clip.poses, torch.tensor([INTRINSICS]).repeat(len(clip.poses), 1), 8 * HEIGHT, 8 * WIDTH)
    rays = model.patch_embedding_wancamctrl(features).unflatten(0, (len(clip.poses), -1))
    flows = []
    for index in range(CHUNKS):
        with torch.no_grad(), cache.lease(SESSION) as lease:
            chunk = lease.begin_chunk()
            if index == 0:
                model.publish_text(clip.text, chunk)
            inputs = model.chunk_inputs(
                clip.part(clip.condition, index),
                rays[index * FRAMES : (index + 1) * FRAMES].flatten(0, 1),
                index * FRAMES,
            )
            flows.append(
                model.flow(clip.part(clip.noisy, index), model.time_constants(TIMESTEPS[index]), inputs, chunk)
            )
            model.store_clean(clip.part(clip.clean, index), model.time_constants(0.0), inputs, chunk)
            chunk.commit()
    return torch.cat(flows, dim=1)


def _inputs(network: TrainingNetwork, clip: Clip, segments: list[tuple[int, float]]) -> SegmentInputs:
    """Inputs of (chunk, timestep) segments of the clip, which stands twice in the batch."""
    rows = torch.nn.functional.pad(clip.text, (0, 0, 0, 64 - len(clip.text)))
    text, bias = network.text_rows(rows[None], torch.arange(64)[None] < len(clip.text))
    chunks = torch.tensor([chunk for chunk, _ in segments] * 2)
    frames = chunks[:, None] * FRAMES + torch.arange(FRAMES)
    return network.segment_inputs(
        timesteps_G=torch.tensor([timestep for _, timestep in segments] * 2),
        rotations_G=clip.poses[frames][..., :3, :3],
        translations_G=clip.poses[frames][..., :3, 3],
        positions_G=frames,
        text_GLD=text.expand(len(chunks), -1, -1),
        text_bias_G11L=bias.expand(len(chunks), -1, -1, -1),
    )


def test_a_clip_in_one_pass_equals_a_served_rollout(
    model: LingBotTransformer, clip: Clip, served: torch.Tensor
) -> None:
    network = TrainingNetwork(model, GEOMETRY)
    segments = [(chunk, 0.0) for chunk in range(CHUNKS - 1)] + list(enumerate(TIMESTEPS))
    clean = torch.cat([clip.clean, clip.condition])[:, : (CHUNKS - 1) * FRAMES]
    noisy = torch.cat([clip.noisy, clip.condition])
    with torch.no_grad():
        flow = network.clip_flow(
            clean.repeat(2, 1, 1, 1, 1), noisy.repeat(2, 1, 1, 1, 1), _inputs(network, clip, segments)
        )
    for row in flow:
        torch.testing.assert_close(row, served, atol=2e-4, rtol=1e-3)


def test_rollouts_keep_the_window_of_a_session(model: LingBotTransformer, clip: Clip, served: torch.Tensor) -> None:
    network = TrainingNetwork(model, GEOMETRY)
    rollouts = Rollouts(network)
    with torch.no_grad():
        for chunk, timestep in enumerate(TIMESTEPS):
            condition = clip.part(clip.condition, chunk).repeat(2, 1, 1, 1, 1)
            noisy = clip.part(clip.noisy, chunk).repeat(2, 1, 1, 1, 1)
            flow = rollouts.flow(noisy, condition, _inputs(network, clip, [(chunk, timestep)]))
            for row in flow:
                torch.testing.assert_close(row, clip.part(served, chunk), atol=2e-4, rtol=1e-3)
            clean = clip.part(clip.clean, chunk).repeat(2, 1, 1, 1, 1)
            rollouts.keep(clean, condition, _inputs(network, clip, [(chunk, 0.0)]))


def test_history_is_the_sink_and_the_window() -> None:
    config = transformer_config(sink_latent_frames=9, visible_latent_frames=18, latent_frames_per_chunk=3)
    assert [history_of(chunk, config) for chunk in (0, 1, 5, 6, 9)] == [
        (), (0,), (0, 1, 2, 3, 4), (0, 1, 2, 4, 5), (0, 1, 2, 7, 8),
    ]  # fmt: skip
    assert history_of(4, transformer_config(latent_frames_per_chunk=3)) == (0, 1, 2, 3)


def test_a_prompts_padding_counts_as_one_row(model: LingBotTransformer) -> None:
    rows = torch.zeros(1, 64, model.config.text_dim)
    _, bias = TrainingNetwork(model, GEOMETRY).text_rows(rows, torch.arange(64)[None] < 7)
    assert bias[0, 0, 0, 64].item() == pytest.approx(math.log(model.config.text_rows - 7))
    assert (bias[0, 0, 0] > -math.inf).sum() == 8
