"""The geometry of a DreamZero transformer, as its checkpoint's `config.json` states it.

Two published sizes: 14B on Wan 2.1 (`i2v`: condition channels beside the latent) and 5B on Wan 2.2 (`ti2v`: none).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worldmodel.json_checks import describe

MAX_SIZE, MAX_LAYERS = 1_000_000, 1_000
"""No number of a configuration is larger: the largest published ones are a vocabulary of 256,384 and 40 layers."""

UNBOUNDED_WINDOW_LATENT_FRAMES = 21
"""Frames that attention sees where the checkpoint bounds nothing (`max_chunk_size` -1); every call then restarts."""

CONDITION_MASK_CHANNELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Sizes of the network and of its chunks.

    `image_condition`: the latent enters together with 4 mask channels and the latent of the start picture. `window`
    counts the frames that attention may see, the draft included; `restart_latent_frame`: a call whose start frame is
    at least this begins a new run (None: every call does).
    """

    image_condition: bool
    width: int
    num_heads: int
    num_layers: int
    ffn_dim: int
    freq_dim: int
    text_dim: int
    text_rows: int
    image_dim: int
    image_tokens: int
    in_channels: int
    out_channels: int
    latent_frames_per_chunk: int
    actions_per_chunk: int
    action_dim: int
    state_dim: int
    adapter_dim: int
    window_latent_frames: int
    restart_latent_frame: int | None
    eps: float

    def __post_init__(self) -> None:
        if self.width % self.num_heads or self.head_dim % 2 or self.head_dim < 6:
            raise ValueError(f"dim {self.width} does not divide into {self.num_heads} heads of an even size from 6 up")
        condition = CONDITION_MASK_CHANNELS + self.out_channels if self.image_condition else 0
        if self.in_channels != self.out_channels + condition:
            raise ValueError(
                f"in_dim must be out_dim {self.out_channels} and {condition} condition channels, got {self.in_channels}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def register_tokens(self) -> int:
        """Tokens of a draft that are no video: the actions and one state."""
        return self.actions_per_chunk + 1


_DEFAULTS: dict[str, object] = {
    "freq_dim": 256,
    "text_dim": 4096,
    "text_len": 512,
    "eps": 1e-6,
    "hidden_size": 1024,
    "num_state_per_block": 1,
}
"""Constants of both published sizes, which their configurations may leave to the network's class."""


def read_transformer_config(
    head: Mapping[str, object], *, image_dim: int, image_tokens: int, problems: list[str]
) -> TransformerConfig | None:
    """Read `action_head_cfg.config`. Appends to `problems` what is missing or wrong, and returns None then.

    A key that both the head and its `diffusion_model_cfg` may hold must say the same in both.
    """
    reader = _Reader(head, problems)
    model_type = reader.word("model_type", ("i2v", "ti2v"))
    chunk_limit = reader.integer("max_chunk_size", minimum=-1)
    frames = reader.integer("num_frame_per_block")
    concat = reader.table.get("concat_first_frame_latent", model_type == "i2v")
    if concat is not (model_type == "i2v"):
        problems.append(f"concat_first_frame_latent {concat!r} is not supported for model_type {model_type!r}")
    if reader.integer("num_state_per_block") != 1:
        problems.append("num_state_per_block: expected 1")
    if chunk_limit == 0:
        problems.append("max_chunk_size: expected -1 or at least 1, got 0")
    values = {
        "width": reader.integer("dim"),
        "num_heads": reader.integer("num_heads"),
        "num_layers": reader.integer("num_layers"),
        "ffn_dim": reader.integer("ffn_dim"),
        "freq_dim": reader.integer("freq_dim"),
        "text_dim": reader.integer("text_dim"),
        "text_rows": reader.integer("text_len"),
        "in_channels": reader.integer("in_dim"),
        "out_channels": reader.integer("out_dim"),
        "actions_per_chunk": reader.integer("num_action_per_block"),
        "action_dim": reader.integer("action_dim", "max_action_dim"),
        "state_dim": reader.integer("max_state_dim"),
        "adapter_dim": reader.integer("hidden_size"),
    }
    eps = reader.number("eps")
    if problems:
        return None
    bound = None if chunk_limit == -1 else chunk_limit * frames + 1
    try:
        return TransformerConfig(
            image_condition=model_type == "i2v",
            image_dim=image_dim,
            image_tokens=image_tokens,
            latent_frames_per_chunk=frames,
            # Where every call begins anew nothing is appended, but there must be room for it.
            window_latent_frames=UNBOUNDED_WINDOW_LATENT_FRAMES if bound is None else max(bound, 2 * frames),
            restart_latent_frame=bound,
            eps=eps,
            **values,
        )
    except ValueError as error:
        problems.append(str(error))
        return None


def checked_size(key: str, value: object, problems: list[str], *, minimum: int = 1) -> int:
    """Return a whole number of a configuration; out of bounds it is told in `problems`, and `minimum` stands for it.

    Without an upper bound a damaged file would build layers, of no weights yet, for hours.
    """
    maximum = MAX_LAYERS if "layers" in key else MAX_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        problems.append(f"{key}: expected an integer from {minimum} to {maximum}, got {describe(value)}")
        return minimum
    return value


class _Reader:
    """Read numbers of the network's own table first, then of the head's."""

    def __init__(self, head: Mapping[str, object], problems: list[str]) -> None:
        table = head.get("diffusion_model_cfg")
        if not isinstance(table, Mapping):
            problems.append("diffusion_model_cfg: expected an object")
            table = {}
        self.table: Mapping[str, object] = table
        self._head = head
        self._problems = problems

    def _find(self, key: str, head_key: str) -> object:
        in_table, in_head = self.table.get(key), self._head.get(head_key)
        # The head's own action_dim counts the robot's dimensions, so only keys of one meaning are compared.
        if in_table is not None and in_head is not None and in_table != in_head:
            self._problems.append(f"{key} is {in_table!r} in diffusion_model_cfg, but {head_key} is {in_head!r}")
        for value in (in_table, in_head, _DEFAULTS.get(key)):
            if value is not None:
                return value
        self._problems.append(f"{key} is missing")
        return None

    def integer(self, key: str, head_key: str | None = None, *, minimum: int = 1) -> int:
        value = self._find(key, head_key or key)
        return minimum if value is None else checked_size(key, value, self._problems, minimum=minimum)

    def number(self, key: str) -> float:
        value = self._find(key, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            self._problems.append(f"{key}: expected a number between 0 and 1, got {value!r}")
            return 1.0
        return float(value)

    def word(self, key: str, choices: tuple[str, ...]) -> str:
        value = self._find(key, key)
        if value not in choices:
            self._problems.append(f"{key}: expected one of {', '.join(choices)}, got {value!r}")
        return str(value)
