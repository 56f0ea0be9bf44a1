"""Prompt to text rows: cleaning, tokenizer and the UMT5 encoder.

Shape suffixes: L real tokens of the prompt (end token included), D text width.

The model attends to `text_len` rows of which those past the prompt are zero (LingBot-World v2 official code,
wan/modules/t5.py); only the real rows are returned, padding is the transformer's business.
"""

from __future__ import annotations

import html
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import ftfy
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, ByT5Tokenizer

from worldmodel.checkpoint.component import Checkpoint, Component
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.loading import Progress
from worldmodel.wan.umt5 import UMT5Encoder, parse_umt5_config


class TextCleaning(StrEnum):
    """How a prompt is cleaned before it is cut into tokens.

    WHITESPACE: runs of white space become one space. OFFICIAL: repairs broken Unicode and unescapes HTML twice before.
    """

    WHITESPACE = "whitespace"
    OFFICIAL = "official"


def clean_text(prompt: str, cleaning: TextCleaning) -> str:
    """Clean a prompt (LingBot-World v2 official code, wan/modules/tokenizers.py)."""
    if cleaning is TextCleaning.OFFICIAL:
        prompt = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(prompt.split())


class TextEncoder:
    """A UMT5 encoder with its tokenizer. Build it with `load_text_encoder`."""

    def __init__(self, model: UMT5Encoder, tokenizer: Any, *, text_len: int, cleaning: TextCleaning) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._text_len = text_len
        self._cleaning = cleaning

    @property
    def width(self) -> int:
        """D, the length of a text row."""
        return int(self._model.config.d_model)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def token_ids(self, prompt: str) -> list[int]:
        """Return the ids of the cleaned prompt, at most `text_len`, the end token last."""
        encoded = self._tokenizer(
            clean_text(prompt, self._cleaning), truncation=True, max_length=self._text_len, add_special_tokens=True
        )
        return [int(token) for token in encoded["input_ids"]]

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        """Return the prompt's rows, float32 [L, D] on the encoder's device, 1 <= L <= `text_len`."""
        ids_L = torch.tensor(self.token_ids(prompt), device=self._model.shared.weight.device)
        return self._model(ids_L).float()


def load_text_encoder(
    checkpoint: Checkpoint,
    *,
    text_len: int = 512,
    cleaning: TextCleaning = TextCleaning.WHITESPACE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> TextEncoder:
    """Load the components `text_encoder` and `tokenizer` of a checkpoint. Nothing is fetched.

    Raises:
        CheckpointError: if a component is missing, of an unsupported class, or damaged.
    """
    if text_len < 1:
        raise ValueError(f"text_len: expected at least 1, got {text_len}")
    model = _load_model(checkpoint.component("text_encoder"), dtype, device, progress)
    tokenizer = _load_tokenizer(checkpoint.component("tokenizer").folder)
    vocabulary = model.config.vocab_size
    if len(tokenizer) > vocabulary:
        raise CheckpointError(checkpoint.name, f"tokenizer has {len(tokenizer)} tokens, text_encoder only {vocabulary}")
    return TextEncoder(model, tokenizer, text_len=text_len, cleaning=cleaning)


def _load_model(
    component: Component, dtype: torch.dtype, device: torch.device | str, progress: Progress | None
) -> UMT5Encoder:
    if component.class_name != "UMT5EncoderModel":
        raise CheckpointError(component.subject, f"expected class UMT5EncoderModel, found {component.class_name}")
    try:
        config = parse_umt5_config(component.config)
    except ValueError as error:
        raise CheckpointError(component.subject, str(error)) from error
    with torch.device("meta"):
        model = UMT5Encoder(config)
    component.load_into(model, dtype=dtype, device=device, progress=progress)
    return model.requires_grad_(False).eval()


def _load_tokenizer(folder: Path | None) -> Any:
    """Load the tokenizer of a folder; a component without files has the byte tokenizer, which needs none."""
    if folder is None:
        return ByT5Tokenizer()
    with _quiet_tokenizers():
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
            raise CheckpointError(str(folder), f"holds no tokenizer that can be loaded ({error})") from error


@contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Keep the library's advice on tokenizer classes and legacy modes out of our log and warnings."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
