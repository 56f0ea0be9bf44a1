"""The image tower that conditions a run: a ViT whose tokens before its last layer describe the first picture.

Shapes: N pictures, C channels, Y and X pixels, T tokens (one class token, then patches by row), I width, H heads.
Facts: the CLIP image encoder of Wan 2.1 (open-clip XLM-RoBERTa ViT-H/14), wan/modules/clip.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoderConfig:
    """Sizes of the tower; `num_layers` counts those that run, one less than the checkpoint has."""

    image_size: int = 224
    patch_size: int = 14
    width: int = 1280
    num_heads: int = 16
    num_layers: int = 31
    eps: float = 1e-5

    @property
    def num_tokens(self) -> int:
        return 1 + (self.image_size // self.patch_size) ** 2


class _Attention(nn.Module):
    def __init__(self, config: ImageEncoderConfig) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self._num_heads = config.num_heads

    def forward(self, x_NTI: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x_NTI).unflatten(-1, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, config: ImageEncoderConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=config.eps)
        self.attn = _Attention(config)
        self.norm2 = nn.LayerNorm(width, eps=config.eps)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_NTI: Tensor) -> Tensor:
        x_NTI = x_NTI + self.attn(self.norm1(x_NTI))
        return x_NTI + self.mlp(self.norm2(x_NTI))


class ImageEncoder(nn.Module):
    """The tower under the checkpoint's names, without its last layer, its final norm and its head."""

    def __init__(self, config: ImageEncoderConfig) -> None:
        super().__init__()
        width, patch = config.width, config.patch_size
        self.config = config
        self.patch_embedding = nn.Conv2d(3, width, patch, patch, bias=False)
        self.cls_embedding = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.empty(1, config.num_tokens, width))
        self.pre_norm = nn.LayerNorm(width, eps=config.eps)
        self.transformer = nn.Sequential(*(_Layer(config) for _ in range(config.num_layers)))

    @torch.no_grad()
    def encode(self, picture_CYX: Tensor) -> Tensor:
        """Return the tokens [T, I] of a picture in [-1, 1] of any size, in the tower's dtype."""
        pixels_NCYX = preprocess(picture_CYX[None], self.config.image_size)
        patches_NIYX = self.patch_embedding(pixels_NCYX.to(self.patch_embedding.weight.dtype))
        x_NTI = torch.cat([self.cls_embedding, patches_NIYX.flatten(2).transpose(1, 2)], dim=1) + self.pos_embedding
        return self.transformer(self.pre_norm(x_NTI))[0]


def preprocess(pictures_NCYX: Tensor, size: int) -> Tensor:
    """Stretch pictures in [-1, 1] to a square and normalise them. Bicubic without antialias, nothing is clamped."""
    square = functional.interpolate(pictures_NCYX.float(), size=(size, size), mode="bicubic", align_corners=False)
    mean = torch.tensor(PIXEL_MEAN, device=square.device).view(3, 1, 1)
    std = torch.tensor(PIXEL_STD, device=square.device).view(3, 1, 1)
    return (square * 0.5 + 0.5 - mean) / std
