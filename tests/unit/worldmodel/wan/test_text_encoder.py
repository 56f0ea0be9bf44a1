"""The text encoder on the demo checkpoint: rows, truncation, cleaning, and agreement with the transformers loader."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import UMT5EncoderModel

import worldmodel
from worldmodel.checkpoint.diffusers import open_checkpoint
from worldmodel.checkpoint.errors import CheckpointError
from worldmodel.lingbot.published import FULL, TINY
from worldmodel.wan.text_encoder import (
    TextEncoder,
    clean_text,
    default_placement,
    find_tokenizer_problems,
    load_text_encoder,
)
from worldmodel.wan.text_names import TextCleaning, TextPlacement
from worldmodel.wan.umt5 import UMT5Encoder, parse_umt5_config

DEMO = Path(worldmodel.__file__).parent / "data" / "demo_world"
END_TOKEN = 1
BYTE_OFFSET = 3


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return load_text_encoder(open_checkpoint(DEMO))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A demo checkpoint that a test may damage; text components only."""
    for name in ("text_encoder", "tokenizer"):
        shutil.copytree(DEMO / name, tmp_path / name)
    index = json.loads((DEMO / "model_index.json").read_text())
    kept = {name: index[name] for name in ("text_encoder", "tokenizer")}
    (tmp_path / "model_index.json").write_text(json.dumps(kept))
    return tmp_path


def test_rows_are_the_real_tokens_only(encoder: TextEncoder) -> None:
    rows = encoder.encode("a day")
    assert rows.shape == (len("a day") + 1, encoder.width)
    assert rows.dtype == torch.float32
    assert torch.isfinite(rows).all()


def test_rows_equal_the_transformers_loader(encoder: TextEncoder) -> None:
    twin = UMT5EncoderModel.from_pretrained(DEMO / "text_encoder", dtype=torch.float32, local_files_only=True).eval()
    ids = torch.tensor([encoder.token_ids("snow at night")])
    with torch.no_grad():
        expected = twin(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    torch.testing.assert_close(encoder.encode("snow at night"), expected, atol=1e-6, rtol=0)
    assert encoder.num_parameters == sum(parameter.numel() for parameter in twin.parameters())


def test_padding_would_not_change_the_real_rows(encoder: TextEncoder) -> None:
    """The official path pads to the full length with a mask; the mask must make that equal to our short input."""
    twin = UMT5EncoderModel.from_pretrained(DEMO / "text_encoder", dtype=torch.float32, local_files_only=True).eval()
    ids = encoder.token_ids("desert")
    padded = torch.zeros(1, 64, dtype=torch.long)
    padded[0, : len(ids)] = torch.tensor(ids)
    mask = torch.zeros_like(padded)
    mask[0, : len(ids)] = 1
    with torch.no_grad():
        expected = twin(input_ids=padded, attention_mask=mask).last_hidden_state[0, : len(ids)]
    torch.testing.assert_close(encoder.encode("desert"), expected, atol=1e-5, rtol=0)


def test_tokens_are_bytes_then_the_end_token(encoder: TextEncoder) -> None:
    assert encoder.token_ids("ab") == [ord("a") + BYTE_OFFSET, ord("b") + BYTE_OFFSET, END_TOKEN]


def test_an_empty_prompt_is_the_end_token(encoder: TextEncoder) -> None:
    assert encoder.token_ids("  ") == [END_TOKEN]
    assert encoder.encode("").shape == (1, encoder.width)


@pytest.mark.parametrize("text_len", [1, 16, 512])
def test_long_prompts_are_cut_and_keep_the_end_token(text_len: int) -> None:
    encoder = load_text_encoder(open_checkpoint(DEMO), text_len=text_len)
    ids = encoder.token_ids("x" * 1000)
    assert len(ids) == text_len
    assert ids[-1] == END_TOKEN


@pytest.mark.parametrize(
    ("prompt", "whitespace", "official"),
    [
        ("  two\n\t words ", "two words", "two words"),
        ("cafÃ© &amp;amp; bar", "cafÃ© &amp;amp; bar", "café & bar"),
        # ftfy leaves the entities of a text with a tag alone, so both rounds are ours.
        ("<b> bar &amp;amp; pub", "<b> bar &amp;amp; pub", "<b> bar & pub"),
        ("plain", "plain", "plain"),
    ],
)
def test_cleaning(prompt: str, whitespace: str, official: str) -> None:
    assert clean_text(prompt, TextCleaning.WHITESPACE) == whitespace
    assert clean_text(prompt, TextCleaning.OFFICIAL) == official


def test_cleaning_is_applied_before_tokenizing() -> None:
    encoder = load_text_encoder(open_checkpoint(DEMO), cleaning=TextCleaning.OFFICIAL)
    assert encoder.token_ids(" a &amp;  b") == encoder.token_ids("a & b")


def test_rows_can_be_computed_in_bf16(encoder: TextEncoder) -> None:
    reduced = load_text_encoder(open_checkpoint(DEMO), dtype=torch.bfloat16).encode("sunset")
    assert reduced.dtype == torch.float32
    torch.testing.assert_close(reduced, encoder.encode("sunset"), atol=0.1, rtol=0)


def test_text_len_must_be_positive() -> None:
    with pytest.raises(ValueError, match="text_len: expected at least 1, got 0"):
        load_text_encoder(open_checkpoint(DEMO), text_len=0)


def test_a_foreign_encoder_class_is_refused(copy: Path) -> None:
    index = json.loads((copy / "model_index.json").read_text())
    index["text_encoder"][1] = "CLIPTextModel"
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected class UMT5EncoderModel, found CLIPTextModel"):
        load_text_encoder(open_checkpoint(copy))


def test_a_folder_without_a_tokenizer_is_one_clear_error(copy: Path) -> None:
    for file in (copy / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="holds no tokenizer that can be loaded"):
        load_text_encoder(open_checkpoint(copy))


@pytest.mark.parametrize("content", ["{}", "rubbish", "[]", '{"tokenizer_class": 3}'])
def test_a_damaged_tokenizer_is_one_clear_error(copy: Path, content: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / "tokenizer" / name).write_text(content)
    with pytest.raises(CheckpointError, match=r"holds no tokenizer that can be loaded \(.+\)$"):
        load_text_encoder(open_checkpoint(copy))


@pytest.mark.parametrize(("tokenizer_class", "made"), [("PreTrainedTokenizerFast", []), ("BertTokenizer", [9, 8])])
def test_a_tokenizer_that_does_not_end_texts_as_umt5_does_is_refused(
    copy: Path, tokenizer_class: str, made: list[int]
) -> None:
    shutil.rmtree(copy / "tokenizer")
    (copy / "tokenizer").mkdir()
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "[CLS]": 9, "[SEP]": 8}
    content = json.loads(Tokenizer(WordLevel(vocabulary, unk_token="<unk>")).to_str())
    (copy / "tokenizer/tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": tokenizer_class, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (copy / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
    problem = f"tokenizer must make one token of an empty text, the end token, it makes {made}"
    checkpoint = open_checkpoint(copy)
    assert find_tokenizer_problems(checkpoint.component("tokenizer"), 384) == (problem,)
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        load_text_encoder(checkpoint)


def test_a_tokenizer_larger_than_the_embedding_is_refused(copy: Path) -> None:
    file = copy / "tokenizer/tokenizer_config.json"
    config = json.loads(file.read_text())
    config["added_tokens_decoder"]["384"] = config["added_tokens_decoder"]["383"] | {"content": "<one_more>"}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="tokenizer has 385 tokens, text_encoder only 384"):
        load_text_encoder(open_checkpoint(copy))


@pytest.mark.parametrize("placement", list(TextPlacement))
def test_every_placement_gives_the_same_rows(encoder: TextEncoder, placement: TextPlacement) -> None:
    placed = load_text_encoder(open_checkpoint(DEMO), placement=placement)
    assert placed.placement is placement
    assert placed.num_parameters == encoder.num_parameters
    for prompt in ("a snowy town", ""):
        assert torch.equal(placed.encode(prompt), encoder.encode(prompt))


def test_the_default_placement_streams_what_is_large_and_has_a_device_to_go_to() -> None:
    with torch.device("meta"):
        full = UMT5Encoder(parse_umt5_config(FULL.text_encoder))
        tiny = UMT5Encoder(parse_umt5_config(TINY.text_encoder))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert default_placement(full, torch.bfloat16, cuda) is TextPlacement.STREAMED
    assert default_placement(full, torch.bfloat16, cpu) is TextPlacement.RESIDENT
    assert default_placement(tiny, torch.bfloat16, cuda) is TextPlacement.RESIDENT


def test_an_encoder_config_of_another_structure_is_one_clear_error(copy: Path) -> None:
    file = copy / "text_encoder/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "t5"}))
    with pytest.raises(CheckpointError, match="model_type must be 'umt5', got 't5'"):
        load_text_encoder(open_checkpoint(copy))
