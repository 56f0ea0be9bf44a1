"""Prompts as text rows, the most recent ones remembered."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from worldmodel.wan.text_encoder import TextEncoder

REMEMBERED_PROMPTS = 32
"""4 MB each for the published text encoder's longest prompt in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt and its encoded rows [L, text_dim], end token included, padding not."""

    text: str
    rows_LC: torch.Tensor


class PromptEncoder:
    """Encode prompts of one model; a prompt that was encoded lately costs nothing.

    Prompts that are equal once cleaned share their rows. Results are shared, so don't write to them.
    """

    def __init__(self, encoder: TextEncoder, dtype: torch.dtype) -> None:
        self._encoder = encoder
        self._dtype = dtype
        self._recent: OrderedDict[str, torch.Tensor] = OrderedDict()

    def encode(self, text: str) -> Prompt:
        """Return the encoded prompt."""
        key = self._encoder.clean(text)
        rows_LC = self._recent.pop(key, None)
        if rows_LC is None:
            rows_LC = self._encoder.encode(text).to(self._dtype)
            while len(self._recent) >= REMEMBERED_PROMPTS:
                self._recent.popitem(last=False)
        self._recent[key] = rows_LC
        return Prompt(text=text, rows_LC=rows_LC)
