"""The prompts that name a style, and their bytes as the checkpoint's tokenizer gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from training.demo_world.network import MAX_PROMPT_ROWS
from training.demo_world.scene import STYLES

WORDS: dict[str, tuple[str, ...]] = {
    "day": ("day", "daytime", "sunny", "bright daylight", "morning", "noon", "clear blue sky", "summer"),
    "night": ("night", "nighttime", "dark", "midnight", "moonlight", "starry night", "evening dark", "night lights"),
    "snow": ("snow", "snowy", "winter", "ice", "frozen", "snowfall", "cold winter", "blizzard"),
    "desert": ("desert", "sand", "dunes", "sahara", "dry sand", "arid", "hot desert", "sandy"),
    "sunset": ("sunset", "dusk", "golden hour", "sundown", "orange sky", "sunset glow", "twilight", "red evening"),
    "autumn": ("autumn", "fall", "october", "falling leaves", "harvest", "autumn leaves", "golden autumn", "november"),
}
TEMPLATES = (
    "{}", "{} world", "a {} town", "a small town, {}", "{} scene", "the town in {}", "walking through a {} town",
    "a village at {}", "{} city street",
)  # fmt: skip
PROMPTS_PER_STYLE = len(WORDS["day"]) * len(TEMPLATES) * 2

_FIRST_BYTE_ID, _END_ID = 3, 1
"""`ByT5Tokenizer`: a byte's id is its value plus 3, 1 ends the text, 0 pads."""


def all_prompts() -> list[str]:
    """Return every prompt, style by style in the order of `STYLES`, `PROMPTS_PER_STYLE` of each."""
    prompts = []
    for style in STYLES:
        for word in WORDS[style]:
            for template in TEMPLATES:
                text = template.format(word)
                prompts += [text, text.capitalize()]
    return prompts


def tokenize(prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Return ids [Q, 64] and where they are text [Q, 64]; longer prompts are cut."""
    ids = torch.zeros(len(prompts), MAX_PROMPT_ROWS, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        tokens = [byte + _FIRST_BYTE_ID for byte in prompt.encode()[: MAX_PROMPT_ROWS - 1]] + [_END_ID]
        row[: len(tokens)] = torch.tensor(tokens)
    return ids, ids != 0
