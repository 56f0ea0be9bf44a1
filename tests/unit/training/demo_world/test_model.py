"""Files of the training, and prompts as the checkpoint's tokenizer reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from training.demo_world.model import CONFIG, DemoModel, export, load_parts, save_parts
from training.demo_world.prompts import PROMPTS_PER_STYLE, all_prompts, tokenize
from training.demo_world.scene import STYLES

CHECKPOINT = Path(__file__).resolve().parents[4] / "worldmodel" / "data" / "demo_world"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def test_token_ids_are_those_of_the_checkpoints_tokenizer() -> None:
    prompts = all_prompts()
    assert len(prompts) == len(STYLES) * PROMPTS_PER_STYLE
    ids, mask = tokenize(prompts[::37])
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT / "tokenizer")
    for prompt, row, kept in zip(prompts[::37], ids, mask, strict=True):
        assert row[kept].tolist() == tokenizer(prompt)["input_ids"]


def test_weights_return_from_small_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = DemoModel(), DemoModel()
    save_parts(dict(first.named_parameters()), tmp_path, "weights")
    assert all(path.stat().st_size < 15 << 20 for path in tmp_path.iterdir())
    second.restore(tmp_path)
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    save_parts({"transformer.nothing": torch.zeros(2)}, tmp_path, "weights")
    with pytest.raises(ValueError, match=r"not known \['transformer\.nothing'\]"):
        DemoModel().restore(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no other-"):
        load_parts(tmp_path, "other")


def test_what_is_exported_has_the_names_and_sizes_of_the_shipped_checkpoint(tmp_path: Path) -> None:
    export(DemoModel(), tmp_path)
    ours, shipped = (
        {name: tensor.shape for name, tensor in load_file(folder / WEIGHTS).items()}
        for folder in (tmp_path, CHECKPOINT)
    )
    assert {n: s for n, s in ours.items() if n in shipped} == shipped
    assert {name.split(".")[1] for name in set(ours) - set(shipped)} <= {str(i) for i in range(CONFIG.num_layers)}
