"""Names of the number formats a model can be served in; `precision.py` says what each means. Torch-free."""

from __future__ import annotations

from enum import StrEnum


class Precision(StrEnum):
    """A row of the table in `precision.py`."""

    FP32 = "fp32"
    BF16 = "bf16"
    OFFICIAL = "official"
    FP8 = "fp8"
    FP8_KV = "fp8_kv"


class VaePrecision(StrEnum):
    """A number format of the VAE, in place of the one that the plan has."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
