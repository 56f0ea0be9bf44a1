"""Sizes of a LingBot-World v2 transformer, read from the checkpoint's `transformer/config.json`.

Nothing about the 14B model is fixed here: any sizes that fit together are accepted, any other structure is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worldmodel.checkpoint.config_values import fixed, integer, number

TEXT_ROWS = 512
"""Rows of text the network attends to, padding included, where the config does not say `text_len`."""

CAMERA_CHANNELS = 384
"""Six ray components for each of the 8 x 8 pixels below a latent cell."""

CONDITION_CHANNELS = 20
"""Four mask channels, then sixteen of the image latent."""

_FIXED: tuple[tuple[str, object], ...] = (
    ("patch_size", [1, 2, 2]),
    ("cross_attn_norm", True),
    ("qk_norm", "rms_norm_across_heads"),
    ("image_dim", None),
    ("added_kv_proj_dim", None),
)

_MAXIMA = {
    "num_layers": 512,
    "num_attention_heads": 512,
    "attention_head_dim": 1024,
    "ffn_dim": 1 << 20,
    "in_channels": 1024,
    "out_channels": 1024,
    "text_dim": 1 << 16,
    "freq_dim": 1 << 16,
    "text_len": 1 << 16,
}
_MAX_FRAMES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Sizes of the network and the geometry of its history, in latent frames.

    `window_latent_frames` excludes the sink, includes the chunk in flight and may be None for an unlimited history.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    in_channels: int
    out_channels: int
    text_dim: int
    freq_dim: int
    eps: float
    latent_frames_per_chunk: int
    sink_latent_frames: int
    window_latent_frames: int | None
    text_rows: int = TEXT_ROWS
    camera_channels: int = CAMERA_CHANNELS

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.num_heads * self.head_dim

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_heads",
            "head_dim",
            "ffn_dim",
            "out_channels",
            "text_dim",
            "freq_dim",
            "text_rows",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        # Rotary pairs are split over three axes (wan/rope.py), timestep features are cosines and as many sines.
        if self.head_dim < 6 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even and at least 6, got {self.head_dim}")
        if self.freq_dim % 2:
            raise ValueError(f"freq_dim must be even, got {self.freq_dim}")
        if self.in_channels != self.out_channels + CONDITION_CHANNELS:
            raise ValueError(
                f"in_channels must be out_channels + {CONDITION_CHANNELS} = {self.out_channels + CONDITION_CHANNELS}, "
                f"got {self.in_channels}"
            )
        if self.latent_frames_per_chunk < 1:
            raise ValueError(f"latent_frames_per_chunk must be at least 1, got {self.latent_frames_per_chunk}")
        if self.sink_latent_frames < 0:
            raise ValueError(f"sink_latent_frames must be >= 0, got {self.sink_latent_frames}")
        if self.window_latent_frames is not None and self.window_latent_frames < self.latent_frames_per_chunk:
            raise ValueError(
                f"window_latent_frames must hold a chunk of {self.latent_frames_per_chunk}, "
                f"got {self.window_latent_frames}"
            )


def read_transformer_config(content: Mapping[str, object]) -> TransformerConfig:
    """Check `transformer/config.json` and return its sizes. Raises ValueError naming the key.

    `sliding_window_num_frames` counts the sink. `local_attn_size` of -1 means that it is not used.
    """
    for key, expected in _FIXED:
        fixed(content.get(key, expected), key, expected)

    def size(key: str) -> int:
        return integer(_required(content, key), key, maximum=_MAXIMA[key])

    def frames(key: str, minimum: int) -> int:
        return integer(_required(content, key), key, minimum=minimum, maximum=_MAX_FRAMES)

    total, local, sink = (
        frames("sliding_window_num_frames", 1),
        frames("local_attn_size", -1),
        frames("sink_size", 0),
    )
    if local not in (-1, total):
        raise ValueError(f"local_attn_size must be -1 or sliding_window_num_frames = {total}, got {local}")
    return TransformerConfig(
        num_layers=size("num_layers"),
        num_heads=size("num_attention_heads"),
        head_dim=size("attention_head_dim"),
        ffn_dim=size("ffn_dim"),
        in_channels=size("in_channels"),
        out_channels=size("out_channels"),
        text_dim=size("text_dim"),
        freq_dim=size("freq_dim"),
        eps=number(_required(content, "eps"), "eps", minimum=1e-30, maximum=1.0),
        latent_frames_per_chunk=frames("num_frames_per_block", 1),
        sink_latent_frames=sink,
        window_latent_frames=total - sink,
        text_rows=size("text_len") if "text_len" in content else TEXT_ROWS,
    )


def _required(content: Mapping[str, object], key: str) -> object:
    if key not in content:
        raise ValueError(f"{key} is missing from the transformer's config")
    return content[key]
