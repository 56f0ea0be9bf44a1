"""Names of what a configuration says of text encoding; `text_encoder.py` does it. Torch-free."""

from __future__ import annotations

from enum import StrEnum


class TextPlacement(StrEnum):
    """Where the encoder's weights are.

    RESIDENT: on the device. STREAMED: page-locked on the host, on the device layer by layer while a prompt is encoded.
    CPU: on the host, which computes.
    """

    RESIDENT = "resident"
    STREAMED = "streamed"
    CPU = "cpu"


class TextCleaning(StrEnum):
    """How a prompt is cleaned before it is cut into tokens.

    WHITESPACE: runs of white space become one space. OFFICIAL: repairs broken Unicode and unescapes HTML twice before.
    """

    WHITESPACE = "whitespace"
    OFFICIAL = "official"
