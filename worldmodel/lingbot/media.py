"""From decoded frames and latents to the arrays a client asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch

from worldmodel.adapter import MediaArray
from worldmodel.messages import MediaFormat
from worldmodel.wan.pixels import to_rgb24, to_yuv420


def needs_pixels(outputs: Sequence[MediaFormat]) -> bool:
    """Tell whether latents must be decoded for these outputs."""
    return any(output is not MediaFormat.LATENT for output in outputs)


class DeviceMedia:
    """Media of one chunk on the device. Copies to the host start at once and are awaited in `to_host`."""

    def __init__(
        self, outputs: Sequence[MediaFormat], latents_CFYX: torch.Tensor, frames_3THW: torch.Tensor | None
    ) -> None:
        self._parts = [(output, _start_copy(_convert(output, latents_CFYX, frames_3THW))) for output in outputs]
        self._copied: torch.cuda.Event | None = None
        if latents_CFYX.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(latents_CFYX.device))

    def to_host(self) -> tuple[MediaArray, ...]:
        """Wait for the copies and return the arrays in the order they were asked for."""
        if self._copied is not None:
            self._copied.synchronize()
        return tuple(MediaArray(format=output, array=tensor.numpy()) for output, tensor in self._parts)


def _convert(output: MediaFormat, latents_CFYX: torch.Tensor, frames_3THW: torch.Tensor | None) -> torch.Tensor:
    if output is MediaFormat.LATENT:
        return latents_CFYX.float().contiguous()
    assert frames_3THW is not None, f"{output} without decoded frames"
    match output:
        case MediaFormat.YUV420:
            return to_yuv420(frames_3THW)
        case MediaFormat.RGB24:
            return to_rgb24(frames_3THW)
        case MediaFormat.ACTIONS:
            raise ValueError("a world model makes no actions")
        case _:
            assert_never(output)


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
