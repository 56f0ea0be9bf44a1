"""DreamZero sampler, golden cases 2c, 3, 4 and 5: noise levels, UniPC, skipped steps, action tokens, rotations."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.dreamzero_golden import assert_close, manifest, tensors
from tests.support.dreamzero_network import transformer
from worldmodel.dreamzero.step_skip import NUM_STEPS, STATIC_STEPS, DynamicSkipping, static_skipping
from worldmodel.dreamzero.transformer_layers import action_time_encoding
from worldmodel.dreamzero.unipc import UniPC, noise_levels
from worldmodel.wan.layers import sinusoid
from worldmodel.wan.rope import RopeTable, axis_angles, rotate, split_head

SHIFT = 5.0
TABLE_TOLERANCE = 1e-5


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
        levels = noise_levels(NUM_STEPS, SHIFT, final_noise=float(final))
        want = golden[f"decoupled/final{final}/video_sigmas"]
        assert_close(torch.tensor(levels.sigmas), want, final, atol=TABLE_TOLERANCE, rtol=0)
        assert list(levels.timesteps) == golden[f"decoupled/final{final}/video_timesteps"].tolist()


@pytest.mark.parametrize(("case", "final_noise"), [("unipc_trace16", None), ("unipc_trace16_final0.8", 0.8)])
def test_dreamzero_unipc_trace(case: str, final_noise: float | None) -> None:
    golden = tensors("scheduler")
    flows, samples = golden[f"{case}/model_outputs"], golden[f"{case}/samples"]
    sampler = UniPC(noise_levels(NUM_STEPS, SHIFT, final_noise=final_noise))
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
    assert_close(encoding, golden["action_pos_encoding_64"][0], "action time")
    wide = golden["action_pos_encoding_5120_head"][0]
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
    assert_close(features, golden["time_sinusoid_256"], "sinusoid", atol=1e-6, rtol=0)
    embedding = network.time_embedding(features)
    assert_close(embedding, golden["time_embedding"], "embedding")
    assert_close(network.time_projection(embedding), golden["time_projection"], "projection")
    for index in (0, len(features) - 1):
        constants = network.time_constants(int(golden["timesteps"][0, index]))
        rows = golden["time_projection"][index].view(6, -1) + network.layers[1].modulation[0]
        assert_close(constants.layers[1].attention_shift, rows[0], "modulation")
        assert_close(constants.layers[1].feed_forward_scale, 1 + rows[4], "modulation")


def test_dreamzero_rope_tables() -> None:
    golden, split = tensors("rope"), split_head(128)

    def check(name: str, positions: torch.Tensor, num_pairs: int) -> None:
        angles = axis_angles(positions, num_pairs)
        got = torch.stack([angles.cos(), angles.sin()], dim=-1)
        assert_close(got, golden[f"hd128/{name}"], name, atol=1e-9, rtol=0)

    check("temporal_pos0_11", torch.arange(12), split.time_pairs)
    check("height_pos0_21", torch.arange(22), split.row_pairs)
    check("width_pos0_39", torch.arange(40), split.column_pairs)
    check("state_pos0_4", torch.arange(5), 64)
    check("action", golden["hd128/action_positions"], 64)
    for name, head_dim, height, width in (
        ("hd128/grid_f2_h2_w3_start3", 128, 2, 3),
        ("tiny16/grid_f2_h2_w4_start3", 16, 2, 4),
    ):
        table = RopeTable(head_dim=head_dim, grid_height=height, grid_width=width)
        got = torch.view_as_real(table.rotations(3, 2)[:, 0])
        assert_close(got, golden[name], name, atol=1e-9, rtol=0)


def test_dreamzero_rotated_draft() -> None:
    """The golden example has a draft at index 1: 2 frames of 2 x 3 tokens from frame 3, 24 actions, one state."""
    golden, network = tensors("rope"), transformer()
    x_TND = golden["hd128/apply_in"][0]
    network.config = network.config.__class__(
        **{
            **{name: getattr(network.config, name) for name in network.config.__dataclass_fields__},
            "width": 128,
            "num_heads": 1,
        }
    )
    rotations = network._make_rotations(3, 2, 4, 6, True)
    assert_close(rotate(x_TND, rotations), golden["hd128/apply_out_block1"][0], "rotated")
