"""Case 2: seven chunks with history, both samplers, every window; through the real K/V cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kvcache.cache import KVCache
from kvcache.transaction import ChunkTransaction
from tests.support.lingbot_golden import assert_close, load_json, manifest, tensors
from tests.support.lingbot_network import SESSION, main_geometry, open_cache, transformer, transformer_config
from worldmodel.lingbot.pipeline import ChunkSampler
from worldmodel.lingbot.transformer import ChunkInputs
from worldmodel.wan.flow_scheduler import SamplerTable, nominal_table, official_table

FREE_RUNNING_TOLERANCE = 5e-5
TEACHER_FORCED_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChunk:
    """One chunk of the golden rollout, ready to be denoised."""

    index: int
    chunk: ChunkTransaction
    inputs: ChunkInputs
    noise: tuple[torch.Tensor, ...]


class Rollout:
    """Go through the golden chunks, committing each after the caller has worked on it."""

    def __init__(self, table: SamplerTable, *, sink: int, visible: int | None) -> None:
        self.given = tensors("case2_inputs")
        self.model = transformer(transformer_config(sink_latent_frames=sink, visible_latent_frames=visible))
        self.sampler = ChunkSampler(self.model, table)
        self.cache: KVCache = open_cache(self.model, *main_geometry()["latent_hw"])

    def chunks(self) -> Iterator[OpenChunk]:
        for index in range(main_geometry()["blocks"]):
            with self.cache.lease(SESSION) as lease:
                chunk = lease.begin_chunk()
                if index == 0:
                    self.model.publish_text(self.given["context"], chunk)
                rays = self.model.project_rays(self.given[f"b{index}.camera"][0])
                inputs = self.model.chunk_inputs(self.given[f"b{index}.condition"], rays, chunk.first_latent_frame)
                renoise = (self.given[f"b{index}.renoise{step}"] for step in range(self.sampler.num_steps - 1))
                noise = (self.given[f"b{index}.noise0"], *renoise)
                yield OpenChunk(index=index, chunk=chunk, inputs=inputs, noise=noise)
                chunk.commit()

    def run(self) -> Iterator[torch.Tensor]:
        """Generate freely; yield the latents of each chunk."""
        for now in self.chunks():
            latents = self.sampler.denoise(now.noise, now.inputs, now.chunk)
            self.sampler.store_clean(latents, now.inputs, now.chunk)
            yield latents


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def main_rollout(table: SamplerTable) -> Rollout:
    return Rollout(table, sink=main_geometry()["sink_frames"], visible=main_geometry()["window_frames"])


def nominal() -> SamplerTable:
    """Build the nominal table and check that it is the one the rollout was made with."""
    table = nominal_table(manifest()["end_to_end"]["flow_shift"])
    assert [step.timestep for step in table] == pytest.approx(
        [step["timestep"] for step in manifest()["nominal_schedule"]]
    )
    return table


def official() -> SamplerTable:
    return official_table(manifest()["end_to_end"]["flow_shift"])


def test_lingbot_free_rollout_with_the_nominal_sampler() -> None:
    golden = tensors("case2_rollout_nominal")
    rollout = main_rollout(nominal())
    for index, latents in enumerate(rollout.run()):
        assert_close(latents, golden[f"b{index}.latent"], FREE_RUNNING_TOLERANCE, f"chunk {index}")


def test_lingbot_history_holds_clean_features_of_the_visible_frames() -> None:
    golden = tensors("case2_rollout_nominal")
    rollout = main_rollout(nominal())
    tokens = rollout.cache.spec.tokens_per_latent_frame
    checked = 0
    for now in rollout.chunks():
        latents = rollout.sampler.denoise(now.noise, now.inputs, now.chunk)
        rollout.sampler.store_clean(latents, now.inputs, now.chunk)
        # The golden rows ascend by frame; a ring holds them in another order.
        order = sorted(range(len(now.chunk.visible_latent_frames)), key=now.chunk.visible_latent_frames.__getitem__)
        for layer in range(len(rollout.model.layers)):
            for part, stored in zip("kv", now.chunk.visible(layer), strict=True):
                key = f"b{now.index}.kv.layer{layer}.{part}"
                if key in golden:
                    rows = stored.unflatten(0, (-1, tokens))[order].flatten(0, 1)
                    assert_close(rows, golden[key][0], FREE_RUNNING_TOLERANCE, key)
                    checked += 1
    assert checked == sum(".kv." in key for key in golden)


def test_lingbot_each_forward_of_the_nominal_rollout_when_fed_the_stored_latents() -> None:
    golden = tensors("case2_rollout_nominal")
    rollout = main_rollout(nominal())
    for now in rollout.chunks():
        for step in range(rollout.sampler.num_steps):
            name = f"b{now.index}.s{step}"
            flow, x0 = rollout.sampler.step(step, golden[f"{name}.x_t"], now.inputs, now.chunk)
            assert_close(flow, golden[f"{name}.flow"], TEACHER_FORCED_TOLERANCE, f"{name}.flow")
            assert_close(x0, golden[f"{name}.x0"], TEACHER_FORCED_TOLERANCE, f"{name}.x0")
        rollout.sampler.store_clean(golden[f"b{now.index}.latent"], now.inputs, now.chunk)


def test_lingbot_the_commit_forward_returns_the_stored_flow_when_it_is_not_cut_short() -> None:
    golden = tensors("case2_rollout_nominal")
    commit = load_json("case3_sampler.json")["commit_timestep"]
    rollout = main_rollout(nominal())
    time = rollout.model.time_constants(commit)
    for now in rollout.chunks():
        flow = rollout.model.flow(golden[f"b{now.index}.latent"], time, now.inputs, now.chunk)
        assert_close(flow, golden[f"b{now.index}.commit_flow"], TEACHER_FORCED_TOLERANCE, f"chunk {now.index}")


def test_lingbot_free_rollout_with_the_official_sampler() -> None:
    golden = tensors("case2_rollout_official_sampler")
    rollout = main_rollout(official())
    for now in rollout.chunks():
        x_t = now.noise[0]
        for step in range(rollout.sampler.num_steps):
            name = f"b{now.index}.s{step}"
            flow, x0 = rollout.sampler.step(step, x_t, now.inputs, now.chunk)
            if f"{name}.flow" in golden:
                assert_close(flow, golden[f"{name}.flow"], FREE_RUNNING_TOLERANCE, f"{name}.flow")
                assert_close(x0, golden[f"{name}.x0"], FREE_RUNNING_TOLERANCE, f"{name}.x0")
            if step + 1 < rollout.sampler.num_steps:
                sigma = rollout.sampler.table[step + 1].renoise_sigma
                x_t = (1.0 - sigma) * x0 + sigma * now.noise[step + 1]
        latents = rollout.sampler.denoise(now.noise, now.inputs, now.chunk)
        assert_close(latents, x0, FREE_RUNNING_TOLERANCE, "the sampler's own loop")
        assert_close(latents, golden[f"b{now.index}.latent"], FREE_RUNNING_TOLERANCE, f"chunk {now.index}")
        rollout.sampler.store_clean(latents, now.inputs, now.chunk)


def variants() -> dict[str, tuple[int | None, int]]:
    """Return visible frames (None: unlimited) and sink frames of each stored variant."""
    described = manifest()["transformer_runtime"]["variants"]
    return {
        name: (None, 0) if isinstance(value, str) else (int(value[0]), int(value[1]))
        for name, value in described.items()
    }


@pytest.mark.parametrize("name", sorted(variants()))
def test_lingbot_free_rollout_with_other_windows(name: str) -> None:
    golden = tensors("case2_window_variants")
    visible, sink = variants()[name]
    rollout = Rollout(nominal(), sink=sink, visible=visible)
    for index, latents in enumerate(rollout.run()):
        assert_close(latents, golden[f"{name}.b{index}.latent"], FREE_RUNNING_TOLERANCE, f"{name}, chunk {index}")
