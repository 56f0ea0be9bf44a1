"""The parts of the demo checkpoint that are trained together, and their folders in the diffusers layout.

Transformer and text encoder are the served classes, so that a checkpoint that trains is one that loads. A run is
resumed from the checkpoint it wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.demo_world import scene, text
from training.demo_world.files import located, replacing, write_tensors
from training.demo_world.network import Geometry, TrainingNetwork
from training.demo_world.poses import PoseHeads
from training.demo_world.prompts import all_prompts, tokenize
from worldmodel.lingbot.transformer import Layer, LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.umt5 import UMT5Config, UMT5Encoder, distance_buckets

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
TEXT_CONFIG = UMT5Config(d_model=CONFIG.text_dim, d_ff=128, d_kv=16, num_heads=4, num_layers=2, vocab_size=384)
GEOMETRY = Geometry(
    latent_height=scene.HEIGHT // 8,
    latent_width=scene.WIDTH // 8,
    intrinsics=(scene.FOCAL_X, scene.FOCAL_Y, scene.CENTRE_X, scene.CENTRE_Y),
)
SIGMAS = (1.0, 0.9375, 5 / 6, 0.625)
"""Noise levels of the served sampler: 1, 3/4, 1/2, 1/4 under the shift of 5."""
HISTORY_POSE_LAYERS, CHUNK_POSE_LAYERS = 4, 6
"""After how many layers the pose of history is read from the residual stream, and that of a chunk to predict."""

_SHARD_BYTES = 14 << 20
_TRANSFORMER, _TEXT_ENCODER, _POSES = "transformer", "text_encoder", "poses.safetensors"
_STEMS = {_TRANSFORMER: "diffusion_pytorch_model", _TEXT_ENCODER: "model"}


class DemoModel(nn.Module):
    """Transformer and text encoder, trained as one, and the readers of poses, which only the training has."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = LingBotTransformer(CONFIG)
        self.text_encoder = UMT5Encoder(TEXT_CONFIG)
        self.poses = PoseHeads(CONFIG.width, 2)
        _initialise(self.transformer)
        text.initialise(self.text_encoder)

    def network(self) -> TrainingNetwork:
        return TrainingNetwork(self.transformer, GEOMETRY)

    def load(self, folder: Path) -> list[str]:
        """Load a checkpoint folder, in place. Layers that it lacks at the end start as ones that change nothing.

        The readers of poses are in a file of the folder; without it, as in a shipped checkpoint, they begin anew.

        Returns what was not found. Raises ValueError naming tensors that are not ours or of other shapes, and those
        that are missing elsewhere.
        """
        found = {f"{part}.{name}": tensor for part in _STEMS for name, tensor in _read_folder(folder, part).items()}
        if (poses := located(folder, _POSES)).exists():
            found |= {f"poses.{name}": tensor for name, tensor in load_file(poses).items()}
        wanted = dict(self.named_parameters())
        extra = sorted(name for name in found if name not in wanted or found[name].shape != wanted[name].shape)
        missing = sorted(set(wanted) - set(found))
        num_layers = 1 + max((int(name.split(".")[2]) for name in found if ".blocks." in name), default=-1)
        new_layers = range(num_layers, CONFIG.num_layers)
        fresh = ("poses.", *(f"transformer.blocks.{index}." for index in new_layers))
        lost = [name for name in missing if not name.startswith(fresh)]
        if extra or lost or not num_layers:
            raise ValueError(f"{folder}: weights do not fit the model: missing {lost}, not known {extra}")
        with torch.no_grad():
            for name, tensor in found.items():
                wanted[name].copy_(tensor)
        for index in new_layers:
            _silence(self.transformer.layers[index])
        return missing


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


def _silence(layer: Layer) -> None:
    """Let a layer add nothing to the residual stream until it has learnt to."""
    for linear in (layer.self_attn.o, layer.cross_attn.o, layer.ffn[2], layer.cam_scale_layer, layer.cam_shift_layer):
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)


class PromptTable:
    """All prompts of the training, ready to be encoded. Nothing here waits for the device."""

    def __init__(self, model: DemoModel, device: torch.device) -> None:
        self._model = model
        ids, mask = tokenize(all_prompts())
        self._ids, self._mask = ids.to(device), mask.to(device)
        self._distances = text.one_hot(
            distance_buckets(ids.shape[1], TEXT_CONFIG).to(device), TEXT_CONFIG.relative_attention_num_buckets
        )

    def encode(self, prompts_Q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [Q, L, C] of prompts by their index, zero behind their end, and their mask [Q, L]."""
        ids, mask = self._ids[prompts_Q], self._mask[prompts_Q]
        return text.encode_prompts(self._model.text_encoder, ids, mask, self._distances), mask


# ---------------------------------------------------------------- files


def _read_folder(folder: Path, part: str) -> dict[str, Tensor]:
    """Read a component's weights, of one file or of several. Raises FileNotFoundError if there are none."""
    paths = sorted(located(folder, part).glob(f"{_STEMS[part]}*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder / part} holds no {_STEMS[part]}*.safetensors")
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def _write_folder(tensors: dict[str, Tensor], folder: Path, stem: str) -> None:
    """Write bfloat16 tensors in files below 15 MiB, with an index where there are several."""
    folder.mkdir(parents=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        content = tensor.detach().bfloat16().cpu().contiguous()
        if size and size + content.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = content
        size += content.nbytes
    if len(shards) == 1:
        write_tensors(shards[0], folder / f"{stem}.safetensors")
        return
    names = [f"{stem}-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_tensors(shard, folder / name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def export(model: DemoModel, folder: Path) -> None:
    """Write transformer and text encoder in bfloat16 as a diffusers checkpoint has them, and the readers of poses.

    What was there before stays until everything is written, and is replaced as one (`files.replacing`).
    """
    readers = {name: tensor.detach().float().cpu().contiguous() for name, tensor in model.poses.named_parameters()}
    with replacing(folder) as unfinished:
        for part, module, config in (
            (_TRANSFORMER, model.transformer, _transformer_config()),
            (_TEXT_ENCODER, model.text_encoder, _text_config()),
        ):
            _write_folder(dict(module.named_parameters()), unfinished / part, _STEMS[part])
            (unfinished / part / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_tensors(readers, unfinished / _POSES)


def _transformer_config() -> dict[str, object]:
    assert CONFIG.window_latent_frames is not None
    return {
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
        "sliding_window_num_frames": CONFIG.sink_latent_frames + CONFIG.window_latent_frames,
        "local_attn_size": -1,
    }


def _text_config() -> dict[str, object]:
    return {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "d_model": TEXT_CONFIG.d_model,
        "d_ff": TEXT_CONFIG.d_ff,
        "d_kv": TEXT_CONFIG.d_kv,
        "num_heads": TEXT_CONFIG.num_heads,
        "num_layers": TEXT_CONFIG.num_layers,
        "num_decoder_layers": TEXT_CONFIG.num_layers,
        "vocab_size": TEXT_CONFIG.vocab_size,
        "relative_attention_num_buckets": TEXT_CONFIG.relative_attention_num_buckets,
        "relative_attention_max_distance": TEXT_CONFIG.relative_attention_max_distance,
        "layer_norm_epsilon": TEXT_CONFIG.layer_norm_epsilon,
        "feed_forward_proj": "gated-gelu",
        "dense_act_fn": "gelu_new",
        "is_gated_act": True,
        "is_encoder_decoder": True,
        "is_decoder": False,
        "dropout_rate": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
