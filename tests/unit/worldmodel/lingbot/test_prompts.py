"""Recent prompts: encoded once, shared where cleaning makes them equal, and bounded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from worldmodel.lingbot.prompts import REMEMBERED_PROMPTS, PromptEncoder
from worldmodel.wan.text_encoder import TextEncoder
from worldmodel.wan.text_names import TextCleaning


class CountingEncoder(TextEncoder):
    def __init__(self, cleaning: TextCleaning = TextCleaning.WHITESPACE) -> None:
        super().__init__(SimpleNamespace(), None, text_len=8, cleaning=cleaning)  # type: ignore[arg-type]
        self.encoded: list[str] = []

    def encode(self, prompt: str) -> torch.Tensor:
        self.encoded.append(prompt)
        return torch.full((1, 4), float(len(self.encoded)))


def test_a_recent_prompt_is_not_encoded_again() -> None:
    encoder = CountingEncoder()
    prompts = PromptEncoder(encoder, torch.bfloat16)
    first, again = prompts.encode("a town"), prompts.encode("a town")
    assert encoder.encoded == ["a town"]
    assert again.rows_LC is first.rows_LC
    assert first.rows_LC.dtype == torch.bfloat16


@pytest.mark.parametrize(("cleaning", "num_encoded"), [(TextCleaning.WHITESPACE, 2), (TextCleaning.OFFICIAL, 1)])
def test_prompts_share_rows_if_cleaning_makes_them_equal(cleaning: TextCleaning, num_encoded: int) -> None:
    encoder = CountingEncoder(cleaning)
    prompts = PromptEncoder(encoder, torch.float32)
    texts = ("a & b", "  a &\n b ", "a &amp; b")
    assert [prompts.encode(text).text for text in texts] == list(texts)
    assert len(encoder.encoded) == num_encoded


def test_the_prompt_not_used_for_longest_is_forgotten() -> None:
    encoder = CountingEncoder()
    prompts = PromptEncoder(encoder, torch.float32)
    for number in range(REMEMBERED_PROMPTS):
        prompts.encode(f"p{number}")
    prompts.encode("p0")
    prompts.encode("new")
    encoder.encoded.clear()
    for text in ("p0", "new", "p2", "p1"):
        prompts.encode(text)
    assert encoder.encoded == ["p1"]
