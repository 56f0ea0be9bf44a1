"""The golden LingBot model as a checkpoint folder that the real commands load, with everything case 9 needs.

Transformer and VAE are the golden files. The text encoder has one layer that adds nothing: an embedding and a norm
remain, made so that the one prompt it knows gives the stored text rows. Camera path and start image of the case are
files beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, UMT5Config

from tests.support.lingbot_golden import load_json, manifest, tensors

END = "</s>"
NORM_EPS, NORM_WEIGHT = 0.5, 16.0
"""Of the encoder's one norm: with so large an epsilon it can give rows of any length below `NORM_WEIGHT`."""

INNER = 8


def golden_prompt() -> str:
    """Return the prompt whose rows are the text of case 9."""
    return " ".join(_words())


def write_golden_checkpoint(folder: Path) -> None:
    """Write the checkpoint in the diffusers layout."""
    components = {
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "CausalLingBotWorldTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    _write_json(folder / "model_index.json", {"_class_name": "LingBotWorldCausalDMDPipeline", **components})
    _write_json(folder / "scheduler" / "scheduler_config.json", {"flow_shift": manifest()["end_to_end"]["flow_shift"]})
    _write_json(folder / "transformer" / "config.json", _transformer_config())
    save_file(tensors("transformer_weights"), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    _write_json(folder / "vae" / "config.json", load_json("vae_names.json")["diffusers_config"])
    save_file(tensors("vae_weights_diffusers"), folder / "vae" / "diffusion_pytorch_model.safetensors")
    _write_text_encoder(folder)


def write_case_files(folder: Path) -> None:
    """Write `image.png`, `poses.npy` and `intrinsics.npy` of case 9."""
    golden, setup = tensors("case9_end_to_end_official"), manifest()["end_to_end"]
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(golden["image_u8"].numpy()).save(folder / "image.png")
    file_name, _, tensor = setup["pose_tensor"].partition(": ")
    poses = tensors(file_name)[tensor.partition("[")[0]][: setup["frames"]].numpy()
    np.save(folder / "poses.npy", poses)
    np.save(folder / "intrinsics.npy", np.tile(golden["intrinsics_row0"].numpy(), (len(poses), 1)))


def _transformer_config() -> dict[str, Any]:
    sizes, setup = manifest()["transformer_config"], manifest()["end_to_end"]
    return {
        "patch_size": [1, 2, 2],
        "num_attention_heads": sizes["num_heads"],
        "attention_head_dim": sizes["dim"] // sizes["num_heads"],
        "in_channels": sizes["in_dim"],
        "out_channels": sizes["out_dim"],
        "text_dim": sizes["text_dim"],
        "freq_dim": sizes["freq_dim"],
        "ffn_dim": sizes["ffn_dim"],
        "num_layers": sizes["num_layers"],
        "eps": sizes["eps"],
        "sink_size": setup["sink"],
        "num_frames_per_block": setup["chunk"],
        "sliding_window_num_frames": setup["window"],
        "local_attn_size": -1,
        "text_len": sizes["text_len"],
    }


def _words() -> list[str]:
    """Name the rows before the end token's: one word each, no two the same."""
    return [f"word{index}" for index in range(len(tensors("case9_end_to_end_official")["context"]) - 1)]


def _write_text_encoder(folder: Path) -> None:
    rows_LC = tensors("case9_end_to_end_official")["context"].double()
    width = rows_LC.shape[1]
    config = UMT5Config(
        vocab_size=len(rows_LC) + 2,
        d_model=width,
        d_kv=INNER,
        d_ff=INNER,
        num_heads=1,
        num_layers=1,
        layer_norm_epsilon=NORM_EPS,
    )
    square_L1 = rows_LC.square().mean(dim=1, keepdim=True)
    # s * row / sqrt(s^2 * square + eps) * weight = row
    scale_L1 = (NORM_EPS / (NORM_WEIGHT**2 - square_L1)).sqrt()
    embedding = torch.zeros(config.vocab_size, width)
    embedding[: len(rows_LC)] = (scale_L1 * rows_LC).float()
    attention, feed_forward = "encoder.block.0.layer.0", "encoder.block.0.layer.1"
    state = {
        "shared.weight": embedding,
        "encoder.final_layer_norm.weight": torch.full((width,), NORM_WEIGHT),
        f"{attention}.layer_norm.weight": torch.ones(width),
        f"{feed_forward}.layer_norm.weight": torch.ones(width),
        f"{attention}.SelfAttention.relative_attention_bias.weight": torch.zeros(32, 1),
        f"{attention}.SelfAttention.o.weight": torch.zeros(width, INNER),
        f"{feed_forward}.DenseReluDense.wo.weight": torch.zeros(width, INNER),
    }
    state |= {f"{attention}.SelfAttention.{name}.weight": torch.ones(INNER, width) for name in "qkv"}
    state |= {f"{feed_forward}.DenseReluDense.{name}.weight": torch.ones(INNER, width) for name in ("wi_0", "wi_1")}
    _write_json(folder / "text_encoder" / "config.json", json.loads(config.to_json_string()))
    save_file(state, folder / "text_encoder" / "model.safetensors")
    vocabulary = {word: index for index, word in enumerate([*_words(), END, "<unk>", "<pad>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, vocabulary[END])])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token=END)
    fast.save_pretrained(folder / "tokenizer")


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
