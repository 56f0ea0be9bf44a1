"""The parts of the demo checkpoint that are trained together, and their folders in the diffusers layout.

The transformer is the served class, so that a checkpoint that trains is one that loads.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from training.demo_world import scene
from training.demo_world.network import Geometry, TrainingNetwork
from training.demo_world.prompts import all_prompts, tokenize
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig

CONFIG = TransformerConfig(
    num_layers=9,
    num_heads=4,
    head_dim=64,
    ffn_dim=704,
    in_channels=36,
    out_channels=16,
    text_dim=64,
    freq_dim=256,
    eps=1e-6,
    latent_frames_per_chunk=3,
    sink_latent_frames=9,
    window_latent_frames=9,
)
TEXT_CONFIG = UMT5Config(
    vocab_size=384, d_model=CONFIG.text_dim, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
    feed_forward_proj="gated-gelu", dropout_rate=0.0, relative_attention_num_buckets=32, tie_word_embeddings=False,
)  # fmt: skip
GEOMETRY = Geometry(
    latent_height=scene.HEIGHT // 8,
    latent_width=scene.WIDTH // 8,
    intrinsics=(scene.FOCAL_X, scene.FOCAL_Y, scene.CENTRE_X, scene.CENTRE_Y),
)
SIGMAS = (1.0, 0.9375, 5 / 6, 0.625)
"""Noise levels of the served sampler: 1, 3/4, 1/2, 1/4 under the shift of 5."""

_PART_BYTES = 14 << 20


class DemoModel(nn.Module):
    """Transformer and text encoder, trained as one."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = LingBotTransformer(CONFIG)
        self.text_encoder = UMT5EncoderModel(TEXT_CONFIG)
        _initialise(self.transformer)

    def network(self) -> TrainingNetwork:
        return TrainingNetwork(self.transformer, GEOMETRY)

    def restore(self, folder: Path) -> None:
        """Load the weights of an earlier run. Raises ValueError naming what is missing or not ours."""
        found, wanted = load_parts(folder, "weights"), dict(self.named_parameters())
        if set(found) != set(wanted):
            missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
            raise ValueError(f"{folder}: weights do not fit the model: missing {missing}, not known {extra}")
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.copy_(found[name])


def _initialise(transformer: LingBotTransformer) -> None:
    """Start linears evenly and the head, and with it the flow, at zero; the camera acts gently at first."""
    for name, parameter in transformer.named_parameters():
        if name.endswith("modulation"):
            nn.init.normal_(parameter, std=CONFIG.width**-0.5)
        elif parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter.flatten(1))
        elif "norm" in name and name.endswith("weight"):
            nn.init.ones_(parameter)
        else:
            nn.init.zeros_(parameter)
    for stack in (transformer.text_embedding, transformer.time_embedding):
        for linear in stack:
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=0.02)
    for layer in transformer.layers:
        nn.init.normal_(layer.cam_scale_layer.weight, std=0.005)
        nn.init.normal_(layer.cam_shift_layer.weight, std=0.01)
    nn.init.zeros_(transformer.head.head.weight)


class PromptTable:
    """All prompts of the training, ready to be encoded."""

    def __init__(self, model: DemoModel, device: torch.device) -> None:
        self._model = model
        ids, mask = tokenize(all_prompts())
        self._ids, self._mask = ids.to(device), mask.to(device)

    def rows(self, network: TrainingNetwork, prompts_G: Tensor) -> tuple[Tensor, Tensor]:
        """Encode and embed the prompts of segments; each different one once."""
        distinct, position_G = prompts_G.unique(return_inverse=True)
        ids, mask = self._ids[distinct], self._mask[distinct]
        rows = self._model.text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        text, bias = network.text_rows(rows * mask[..., None].to(rows.dtype), mask)
        return text[position_G], bias[position_G]


# ---------------------------------------------------------------- files


def save_parts(tensors: dict[str, Tensor], folder: Path, name: str) -> None:
    """Write float32 tensors to `name-0.safetensors` and so on, each below 15 MiB."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        content = tensor.detach().float().cpu().contiguous()
        if size and size + content.nbytes > _PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][key] = content
        size += content.nbytes
    for index, part in enumerate(parts):
        save_file(part, folder / f"{name}-{index}.safetensors")


def load_parts(folder: Path, name: str) -> dict[str, Tensor]:
    """Read what `save_parts` wrote. Raises FileNotFoundError if there is nothing of that name."""
    paths = sorted(folder.glob(f"{name}-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no {name}-*.safetensors")
    return {key: tensor for path in paths for key, tensor in load_file(path).items()}


def export(model: DemoModel, folder: Path) -> None:
    """Write the transformer and the text encoder as folders of a diffusers checkpoint, in bfloat16."""
    target = folder / "transformer"
    target.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in model.transformer.state_dict().items()
    }
    save_file(state, target / "diffusion_pytorch_model.safetensors")
    config = {
        "_class_name": "CausalLingBotWorldTransformer3DModel",
        "_diffusers_version": "0.35.0.dev0",
        "patch_size": [1, 2, 2],
        "num_attention_heads": CONFIG.num_heads,
        "attention_head_dim": CONFIG.head_dim,
        "in_channels": CONFIG.in_channels,
        "out_channels": CONFIG.out_channels,
        "text_dim": CONFIG.text_dim,
        "freq_dim": CONFIG.freq_dim,
        "ffn_dim": CONFIG.ffn_dim,
        "num_layers": CONFIG.num_layers,
        "cross_attn_norm": True,
        "eps": CONFIG.eps,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
        "qk_norm": "rms_norm_across_heads",
        "sink_size": CONFIG.sink_latent_frames,
        "num_frames_per_block": CONFIG.latent_frames_per_chunk,
        "sliding_window_num_frames": 18,
        "local_attn_size": -1,
    }
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model.text_encoder.to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    model.text_encoder.float()
