"""Names of the original layout: against the golden map, there and back, and unknown ones left alone."""

from __future__ import annotations

import pytest
import torch

from tests.support.lingbot_golden import load_json
from worldmodel.lingbot.published import TINY
from worldmodel.wan.original_names import original_umt5_name, original_vae_name, umt5_name, vae_name
from worldmodel.wan.umt5 import UMT5Encoder, parse_umt5_config


def test_vae_names_are_those_of_the_golden_map() -> None:
    expected = load_json("vae_names.json")["official_to_diffusers_names"]
    assert len(expected) == 194
    assert {name: vae_name(name) for name in expected} == expected
    assert {original_vae_name(ours): ours for ours in expected.values()} == expected


def test_umt5_names_go_there_and_back() -> None:
    with torch.device("meta"):
        names = set(UMT5Encoder(parse_umt5_config(TINY.text_encoder)).state_dict()) - {"encoder.embed_tokens.weight"}
    originals = {original_umt5_name(name) for name in names}
    assert {umt5_name(original) for original in originals} == names
    assert {"token_embedding.weight", "norm.weight", "blocks.1.ffn.gate.0.weight"} <= originals
    assert umt5_name("blocks.0.ffn.fc1.weight") == "encoder.block.0.layer.1.DenseReluDense.wi_1.weight"
    assert umt5_name("blocks.0.pos_embedding.embedding.weight").endswith("relative_attention_bias.weight")


@pytest.mark.parametrize("name", ["decoder.upsample.0.weight", "blocks.0.extra.weight", "anything"])
def test_unknown_names_stay(name: str) -> None:
    assert vae_name(name) == name
    assert umt5_name(name) == name


def test_names_that_are_not_ours_have_no_original() -> None:
    with pytest.raises(ValueError, match="no original name is known for VAE tensor x"):
        original_vae_name("x")
    with pytest.raises(ValueError, match="no original name is known for text encoder tensor x"):
        original_umt5_name("x")
