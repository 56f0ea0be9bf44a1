"""Low-rank adapters of a fine-tuned checkpoint: found by name, added to the weights they belong to, and gone.

W becomes W + alpha / rank * B A. Source: DreamZero official code (its checkpoints keep adapters as the library `peft`
names them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from worldmodel.checkpoint.loading import read_tensor
from worldmodel.checkpoint.safetensors_header import TensorInfo

_NAME = re.compile(r"(?P<target>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPair:
    """One adapter: `down` [rank, in], `up` [out, rank], and the factor of their product."""

    target: str
    down: TensorInfo
    up: TensorInfo
    scale: float


def split_lora(
    tensors: Mapping[str, TensorInfo], head: Mapping[str, object], problems: list[str]
) -> tuple[dict[str, TensorInfo], tuple[LoraPair, ...]]:
    """Take the adapters out of a transformer's tensors. Appends to `problems` what does not fit together."""
    kept: dict[str, TensorInfo] = {}
    sides: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            kept[name] = info
        else:
            sides.setdefault(match["target"], {})[match["side"]] = info
    if not sides:
        return kept, ()
    alpha = head.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0:
        problems.append(f"lora_alpha: the checkpoint holds adapters, expected a number above 0, got {alpha!r}")
        alpha = 1.0
    pairs = [_pair(target, found, kept, float(alpha), problems) for target, found in sorted(sides.items())]
    return kept, tuple(pair for pair in pairs if pair is not None)


def _pair(
    target: str,
    found: Mapping[str, TensorInfo],
    kept: Mapping[str, TensorInfo],
    alpha: float,
    problems: list[str],
) -> LoraPair | None:
    base, down, up = kept.get(f"{target}.weight"), found.get("A"), found.get("B")
    if base is None or down is None or up is None:
        problems.append(f"adapter of {target}: expected a base weight, lora_A and lora_B")
        return None
    rank = down.shape[0]
    if rank < 1 or down.shape != (rank, *base.shape[1:]) or up.shape != (base.shape[0], rank):
        problems.append(
            f"adapter of {target}: lora_A {list(down.shape)} and lora_B {list(up.shape)} do not fit {list(base.shape)}"
        )
        return None
    return LoraPair(target=target, down=down, up=up, scale=alpha / rank)


@torch.no_grad()
def merge_lora(module: nn.Module, pairs: tuple[LoraPair, ...]) -> None:
    """Add adapters to a loaded module, on its device; the product is formed in float32."""
    for pair in pairs:
        weight = module.get_parameter(f"{pair.target}.weight")
        down, up = (read_tensor(info, dtype=torch.float32, device=weight.device) for info in (pair.down, pair.up))
        weight.copy_(torch.addmm(weight.float(), up, down, alpha=pair.scale))
