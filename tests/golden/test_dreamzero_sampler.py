"""DreamZero sampler, golden cases 2c, 3, 4 and 5: noise levels, UniPC, skipped steps, action tokens, rotations."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.support.dreamzero_golden import assert_close, manifest, tensors
from tests.support.dreamzero_network import transformer
from worldmodel.dreamzero.step_skip import NUM_STEPS, STATIC_STEPS, DynamicSkipping, static_skipping
from worldmodel.dreamzero.transformer import DreamZeroTransformer
from worldmodel.dreamzero.transformer_layers import action_time_encoding
from worldmodel.dreamzero.unipc import UniPC, noise_levels
from worldmodel.wan.layers import PATCH, sinusoid
from worldmodel.wan.rope import RopeTable, axis_angles, rotate, split_head

TABLE_TOLERANCE = 1e-5


def table_shift() -> float:
    """Return the shift of the stored tables, which their file's note names; else that of the golden calls."""
    found = re.search(r"shift ([\d.]*\d)", manifest()["files"]["scheduler.safetensors"]["note"])
    return manifest()["tiny_config"]["head"]["sigma_shift"] if found is None else float(found[1])


SHIFT = table_shift()


def cases(pattern: str) -> list[str]:
    return sorted({match.group(1) for key in tensors("scheduler") if (match := re.match(pattern, key))})


def test_dreamzero_noise_levels() -> None:
    golden = tensors("scheduler")
    counts = cases(r"unipc/n(\d+)/sigmas")
    assert counts
    for count in counts:
        levels = noise_levels(int(count), SHIFT)
        want = golden[f"unipc/n{count}/sigmas"]
        assert_close(torch.tensor(levels.sigmas), want, f"{count} steps", atol=TABLE_TOLERANCE, rtol=0)
        assert list(levels.timesteps) == golden[f"unipc/n{count}/timesteps"].tolist()


def test_dreamzero_decoupled_noise_levels() -> None:
    golden = tensors("scheduler")
    finals = cases(r"decoupled/final([\d.]+)/video_sigmas")
    assert finals
    for final in finals:
        want = golden[f"decoupled/final{final}/video_sigmas"]
        levels = noise_levels(len(want) - 1, SHIFT, final_noise=float(final))
        assert_close(torch.tensor(levels.sigmas), want, final, atol=TABLE_TOLERANCE, rtol=0)
        assert list(levels.timesteps) == golden[f"decoupled/final{final}/video_timesteps"].tolist()


@pytest.mark.parametrize("case", cases(r"(unipc_trace[^/]+)/samples"))
def test_dreamzero_unipc_trace(case: str) -> None:
    golden = tensors("scheduler")
    flows, samples = golden[f"{case}/model_outputs"], golden[f"{case}/samples"]
    found = re.fullmatch(r"unipc_trace(\d+)(?:_final([\d.]+))?", case)
    assert found
    assert int(found[1]) == len(flows)
    final_noise = None if found[2] is None else float(found[2])
    sampler = UniPC(noise_levels(len(flows), SHIFT, final_noise=final_noise))
    state = sampler.start(samples[0])
    for index, flow in enumerate(flows):
        state = sampler.advance(state, flow)
        assert_close(state.sample, samples[index + 1], f"step {index}", atol=TABLE_TOLERANCE, rtol=TABLE_TOLERANCE)


def test_dreamzero_static_masks() -> None:
    masks = manifest()["cases"]["step_skip"]["static_masks"]
    assert {int(count) for count in masks} == set(STATIC_STEPS)
    for count, mask in masks.items():
        skipping = static_skipping(int(count))
        assert [skipping.runs(step) for step in range(NUM_STEPS)] == mask


def test_dreamzero_dynamic_decisions() -> None:
    decisions = manifest()["cases"]["step_skip"]["dynamic_decisions"]
    assert decisions
    for case in decisions:
        velocities = iter(tensors("step_skip")[f"{case['name']}/velocities_in_compute_order"])
        skipping, ran = DynamicSkipping(), []
        for step in range(len(case["run"])):
            ran.append(skipping.runs(step))
            if ran[-1]:
                skipping.computed(next(velocities))
        assert ran == case["run"], case["name"]
        assert sum(ran) == case["computed"]


def test_dreamzero_action_and_state_tokens() -> None:
    golden, network = tensors("action_state"), transformer()
    timesteps = golden["timesteps"][0]
    width = network.config.width
    encoding = action_time_encoding(timesteps, width)
    assert_close(encoding, golden[f"action_pos_encoding_{width}"][0], "action time")
    (name,) = [name for name in golden if re.fullmatch(r"action_pos_encoding_\d+_head", name)]
    wide = golden[name][0]
    # Its timesteps are not stored, but they are whole: every row must be that of one of them.
    every = action_time_encoding(torch.arange(1000), wide.shape[1])
    nearest = torch.stack([(every - row).abs().amax(-1).argmin() for row in wide])
    assert_close(every[nearest], wide, "action time, full width")
    # One timestep serves all actions of a forward; the golden actions have one each.
    tokens = [
        network.action_encoder(golden["action"][0, index : index + 1], encoding[index])[0]
        for index in range(len(timesteps))
    ]
    assert_close(torch.stack(tokens), golden["action_features"][0], "action tokens")
    assert_close(network.state_encoder(golden["state"][0]), golden["state_features"][0], "state token")
    assert_close(network.action_decoder(golden["decoder_in"][0]), golden["decoded"][0], "decoded actions")


def test_dreamzero_time_embedding() -> None:
    golden, network = tensors("action_state"), transformer()
    features = sinusoid(golden["timesteps"][0], network.config.freq_dim)
    assert_close(features, golden[f"time_sinusoid_{network.config.freq_dim}"], "sinusoid", atol=1e-6, rtol=0)
    embedding = network.time_embedding(features)
    assert_close(embedding, golden["time_embedding"], "embedding")
    assert_close(network.time_projection(embedding), golden["time_projection"], "projection")
    for index in (0, len(features) - 1):
        constants = network.time_constants(int(golden["timesteps"][0, index]))
        rows = golden["time_projection"][index].view(6, -1) + network.layers[1].modulation[0]
        assert_close(constants.layers[1].attention_shift, rows[0], "modulation")
        assert_close(constants.layers[1].feed_forward_scale, 1 + rows[4], "modulation")


def rope_tables(pattern: str) -> list[tuple[str, list[int]]]:
    """Return the tables whose names match, with the numbers in their names."""
    found = [(name, re.fullmatch(pattern, name)) for name in tensors("rope")]
    tables = [(name, [int(number) for number in match.groups()]) for name, match in found if match]
    assert tables, pattern
    return tables


def test_dreamzero_rope_tables() -> None:
    golden = tensors("rope")

    def check(name: str, positions: torch.Tensor, num_pairs: int) -> None:
        angles = axis_angles(positions, num_pairs)
        got = torch.stack([angles.cos(), angles.sin()], dim=-1)
        assert_close(got, golden[name], name, atol=1e-9, rtol=0)

    for axis, pairs in (
        ("temporal", lambda split: split.time_pairs),
        ("height", lambda split: split.row_pairs),
        ("width", lambda split: split.column_pairs),
        ("state", lambda split: split.time_pairs + split.row_pairs + split.column_pairs),
    ):
        for name, (head_dim, first, last) in rope_tables(rf"hd(\d+)/{axis}_pos(\d+)_(\d+)"):
            check(name, torch.arange(first, last + 1), pairs(split_head(head_dim)))
    for name, (head_dim,) in rope_tables(r"hd(\d+)/action"):
        check(name, golden[f"{name}_positions"], head_dim // 2)
    for name, (head_dim, frames, height, width, start) in rope_tables(
        r"(?:hd|tiny)(\d+)/grid_f(\d+)_h(\d+)_w(\d+)_start(\d+)"
    ):
        table = RopeTable(head_dim=head_dim, grid_height=height, grid_width=width)
        got = torch.view_as_real(table.rotations(start, frames)[:, 0])
        assert_close(got, golden[name], name, atol=1e-9, rtol=0)


def test_dreamzero_rotated_draft() -> None:
    """What the golden example is, is in the note of its file: a draft with actions and one state, after frames."""
    golden = tensors("rope")
    note = manifest()["files"]["rope.safetensors"]["note"]
    grid = re.search(r"\(f(\d+),\s*h(\d+),\s*w(\d+),\s*start_frame (\d+)\) \+ (\d+) action", note)
    assert grid, note
    frames, height, width, start, num_actions = map(int, grid.groups())
    ((name, (head_dim, _)),) = rope_tables(r"hd(\d+)/apply_out_block(\d+)")
    sizes = {"width": head_dim, "num_heads": 1, "latent_frames_per_chunk": frames, "actions_per_chunk": num_actions}
    network = DreamZeroTransformer(replace(transformer().config, **sizes))
    rotations = network._make_rotations(start, frames, PATCH * height, PATCH * width, True)
    assert_close(rotate(golden[f"hd{head_dim}/apply_in"][0], rotations), golden[name][0], "rotated")
