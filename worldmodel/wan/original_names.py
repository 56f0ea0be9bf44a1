"""Names of Wan components in the original layout, translated to those of the diffusers layout and back. Torch-free.

A rule rewrites one family of names; a name that no rule knows stays as it is, and is reported as an extra tensor.
Sources: LingBot-World v2 official code, wan/modules/vae2_1.py and wan/modules/t5.py; diffusers' `AutoencoderKLWan`;
transformers' `UMT5EncoderModel`.
"""

from __future__ import annotations

import re

UNITS_PER_DECODER_STAGE = 3
"""Residual units of a decoder stage: one more than of an encoder stage. An upsampling step follows all but the last."""

_RESIDUAL = {"0": "norm1", "2": "conv1", "3": "norm2", "6": "conv2"}
_VAE_ENDS = {
    "conv1.": "quant_conv.",
    "conv2.": "post_quant_conv.",
    "encoder.conv1.": "encoder.conv_in.",
    "decoder.conv1.": "decoder.conv_in.",
    "encoder.head.0.": "encoder.norm_out.",
    "decoder.head.0.": "decoder.norm_out.",
    "encoder.head.2.": "encoder.conv_out.",
    "decoder.head.2.": "decoder.conv_out.",
}
_VAE_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}

_T5_ENDS = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
}
_T5_LAYER = {
    "norm1.weight": "layer.0.layer_norm.weight",
    "attn.q.weight": "layer.0.SelfAttention.q.weight",
    "attn.k.weight": "layer.0.SelfAttention.k.weight",
    "attn.v.weight": "layer.0.SelfAttention.v.weight",
    "attn.o.weight": "layer.0.SelfAttention.o.weight",
    "pos_embedding.embedding.weight": "layer.0.SelfAttention.relative_attention_bias.weight",
    "norm2.weight": "layer.1.layer_norm.weight",
    "ffn.gate.0.weight": "layer.1.DenseReluDense.wi_0.weight",
    "ffn.fc1.weight": "layer.1.DenseReluDense.wi_1.weight",
    "ffn.fc2.weight": "layer.1.DenseReluDense.wo.weight",
}
_T5_LAYER_BACK = {theirs: ours for ours, theirs in _T5_LAYER.items()}


def vae_name(original: str) -> str:
    """Return the diffusers name of a tensor of `Wan2.1_VAE.pth`."""
    for prefix, replacement in _VAE_ENDS.items():
        if original.startswith(prefix):
            return replacement + original.removeprefix(prefix)
    if match := re.fullmatch(r"(encoder|decoder)\.middle\.([012])\.(.+)", original):
        part, index, rest = match.groups()
        return f"{part}.mid_block.{_VAE_MIDDLE[index]}.{_unit_name(rest)}"
    if match := re.fullmatch(r"encoder\.downsamples\.(\d+)\.(.+)", original):
        return f"encoder.down_blocks.{match[1]}.{_unit_name(match[2])}"
    if match := re.fullmatch(r"decoder\.upsamples\.(\d+)\.(.+)", original):
        stage, place = divmod(int(match[1]), UNITS_PER_DECODER_STAGE + 1)
        unit = f"resnets.{place}" if place < UNITS_PER_DECODER_STAGE else "upsamplers.0"
        return f"decoder.up_blocks.{stage}.{unit}.{_unit_name(match[2])}"
    return original


def _unit_name(rest: str) -> str:
    if match := re.fullmatch(r"residual\.([0236])\.(.+)", rest):
        return f"{_RESIDUAL[match[1]]}.{match[2]}"
    return re.sub(r"^shortcut\.", "conv_shortcut.", rest)


def umt5_name(original: str) -> str:
    """Return the transformers name of a tensor of `models_t5_umt5-xxl-enc-bf16.pth`."""
    if original in _T5_ENDS:
        return _T5_ENDS[original]
    if (match := re.fullmatch(r"blocks\.(\d+)\.(.+)", original)) and match[2] in _T5_LAYER:
        return f"encoder.block.{match[1]}.{_T5_LAYER[match[2]]}"
    return original


def original_vae_name(name: str) -> str:
    """Return the original name of a tensor of diffusers' `AutoencoderKLWan`."""
    for original, prefix in _VAE_ENDS.items():
        if name.startswith(prefix):
            return original + name.removeprefix(prefix)
    if match := re.fullmatch(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d)\.(.+)", name):
        part, kind, index, rest = match.groups()
        place = "1" if kind == "attentions" else {"0": "0", "1": "2"}[index]
        return f"{part}.middle.{place}.{_original_unit_name(rest)}"
    if match := re.fullmatch(r"encoder\.down_blocks\.(\d+)\.(.+)", name):
        return f"encoder.downsamples.{match[1]}.{_original_unit_name(match[2])}"
    if match := re.fullmatch(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d)\.(.+)", name):
        stage, kind, index, rest = match.groups()
        step = int(index) if kind == "resnets" else UNITS_PER_DECODER_STAGE
        number = int(stage) * (UNITS_PER_DECODER_STAGE + 1) + step
        return f"decoder.upsamples.{number}.{_original_unit_name(rest)}"
    raise ValueError(f"no original name is known for VAE tensor {name}")


def _original_unit_name(rest: str) -> str:
    """Name a part of a residual unit; attention and resampling keep their names."""
    head, _, tail = rest.partition(".")
    numbers = {name: number for number, name in _RESIDUAL.items()}
    if head in numbers:
        return f"residual.{numbers[head]}.{tail}"
    return f"shortcut.{tail}" if head == "conv_shortcut" else rest


def original_umt5_name(name: str) -> str:
    """Return the original name of a tensor of transformers' `UMT5EncoderModel`."""
    for original, ours in _T5_ENDS.items():
        if name == ours:
            return original
    if (match := re.fullmatch(r"encoder\.block\.(\d+)\.(.+)", name)) and match[2] in _T5_LAYER_BACK:
        return f"blocks.{match[1]}.{_T5_LAYER_BACK[match[2]]}"
    raise ValueError(f"no original name is known for text encoder tensor {name}")
