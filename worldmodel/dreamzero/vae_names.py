"""Parameter names of the Wan VAE encoder: from the official layout, which the checkpoint has, to those of `wan/vae.py`.

official                                ours
encoder.conv1                           encoder.conv_in
encoder.downsamples.N.residual.{0,2,3,6}  encoder.down_blocks.N.{norm1,conv1,norm2,conv2}
encoder.downsamples.N.shortcut          encoder.down_blocks.N.conv_shortcut
encoder.downsamples.N.{resample.1,time_conv}  the same below encoder.down_blocks.N
encoder.middle.{0,1,2}                  encoder.mid_block.{resnets.0,attentions.0,resnets.1}
encoder.head.{0,2}                      encoder.{norm_out,conv_out}
conv1                                   quant_conv
"""

from __future__ import annotations

import re

_UNIT = {"0": "norm1", "2": "conv1", "3": "norm2", "6": "conv2"}

_RULES: tuple[tuple[str, str], ...] = (
    (r"encoder\.conv1\.", "encoder.conv_in."),
    (r"encoder\.downsamples\.", "encoder.down_blocks."),
    (r"encoder\.middle\.0\.", "encoder.mid_block.resnets.0."),
    (r"encoder\.middle\.1\.", "encoder.mid_block.attentions.0."),
    (r"encoder\.middle\.2\.", "encoder.mid_block.resnets.1."),
    (r"encoder\.head\.0\.", "encoder.norm_out."),
    (r"encoder\.head\.2\.", "encoder.conv_out."),
    (r"conv1\.", "quant_conv."),
)


def our_encoder_name(official: str) -> str | None:
    """Return our name of an official one, None for what an encoder has no use for (`decoder.*`, `conv2.*`)."""
    for pattern, replacement in _RULES:
        match = re.match(pattern, official)
        if match is not None:
            name = replacement + official[match.end() :]
            name = re.sub(r"\.residual\.([0236])\.", lambda found: f".{_UNIT[found.group(1)]}.", name)
            return name.replace(".shortcut.", ".conv_shortcut.")
    return None
