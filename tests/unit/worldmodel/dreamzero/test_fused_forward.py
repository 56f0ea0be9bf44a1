"""The fused forwards against the transformer's own, over the same cache: flows, actions and committed K/V."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kvcache.cache import KVCache
from tests.support.dreamzero_checkpoint import start_worker, write_checkpoint
from tests.support.dreamzero_network import cache_for, publish, transformer
from worldmodel.dreamzero.adapter import create_adapter
from worldmodel.dreamzero.fused_forward import FusedForward
from worldmodel.dreamzero.sampler import Forward
from worldmodel.dreamzero.transformer import DreamZeroTransformer, Velocity
from worldmodel.errors import LoadFailed
from worldmodel.kernels.layer_ops import PlainOps

TIMESTEPS = (999, 535)


@dataclass
class Run:
    """A chunk committed twice with a draft of two steps after each."""

    velocities: list[Velocity]
    kv: list[torch.Tensor]


def run(network: DreamZeroTransformer, forward: Forward) -> Run:
    rng = torch.Generator().manual_seed(0)
    config = network.config
    rows, columns = 4, 8
    cache: KVCache = cache_for(network, rows, columns)
    cache.open("a")
    condition_channels = config.in_channels - config.out_channels
    result = Run([], [])
    for num_frames in (1, 2):
        with cache.lease("a") as lease, torch.no_grad():
            chunk = lease.begin_chunk(num_frames)
            if num_frames == 1:
                text = torch.randn(7, config.text_dim, generator=rng)
                publish(network, chunk, text, torch.randn(config.image_tokens, config.image_dim, generator=rng))
            condition = torch.randn(condition_channels, num_frames, rows, columns, generator=rng)
            x = torch.randn(config.out_channels, num_frames, rows, columns, generator=rng)
            inputs = network.frame_inputs(
                condition, first_latent_frame=chunk.first_latent_frame, shape_FYX=(num_frames, rows, columns)
            )
            forward.commit(x, network.time_constants(0), inputs, chunk)
            draft = chunk.draft(2)
            inputs = network.frame_inputs(
                torch.randn(condition_channels, 2, rows, columns, generator=rng),
                first_latent_frame=draft.first_latent_frame,
                shape_FYX=(2, rows, columns),
                state_A=torch.randn(config.state_dim, generator=rng),
            )
            for timestep in TIMESTEPS:
                time = network.time_constants(timestep)
                x = torch.randn(config.out_channels, 2, rows, columns, generator=rng)
                action = torch.randn(config.actions_per_chunk, config.action_dim, generator=rng)
                result.velocities.append(forward.velocity(x, action, network.step_time(time, time), inputs, draft))
            layers = [chunk.visible(layer, branch=branch) for layer in range(config.num_layers) for branch in (0, 1)]
            result.kv = [torch.stack(pair).clone() for pair in layers]
            chunk.commit()
    return result


def test_fused_forwards_equal_the_plain_ones() -> None:
    network = transformer()
    want = run(network, network)
    got = run(network, FusedForward(network, PlainOps()))
    assert len(got.velocities) == 4
    for ours, theirs in zip(got.velocities, want.velocities, strict=True):
        torch.testing.assert_close(ours.video_BCFYX, theirs.video_BCFYX, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.action_NA, theirs.action_NA, atol=1e-4, rtol=1e-4)
    for ours_kv, theirs_kv in zip(got.kv, want.kv, strict=True):
        torch.testing.assert_close(ours_kv, theirs_kv, atol=1e-4, rtol=1e-4)


def test_float8_linears_are_near_the_plain_ones() -> None:
    want = run(transformer(), transformer())
    network = transformer()
    got = run(network, FusedForward(network, PlainOps(), quantize=True))
    assert network.layers[0].self_attn.q.weight.numel() == 0
    for ours, theirs in zip(got.velocities, want.velocities, strict=True):
        for mine, plain in ((ours.video_BCFYX, theirs.video_BCFYX), (ours.action_NA, theirs.action_NA)):
            # One float8 rounding is about 3 %; a wrong order of work is off by as much as the values themselves.
            assert (mine - plain).norm() < 0.12 * plain.norm()
            assert not torch.equal(mine, plain)


def test_precisions_of_other_models_are_refused(tmp_path: Path) -> None:
    start = start_worker(write_checkpoint(tmp_path))
    with pytest.raises(LoadFailed, match="precision: unknown 'official': expected one of fp32, bf16, fp8"):
        create_adapter(replace(start, precision="official"), lambda *_: None)
    adapter = create_adapter(replace(start, precision="fp8"), lambda *_: None)
    assert adapter.spec.attention_backend.endswith("layers plain with float8 linears")


def test_two_timesteps_are_refused() -> None:
    network = transformer()
    step = network.step_time(network.time_constants(999), network.time_constants(5))
    with pytest.raises(ValueError, match="one timestep"):
        FusedForward(network, PlainOps()).velocity(None, None, step, None, None)


def test_what_was_chosen_is_shown_and_what_can_not_be_had_stops_the_start(tmp_path: Path) -> None:
    def load(name: str, options: dict[str, object], **head: object) -> str:
        folder = write_checkpoint(tmp_path / name, **head)
        return create_adapter(start_worker(folder, **options), lambda *_: None).spec.attention_backend

    assert load("a", {}) == "torch_sdpa; layers unfused"
    assert load("b", {"layer_operations": "plain"}) == "torch_sdpa; layers plain"
    with pytest.raises(LoadFailed, match="they need a CUDA device"):
        load("c", {"layer_operations": "triton"})
    decoupled = {"decouple_inference_noise": True, "video_inference_final_noise": 0.8}
    with pytest.raises(LoadFailed, match="decouples the noise of video and actions: use"):
        load("d", {"layer_operations": "plain"}, **decoupled)
    with pytest.raises(LoadFailed, match="flash3"):
        load("e", {"attention": "flash3"})
