"""Cases 7 and 8 of the LingBot golden set: the VAE as whole clip and as stream, the image condition, the model input.

Made with the official code's VAE in float32 on a CPU; tolerance 1e-5 absolute as the manifest says.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.lingbot_golden import assert_close, load_json, tensors
from worldmodel.lingbot.condition import encode_clip_condition, next_condition, start_condition
from worldmodel.wan.image import resize_unit_image
from worldmodel.wan.vae import ConvPath, VAECache, WanVAE

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=list(ConvPath))
def vae(request: pytest.FixtureRequest) -> WanVAE:
    model = WanVAE.from_config(load_json("vae_names.json")["diffusers_config"])
    model.load_state_dict(tensors("vae_weights_diffusers"))
    model.fold_weights(request.param)
    return model


@pytest.fixture(scope="module")
def case() -> dict[str, Tensor]:
    return tensors("case7_8_vae")


def latent_frames_per_chunk(case: dict[str, Tensor]) -> int:
    return int(case["compose.noise_block0"].shape[1])


def test_lingbot_vae_has_every_official_parameter(vae: WanVAE) -> None:
    names = load_json("vae_names.json")["official_to_diffusers_names"]
    assert set(vae.state_dict()) == set(names.values())


def test_lingbot_vae_encode_whole_clip(vae: WanVAE, case: dict[str, Tensor]) -> None:
    latent, _ = vae.encode(case["video"][None])
    assert_close(latent[0], case["encode.normalised_mu"], TOLERANCE, "encode.normalised_mu")


def test_lingbot_vae_decode_whole_clip(vae: WanVAE, case: dict[str, Tensor]) -> None:
    frames, _ = vae.decode(case["latent_normalised"][None])
    assert_close(frames[0], case["decode.whole_clip_unclamped"], TOLERANCE, "decode.whole_clip_unclamped")


def test_lingbot_vae_decode_stream(vae: WanVAE, case: dict[str, Tensor]) -> None:
    step = latent_frames_per_chunk(case)
    cache: VAECache | None = None
    chunks = []
    for latent in case["latent_normalised"].split(step, dim=1):
        frames, cache = vae.decode(latent[None], cache)
        chunks.append(frames[0])
    expected = [int(case[f"decode.stream_block{index}_num_frames"]) for index in range(len(chunks))]
    assert [chunk.shape[1] for chunk in chunks] == expected
    assert_close(torch.cat(chunks, dim=1), case["decode.whole_clip_unclamped"], TOLERANCE, "streamed frames")


def test_lingbot_vae_encode_stream(vae: WanVAE, case: dict[str, Tensor]) -> None:
    video = case["video"][None]
    step = 4 * latent_frames_per_chunk(case)
    latent, cache = vae.encode(video[:, :, : step - 3])
    chunks = [latent]
    for frames in video[:, :, step - 3 :].split(step, dim=2):
        latent, cache = vae.encode(frames, cache)
        chunks.append(latent)
    assert_close(torch.cat(chunks, dim=2)[0], case["encode.normalised_mu"], TOLERANCE, "streamed latents")


def test_lingbot_image_condition_whole_clip(vae: WanVAE, case: dict[str, Tensor]) -> None:
    expected = case["condition.latent_normalised"]
    condition = encode_clip_condition(vae, case["condition.image"], expected.shape[1])
    assert_close(condition[4:], expected, TOLERANCE, "condition.latent_normalised")


def test_lingbot_image_condition_stream_composes_the_model_input(vae: WanVAE, case: dict[str, Tensor]) -> None:
    state = start_condition(case["condition.image"])
    num_chunks = sum(key.startswith("compose.noise_block") for key in case)
    assert num_chunks, "no composed chunk"
    for index in range(num_chunks):
        noise = case[f"compose.noise_block{index}"]
        condition, state = next_condition(vae, state, noise.shape[1])
        expected = case[f"compose.model_input_block{index}"]
        assert_close(torch.cat([noise, condition]), expected, TOLERANCE, f"compose.model_input_block{index}")


def test_lingbot_image_resize(case: dict[str, Tensor]) -> None:
    names = [key for key in case if key.startswith("resize.output_")]
    assert names, "no resized image"
    for name in names:
        height, width = case[name].shape[1:]
        assert_close(resize_unit_image(case["resize.input_01"], height, width), case[name], TOLERANCE, name)
