"""The 5B model: its VAE against the diffusers class, its checkpoint layout, and whole calls."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from tests.support.dreamzero_made import random_pictures, write_tiny
from tests.support.dreamzero_sessions import call, close_robot, open_robot, runtime_of
from worldmodel.dreamzero.adapter import create_adapter
from worldmodel.dreamzero.layout import original_wide_vae_name, plan_checkpoint
from worldmodel.dreamzero.pictures import signed_pictures
from worldmodel.dreamzero.published import Scale, published
from worldmodel.dreamzero.wide_vae import (
    WIDE_LATENTS_MEAN,
    WIDE_LATENTS_STD,
    WideObservationVAE,
    wide_vae_name,
)
from worldmodel.runtime import Runtime
from worldmodel.wan.vae_config import VAEConfig

HALVES_TIME = ([False, True, True], [True, True, False])


def random_parameters(module: torch.nn.Module) -> None:
    rng = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=rng) * 0.2


@pytest.mark.parametrize("halves_time", HALVES_TIME)
def test_the_encoder_equals_that_of_diffusers(halves_time: list[bool]) -> None:
    twin = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=48,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        temperal_downsample=halves_time,
        latents_mean=list(WIDE_LATENTS_MEAN),
        latents_std=list(WIDE_LATENTS_STD),
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    ).eval()
    random_parameters(twin)
    config = VAEConfig(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=48,
        dim_mult=(1, 2, 4, 4),
        num_res_blocks=2,
        temperal_downsample=tuple(halves_time),
        latents_mean=WIDE_LATENTS_MEAN,
        latents_std=WIDE_LATENTS_STD,
    )
    ours = WideObservationVAE(config)
    stored = {
        name: tensor for name, tensor in twin.state_dict().items() if name.startswith(("encoder.", "quant_conv."))
    }
    ours.load_state_dict({name: tensor.reshape(ours.state_dict()[name].shape) for name, tensor in stored.items()})
    ours.fold_weights()
    clip = torch.randn(1, 3, 9, 32, 48, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)
    with torch.no_grad():
        mean = twin.encode(clip).latent_dist.mean[0]
    scale = [torch.tensor(each).view(-1, 1, 1, 1) for each in (WIDE_LATENTS_MEAN, WIDE_LATENTS_STD)]
    want = (mean - scale[0]) / scale[1]
    got = ours.encode_clip(clip[0])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.encode_clip(clip[0, :, :1]), want[:, :1], atol=1e-4, rtol=1e-4)


def test_names_of_the_wide_encoder_go_both_ways() -> None:
    config = VAEConfig(
        base_dim=1,
        decoder_base_dim=1,
        z_dim=48,
        dim_mult=(1, 2, 4, 4),
        num_res_blocks=2,
        temperal_downsample=(False, True, True),
        latents_mean=WIDE_LATENTS_MEAN,
        latents_std=WIDE_LATENTS_STD,
    )
    names = list(WideObservationVAE(config).state_dict())
    originals = [original_wide_vae_name(name, 2) for name in names]
    assert [wide_vae_name(original, 2) for original in originals] == names
    assert "encoder.downsamples.1.downsamples.2.time_conv.weight" in originals
    assert "encoder.downsamples.0.downsamples.1.residual.2.weight" in originals


@pytest.mark.parametrize("scale", ["14b", "5b"])
def test_a_planned_checkpoint_is_written_loads_and_acts(tmp_path: Path, scale: str) -> None:
    start = write_tiny(tmp_path, scale)
    adapter = create_adapter(start, lambda stage, fraction, detail: None)
    runtime = runtime_of(adapter, start)
    open_robot(runtime, "a")
    robot = adapter._model.robot
    answers = [call(runtime, "a", index, random_pictures(robot, index), "move") for index in range(5)]
    shapes = [answer.latents.shape[:2] for answer in answers]
    channels = 16 if scale == "14b" else 48
    assert shapes == [(channels, 3), (channels, 2), (channels, 2), (channels, 2), (channels, 3)]
    assert not np.array_equal(answers[1].actions, answers[2].actions)
    # A run begins with what the VAE makes of the tiled picture, at the size that the checkpoint is for.
    tiled = adapter._observations.read(random_pictures(robot, 0), ()).pictures_THW3
    first = adapter._model.vae.encode_clip(signed_pictures(tiled, *adapter._picture_size))
    torch.testing.assert_close(answers[0].latents[:, :1], first, atol=0.05, rtol=0.05)
    # Of the size of a robot's joints; otherwise a state that was added to them, or was not, would not show.
    assert all(0.1 < answer.actions.std() < 10 and np.abs(answer.actions).max() < 50 for answer in answers)


def test_made_weights_warm_up_with_all_steps_and_their_relative_actions_are_added_to_the_state(tmp_path: Path) -> None:
    runtime = Runtime.load(write_tiny(tmp_path, "14b", computed_steps=16), lambda stage, fraction, detail: None)
    robot = runtime.info("dreamzero").robot
    assert robot is not None
    pictures = {key: np.full((robot.image_height, robot.image_width, 3), 90, np.uint8) for key in robot.cameras}
    # Both states are beyond what was seen in training, where the network is shown the same for either.
    near, far = np.linspace(2, 3, 7), np.linspace(4, 9, 7)
    actions = []
    for name, joints in (("near", near), ("far", far)):
        open_robot(runtime, name)
        arrays = {**pictures, "observation/joint_position": joints, "observation/gripper_position": np.zeros(1)}
        actions.append(call(runtime, name, 0, arrays, "move").actions)
        close_robot(runtime, name)
    added = np.append(far - near, 0.0)
    np.testing.assert_allclose(actions[1] - actions[0], np.tile(added, (len(actions[0]), 1)), atol=1e-5)


@pytest.mark.parametrize(("scale", "network_parameters"), [(Scale.FULL_14B, 16.484e9), (Scale.FULL_5B, 5.607e9)])
def test_the_full_plans_have_the_published_sizes(scale: Scale, network_parameters: float) -> None:
    plan = plan_checkpoint(published(scale))
    tensors = [tensor for file in plan.tensor_files for tensor in file.tensors]
    network = sum(tensor.num_elements for tensor in tensors if tensor.name.startswith("action_head.model."))
    assert network == pytest.approx(network_parameters, rel=1e-3)
    text = sum(tensor.num_elements for tensor in tensors if tensor.name.startswith("action_head.text_encoder."))
    assert text == pytest.approx(5.68e9, rel=2e-3)
    index = plan.json_files["model.safetensors.index.json"]
    assert isinstance(index, dict)
    assert set(index["weight_map"]) == {tensor.name for tensor in tensors}
    assert max(file.num_bytes for file in plan.tensor_files) <= 5_000_000_000


def test_the_published_statistics_of_latents_are_those_of_its_vae() -> None:
    """Sums over the 48 channels, each times its number, of the file that is published with the VAE."""
    for numbers, expected in (WIDE_LATENTS_MEAN, -7.6248), (WIDE_LATENTS_STD, 790.8891):
        assert math.fsum(place * number for place, number in enumerate(numbers, 1)) == pytest.approx(expected, abs=5e-5)
