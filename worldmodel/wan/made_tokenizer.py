"""Files of a made-up tokenizer for test checkpoints: the format of the published one, a vocabulary of letter groups.

The published vocabulary is not ours to give away, and random weights have no use for it. Torch-free.
"""

from __future__ import annotations

import itertools
import string

SPECIAL = ("<pad>", "</s>", "<unk>")
END = 1
_WORD_START = "\u2581"


def tokenizer_files(num_tokens: int) -> dict[str, object]:
    """Return the JSON files of a tokenizer with `num_tokens` pieces, by file name. Raises ValueError below 355."""
    return {"tokenizer.json": _tokenizer(_pieces(num_tokens)), "tokenizer_config.json": _config()}


def _pieces(num_tokens: int) -> list[str]:
    """List special tokens, all bytes, printable characters, then groups of letters until there are enough."""
    base = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), _WORD_START, *map(chr, range(0x21, 0x7F))]
    if num_tokens < len(base):
        raise ValueError(f"num_tokens: expected at least {len(base)}, got {num_tokens}")
    groups = (
        "".join(letters) for size in (2, 3, 4) for letters in itertools.product(string.ascii_lowercase, repeat=size)
    )
    return [*base, *itertools.islice(groups, num_tokens - len(base))]


def _tokenizer(pieces: list[str]) -> dict[str, object]:
    # Longer pieces score better per letter, so that words fall into few of them.
    vocabulary = [[piece, 0.0 if number < len(SPECIAL) else -10.0] for number, piece in enumerate(pieces)]
    metaspace = {"type": "Metaspace", "replacement": _WORD_START, "prepend_scheme": "always", "split": True}
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(number, content) for number, content in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [text, end],
            "pair": [text, end, other, end],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [END], "tokens": ["</s>"]}},
        },
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": SPECIAL.index("<unk>"), "vocab": vocabulary, "byte_fallback": True},
    }


def _added_token(number: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _config() -> dict[str, object]:
    return {
        "tokenizer_class": "T5TokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "extra_ids": 0,
        "model_max_length": 512,
    }
