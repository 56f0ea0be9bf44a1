"""Names of what may compute a model, as configurations write them. Torch-free."""

from __future__ import annotations

from enum import StrEnum


class AttentionChoice(StrEnum):
    """Which kernel computes attention. AUTO times those that are available at load and takes the fastest.

    TRITON_PAGED, by name only: history is read in pages of one latent frame where they lie.
    """

    AUTO = "auto"
    TORCH_SDPA = "torch_sdpa"
    SDPA_FLASH = "sdpa_flash"
    SDPA_CUDNN = "sdpa_cudnn"
    FLASH3 = "flash3"
    TRITON = "triton"
    TRITON_PAGED = "triton_paged"


class LayerOperations(StrEnum):
    """What computes the small operations of a layer.

    UNFUSED: the layers as they are written. TRITON: fused kernels. PLAIN: their order of work in plain torch, to check
    it. AUTO: TRITON on a CUDA device where it is installed, else UNFUSED.
    """

    AUTO = "auto"
    UNFUSED = "unfused"
    PLAIN = "plain"
    TRITON = "triton"


class GraphChoice(StrEnum):
    """Whether forwards are captured in CUDA graphs at load. AUTO: where that is possible and measures faster."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"
