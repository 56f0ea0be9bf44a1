"""The text encoder on CUDA: every placement gives the same rows, again and again, and pages are let go in the end."""

from __future__ import annotations

import gc

import pytest
import torch

from worldmodel.lingbot.empty_model import random_checkpoint
from worldmodel.wan.text_encoder import TextEncoder, load_text_encoder
from worldmodel.wan.text_names import TextPlacement

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PROMPTS = ("a small town, day", "snow " * 100, "")


def load(placement: TextPlacement) -> TextEncoder:
    checkpoint = random_checkpoint("lingbot-world-v2-tiny", 1)
    return load_text_encoder(checkpoint, dtype=torch.float32, device=CUDA, placement=placement)


@pytest.mark.parametrize("placement", [TextPlacement.STREAMED, TextPlacement.CPU])
def test_every_placement_gives_the_same_rows(placement: TextPlacement) -> None:
    resident, other = load(TextPlacement.RESIDENT), load(placement)
    for prompt in (*PROMPTS, *PROMPTS):
        rows = other.encode(prompt)
        assert rows.device.type == "cuda"
        torch.testing.assert_close(rows, resident.encode(prompt), atol=1e-4, rtol=1e-4)


def test_streamed_pages_can_be_locked_again_after_the_encoder_is_gone() -> None:
    for _ in range(3):
        encoder = load(TextPlacement.STREAMED)
        encoder.encode("again")
        torch.cuda.synchronize()
        del encoder
        gc.collect()
