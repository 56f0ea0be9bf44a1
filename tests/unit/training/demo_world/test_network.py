"""The training layouts compute what a served session computes."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache.cache import KVCache
from tests.support.lingbot_network import SESSION, transformer, transformer_config
from training.demo_world.clips import ClipInputs, Clips
from training.demo_world.network import Geometry, TrainingNetwork, history_of
from training.demo_world.rollouts import Rollouts
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


def _text(network: TrainingNetwork, clip: Clip) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and mask of two prompts, of which the second is the clip's."""
    rows = torch.nn.functional.pad(clip.text, (0, 0, 0, 64 - len(clip.text)))
    mask = torch.arange(64)[None] < torch.tensor([[3], [len(clip.text)]])
    return torch.stack([rows.flip(0), rows]) * mask[..., None], mask


@pytest.mark.parametrize("num_copies", [1, 2])
def test_clips_in_one_pass_equal_a_served_rollout(
    model: LingBotTransformer, clip: Clip, served: torch.Tensor, num_copies: int
) -> None:
    """The clip stands twice in the batch; further noisy copies repeat the first."""
    network = TrainingNetwork(model, GEOMETRY)
    clips = Clips(network, CHUNKS, num_copies=num_copies, pose_layers=(1,))
    rows, mask = _text(network, clip)
    inputs = ClipInputs(
        timesteps_BM=torch.tensor([[0.0] * (CHUNKS - 1) + [*TIMESTEPS] * num_copies] * 2),
        rotations_BF33=clip.poses[None, :, :3, :3].repeat(2, 1, 1, 1),
        translations_BF3=clip.poses[None, :, :3, 3].repeat(2, 1, 1),
        positions_BF=torch.arange(CHUNKS * FRAMES).repeat(2, 1),
        prompts_BN=torch.ones(2, CHUNKS, dtype=torch.long),
        text_QLC=rows,
        text_mask_QL=mask,
    )
    clean = torch.cat([clip.clean, clip.condition])[:, : (CHUNKS - 1) * FRAMES].repeat(2, 1, 1, 1, 1)
    noisy = torch.cat([clip.noisy, clip.condition]).repeat(2, 1, num_copies, 1, 1)
    with torch.no_grad():
        flow, kept = clips.flow(clean, noisy, inputs)
    assert [list(h.shape[:2]) for h in kept] == [[2, CHUNKS - 1 + num_copies * CHUNKS]]
    for copies in flow:
        for copy in copies.split(CHUNKS * FRAMES, dim=1):
            torch.testing.assert_close(copy, served, atol=1e-5, rtol=1e-5)


def test_rollouts_keep_the_window_of_a_session(model: LingBotTransformer, clip: Clip, served: torch.Tensor) -> None:
    network = TrainingNetwork(model, GEOMETRY)
    rollouts = Rollouts(network)
    with torch.no_grad():
        text, bias = (x[1:].repeat(2, *[1] * (x.dim() - 1)) for x in network.text_rows(*_text(network, clip)))
        for chunk, timestep in enumerate(TIMESTEPS):
            frames = torch.arange(chunk * FRAMES, (chunk + 1) * FRAMES)
            inputs = rollouts.inputs(
                condition_BCFYX=clip.part(clip.condition, chunk).repeat(2, 1, 1, 1, 1),
                rotations_BF33=clip.poses[None, frames, :3, :3].repeat(2, 1, 1, 1),
                translations_BF3=clip.poses[None, frames, :3, 3].repeat(2, 1, 1),
                positions_BF=frames.repeat(2, 1),
                text_BLD=text,
                text_bias_B11L=bias,
            )
            flow = rollouts.flow(clip.part(clip.noisy, chunk).repeat(2, 1, 1, 1, 1), inputs, timestep)
            for row in flow:
                torch.testing.assert_close(row, clip.part(served, chunk), atol=1e-5, rtol=1e-5)
            rollouts.keep(clip.part(clip.clean, chunk).repeat(2, 1, 1, 1, 1), inputs)


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
