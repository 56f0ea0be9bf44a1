"""Prompts of a robot: from what a request says to token ids and text rows, the most recent ones remembered.

Shapes: L tokens of a prompt, its end token included. Source: DreamZero official code, its language transforms.
"""

from __future__ import annotations

import ast
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

REMEMBERED_PROMPTS = 32
MAX_LITERAL_CHARS = 4096


class Encoder(Protocol):
    """Text to rows; `worldmodel.wan.text_encoder.TextEncoder`."""

    def token_ids(self, prompt: str) -> list[int]: ...

    def encode(self, prompt: str) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt as the network knows it: two with the same ids are the same. `rows_LC` has no padding."""

    token_ids: tuple[int, ...]
    rows_LC: Tensor


def frame_prompt(prompt: str, template: str) -> str:
    """Put a request's prompt into the robot's template, in lower case.

    A prompt that is written as a Python literal of a text stands for that, a list or a tuple for its first element.
    Any other value is left as it is written: that of a set, for one, is ordered differently in every process.
    """
    return template.replace("{prompt}", _value_of_literal(prompt).lower())


def _value_of_literal(prompt: str) -> str:
    if len(prompt) > MAX_LITERAL_CHARS:
        return prompt
    try:
        with warnings.catch_warnings():
            # Words that are almost a literal, such as "2in 1", are no concern of the operator's.
            warnings.simplefilter("ignore", SyntaxWarning)
            value = ast.literal_eval(prompt)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        return value if isinstance(value, str) else prompt
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return prompt


class PromptEncoder:
    """Encode framed prompts; one that was encoded lately costs nothing. Results are shared, so don't write to them."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._recent: OrderedDict[str, Prompt] = OrderedDict()

    def encode(self, text: str) -> Prompt:
        """Return the ids and rows of a framed prompt."""
        prompt = self._recent.pop(text, None)
        if prompt is None:
            prompt = Prompt(token_ids=tuple(self._encoder.token_ids(text)), rows_LC=self._encoder.encode(text))
            while len(self._recent) >= REMEMBERED_PROMPTS:
                self._recent.popitem(last=False)
        self._recent[text] = prompt
        return prompt
