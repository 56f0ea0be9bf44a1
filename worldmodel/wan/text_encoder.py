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
from pathlib import Path
from typing import Any

import ftfy
import torch
from torch import Tensor

from offload.cuda_runtime import LoadedCudaRuntime
from worldmodel.checkpoint.component import Checkpoint, Component
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.checkpoint.json_file import read_json_object
from worldmodel.checkpoint.loading import Progress
from worldmodel.wan.layer_stream import LayerStream
from worldmodel.wan.text_names import TextCleaning, TextPlacement
from worldmodel.wan.umt5 import UMT5Encoder, UMT5Layer, parse_umt5_config

RESIDENT_BYTES = 2 * 1024**3
"""An encoder up to this size stays on the device unless the configuration says otherwise."""


VOCABULARY_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = (VOCABULARY_FILE, CONFIG_FILE)
"""What a tokenizer can be loaded from; the last alone is enough for one without a vocabulary (bytes)."""

BYTE_TOKENIZER = "ByT5Tokenizer"

JSON_FILES = (VOCABULARY_FILE, CONFIG_FILE, "special_tokens_map.json", "added_tokens.json")


def clean_text(prompt: str, cleaning: TextCleaning) -> str:
    """Clean a prompt (LingBot-World v2 official code, wan/modules/tokenizers.py)."""
    if cleaning is TextCleaning.OFFICIAL:
        prompt = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(prompt.split())


class TextEncoder:
    """A UMT5 encoder with its tokenizer. Build it with `load_text_encoder`.

    `streamed` are the layers to run if they are not those of `model`; `placement` says for people what was chosen.
    Rows go to `device`, None leaves them where they were computed.
    """

    def __init__(
        self,
        model: UMT5Encoder,
        tokenizer: Any,
        *,
        text_len: int,
        cleaning: TextCleaning,
        streamed: LayerStream[UMT5Layer] | None = None,
        placement: TextPlacement = TextPlacement.RESIDENT,
        device: torch.device | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._text_len = text_len
        self._cleaning = cleaning
        self._streamed = streamed
        self.placement = placement
        self._device = device

    @property
    def width(self) -> int:
        """D, the length of a text row."""
        return self._model.config.d_model

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, wherever they are."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def clean(self, prompt: str) -> str:
        """Return the prompt as the tokenizer gets it; prompts that are equal then have equal rows."""
        return clean_text(prompt, self._cleaning)

    def token_ids(self, prompt: str) -> list[int]:
        """Return the ids of the cleaned prompt, at most `text_len`, the end token last."""
        encoded = self._tokenizer(
            self.clean(prompt), truncation=True, max_length=self._text_len, add_special_tokens=True
        )
        return [int(token) for token in encoded["input_ids"]]

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        """Return the prompt's rows, float32 [L, D], 1 <= L <= `text_len`."""
        model = self._model
        ids_L = torch.tensor(self.token_ids(prompt), device=model.shared.weight.device)
        h_LD = model.embed(ids_L).to(model.encoder.final_layer_norm.weight.device)
        layers = model.layers if self._streamed is None else self._streamed
        return model.finish(model.run(h_LD, layers)).to(device=self._device, dtype=torch.float32)


def load_text_encoder(
    checkpoint: Checkpoint,
    *,
    text_len: int = 512,
    cleaning: TextCleaning = TextCleaning.WHITESPACE,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    placement: TextPlacement | None = TextPlacement.RESIDENT,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> TextEncoder:
    """Load the components `text_encoder` and `tokenizer` of a checkpoint. Nothing is fetched.

    `placement` of None: resident up to `RESIDENT_BYTES` and on a CPU, else streamed. `tokenizer` is what
    `load_tokenizer` returned where somebody called it before, None loads it.

    Raises:
        CheckpointError: if a component is missing, of an unsupported class, or damaged.
    """
    if text_len < 1:
        raise ValueError(f"text_len: expected at least 1, got {text_len}")
    component, place = checkpoint.component("text_encoder"), torch.device(device)
    model = empty_text_encoder(component)
    tokenizer = load_tokenizer(checkpoint, model.config.vocab_size) if tokenizer is None else tokenizer
    chosen = placement or default_placement(model, dtype, place)
    home = place if chosen is TextPlacement.RESIDENT else torch.device("cpu")
    component.load_into(model, dtype=dtype, device=home, progress=progress)
    model.requires_grad_(False).eval()
    streamed = _stream(model, place) if chosen is TextPlacement.STREAMED else None
    return TextEncoder(
        model, tokenizer, text_len=text_len, cleaning=cleaning, streamed=streamed, placement=chosen, device=place
    )


def default_placement(model: UMT5Encoder, dtype: torch.dtype, device: torch.device) -> TextPlacement:
    """Choose where an encoder goes if nobody says: on the device if it is small, else streamed."""
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    is_small = num_bytes <= RESIDENT_BYTES
    return TextPlacement.RESIDENT if is_small or device.type == "cpu" else TextPlacement.STREAMED


def _stream(model: UMT5Encoder, device: torch.device) -> LayerStream[UMT5Layer]:
    """Hand the layers to a stream; the last norm goes to the device, the embedding stays on the host."""

    def make_layer() -> UMT5Layer:
        with torch.device("meta"):
            return UMT5Layer(model.config)

    model.encoder.final_layer_norm.to(device)
    runtime = LoadedCudaRuntime(device) if device.type == "cuda" else None
    return LayerStream(model.layers, make_layer, device, runtime)


def empty_text_encoder(component: Component) -> UMT5Encoder:
    """Build the encoder of a component on the meta device. Raises `CheckpointError` for a structure this isn't."""
    if component.class_name != "UMT5EncoderModel":
        raise CheckpointError(component.subject, f"expected class UMT5EncoderModel, found {component.class_name}")
    try:
        config = parse_umt5_config(component.config)
    except ValueError as error:
        raise CheckpointError(component.subject, str(error)) from error
    with torch.device("meta"):
        return UMT5Encoder(config)


def find_tokenizer_problems(component: Component, vocab_size: int | None) -> tuple[str, ...]:
    """Say whether the files of a tokenizer are missing, damaged, or of more tokens than the encoder's `vocab_size`, or
    end texts as no UMT5 tokenizer does.

    None, for an encoder that is not known, leaves the tokens uncounted. A component without a folder needs neither.
    """
    folder = component.folder
    if folder is None:
        return ()
    problems = _file_problems(folder)
    if problems or vocab_size is None:
        return problems
    try:
        _, unfit = _checked_tokenizer(folder, vocab_size)
    except CheckpointError as error:
        return (error.message,)
    return unfit


def _file_problems(folder: Path) -> tuple[str, ...]:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return (f"{folder} has none of {', '.join(TOKENIZER_FILES)}",)
    problems = []
    for name in JSON_FILES:
        try:
            if (folder / name).is_file():
                read_json_object(folder / name)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        return tuple(problems)
    if (folder / VOCABULARY_FILE).is_file():
        problems += _vocabulary_problems(folder / VOCABULARY_FILE)
    else:
        problems += _class_problems(folder)
    return tuple(problems)


def _class_problems(folder: Path) -> list[str]:
    """Refuse a missing vocabulary: transformers makes up one of four tokens, in which all prompts are much the same."""
    found = read_json_object(folder / CONFIG_FILE).get("tokenizer_class")
    if found == BYTE_TOKENIZER:
        return []
    return [f"{folder} has no {VOCABULARY_FILE}, which only a {BYTE_TOKENIZER} does without"]


def _vocabulary_problems(file: Path) -> list[str]:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # The library has no error class of its own.
        return [f"{file}: is no tokenizer ({_first_line(error)})"]
    return []


def load_tokenizer(checkpoint: Checkpoint, vocab_size: int) -> Any:
    """Load the component `tokenizer`, for an encoder that knows `vocab_size` tokens. Nothing is fetched.

    It takes seconds at most, so a load does it before the weights. Raises `CheckpointError`.
    """
    tokenizer, unfit = _checked_tokenizer(checkpoint.component("tokenizer").folder, vocab_size)
    if unfit:
        raise CheckpointError(checkpoint.name, *unfit)
    return tokenizer


def _checked_tokenizer(folder: Path | None, vocab_size: int) -> tuple[Any, tuple[str, ...]]:
    """Load the tokenizer of a folder, and say what of it does not suit the encoder.

    It must not have tokens that the encoder does not know, and of an empty text it must make one, the end token, as
    UMT5 was trained: one of another kind puts others around every prompt, or makes nothing of an empty one.
    """
    tokenizer = _load_tokenizer(folder)
    problems = []
    if len(tokenizer) > vocab_size:
        problems.append(f"tokenizer has {len(tokenizer)} tokens, text_encoder only {vocab_size}")
    of_nothing = [int(token) for token in tokenizer("", add_special_tokens=True)["input_ids"]]
    if len(of_nothing) != 1 or tokenizer.eos_token_id not in (None, *of_nothing):
        problems.append(f"tokenizer must make one token of an empty text, the end token, it makes {of_nothing}")
    return tokenizer, tuple(problems)


def _load_tokenizer(folder: Path | None) -> Any:
    """Load the tokenizer of a folder; a component without files has the byte tokenizer, which needs none."""
    # Takes seconds to import, and not everybody who imports this file needs a tokenizer.
    from transformers import AutoTokenizer, ByT5Tokenizer

    if folder is None:
        return ByT5Tokenizer()
    with _quiet_tokenizers():
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # Whatever the library raises comes from files that nobody has checked.
            reason = _first_line(error)
            raise CheckpointError(str(folder), f"holds no tokenizer that can be loaded ({reason})") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


@contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Keep the library's advice on tokenizer classes and legacy modes out of our log and warnings."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
