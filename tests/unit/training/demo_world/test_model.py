"""Files of the training, and prompts as the checkpoint's tokenizer reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from training.demo_world.model import CONFIG, TEXT_CONFIG, DemoModel, PromptTable, export
from training.demo_world.prompts import PROMPTS_PER_STYLE, all_prompts, tokenize
from training.demo_world.scene import STYLES
from worldmodel.checkpoint.diffusers import weight_files
from worldmodel.lingbot.transformer_config import read_transformer_config
from worldmodel.wan.umt5 import parse_umt5_config

SHIPPED = Path(__file__).resolve().parents[4] / "worldmodel" / "data" / "demo_world"


def test_token_ids_are_those_of_the_checkpoints_tokenizer() -> None:
    prompts = all_prompts()
    assert len(prompts) == len(STYLES) * PROMPTS_PER_STYLE
    ids, mask = tokenize(prompts[::37])
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "tokenizer")
    for prompt, row, kept in zip(prompts[::37], ids, mask, strict=True):
        assert row[kept].tolist() == tokenizer(prompt)["input_ids"]


def test_a_run_goes_on_from_the_checkpoint_it_wrote(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = DemoModel(), DemoModel()
    export(second, tmp_path)
    export(first, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"transformer", "text_encoder", "poses.safetensors"}
    assert all(path.stat().st_size < 15 << 20 for path in tmp_path.rglob("*"))
    assert {path.stat().st_mode for path in tmp_path.rglob("*.safetensors")} == {
        path.stat().st_mode for path in tmp_path.rglob("*.json")
    }
    assert second.load(tmp_path) == []
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=1 / 128, msg=name)
    assert parse_umt5_config(json.loads((tmp_path / "text_encoder" / "config.json").read_text())) == TEXT_CONFIG
    assert read_transformer_config(json.loads((tmp_path / "transformer" / "config.json").read_text())) == CONFIG
    tensors = {info.name for file in weight_files(tmp_path / "transformer") for info in file.tensors}
    assert tensors == dict(first.transformer.named_parameters()).keys()


def test_a_run_that_ended_while_it_saved_is_gone_on_from(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, loaded = DemoModel(), DemoModel()
    export(model, tmp_path)
    # As when it ended with the readers of poses in place and the text encoder's old folder gone.
    (tmp_path / "finished").mkdir()
    for part in ("transformer", "text_encoder"):
        (tmp_path / part).rename(tmp_path / "finished" / part)
    assert loaded.load(tmp_path) == []
    torch.testing.assert_close(model.transformer.head.modulation, loaded.transformer.head.modulation, atol=0, rtol=1e-2)
    export(loaded, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"transformer", "text_encoder", "poses.safetensors"}


def test_layers_that_a_checkpoint_lacks_change_nothing() -> None:
    torch.manual_seed(1)
    model = DemoModel()
    missing = model.load(SHIPPED)
    assert {name.split(".")[0] for name in missing} <= {"poses", "transformer"}
    last = model.transformer.layers[-1]
    if any(name.startswith("transformer") for name in missing):
        assert not last.self_attn.o.weight.any()
        assert not last.ffn[2].weight.any()


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    for part, stem in (("transformer", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (tmp_path / part).mkdir()
        save_file({"nothing": torch.zeros(2)}, tmp_path / part / f"{stem}.safetensors")
    with pytest.raises(ValueError, match=r"not known \['text_encoder\.nothing', 'transformer\.nothing'\]"):
        DemoModel().load(tmp_path)
    (tmp_path / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no model\*\.safetensors"):
        DemoModel().load(tmp_path)


def test_many_prompts_at_once_are_encoded_as_one_by_one() -> None:
    torch.manual_seed(2)
    model = DemoModel()
    table = PromptTable(model, torch.device("cpu"))
    with torch.no_grad():
        rows, mask = table.encode(torch.tensor([3, 200, 640]))
        for row, kept, prompt in zip(rows, mask, (3, 200, 640), strict=True):
            ids, here = tokenize([all_prompts()[prompt]])
            torch.testing.assert_close(row[kept], model.text_encoder(ids[0][here[0]]), atol=1e-5, rtol=1e-5)
            assert not row[~kept].any()
