"""History of a session encoded anew under another prompt: what must be kept for it, and the forwards.

By default a prompt change keeps history: its K and V say how the old prompt saw the clean latents. With the option
`recache_on_prompt` the tick that brings a new prompt first runs the commit forward (timestep 0) again over the history
it sees, in ascending order, with each frame's own clean latents, condition, camera and position.

A part is a run of visible frames of one chunk. It attends to itself and to the visible frames before it, as they were
encoded anew. While no frame has left the window that is exactly what a session would hold that had the prompt from its
start and the same latents. Later it is an approximation: at their first commit frames also saw frames that are gone
now, and the frames of a chunk that eviction cut no longer see its other frames.

Shapes: C channels, F latent frames of a part, Y and X latent rows and columns, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.transaction import ChunkTransaction
from worldmodel.lingbot.camera import CameraEmbedding
from worldmodel.lingbot.pipeline import ChunkSampler
from worldmodel.lingbot.poses import Float64
from worldmodel.lingbot.reducer import CameraPlan
from worldmodel.lingbot.transformer import LingBotTransformer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CleanFrame:
    """What a committed latent frame was made of: latents and condition [C, Y, X] (float32), one row of its camera."""

    latent_frame: int
    latent_CYX: torch.Tensor
    condition_CYX: torch.Tensor
    relative_44: Float64
    intrinsics_4: Float64


CleanHistory = tuple[CleanFrame, ...]
"""Frames ascending; at most those that the last chunk saw."""


def extend_history(
    history: CleanHistory,
    visible: Collection[int],
    first_latent_frame: int,
    latents_CFYX: torch.Tensor,
    condition_CFYX: torch.Tensor,
    camera: CameraPlan,
) -> CleanHistory:
    """Return the history after a chunk that sees the frames `visible`. Tensors are copied frame by frame.

    A view of a chunk would keep all of its frames alive for as long as one of them is in the sink.
    """
    kept = [frame for frame in history if frame.latent_frame in visible]
    new = (
        CleanFrame(
            latent_frame=first_latent_frame + index,
            latent_CYX=latents_CFYX[:, index].clone(),
            condition_CYX=condition_CFYX[:, index].clone(),
            relative_44=camera.relative_n44[index].copy(),
            intrinsics_4=camera.intrinsics_n4[index].copy(),
        )
        for index in range(latents_CFYX.shape[1])
    )
    return (*kept, *new)


def split_into_parts(latent_frames: Sequence[int], latent_frames_per_chunk: int) -> list[range]:
    """Cut ascending frames into runs of neighbours that belong to the same chunk."""
    parts: list[range] = []
    for frame in latent_frames:
        if parts and frame == parts[-1].stop and frame % latent_frames_per_chunk:
            parts[-1] = range(parts[-1].start, frame + 1)
        else:
            parts.append(range(frame, frame + 1))
    return parts


class HistoryEncoder:
    """Run the commit forward over history. Holds no state of any session."""

    def __init__(self, transformer: LingBotTransformer, sampler: ChunkSampler, camera: CameraEmbedding) -> None:
        self._transformer = transformer
        self._sampler = sampler
        self._camera = camera

    def encode(self, history: CleanHistory, chunk: ChunkTransaction) -> None:
        """Replace the K and V of all history that `chunk` sees, under the text that is published in it."""
        rewrite = chunk.rewrite_history()
        frames = {frame.latent_frame: frame for frame in history}
        for latent_frames in split_into_parts(rewrite.latent_frames, self._transformer.config.latent_frames_per_chunk):
            run = [frames[latent_frame] for latent_frame in latent_frames]
            rays_TD = self._camera.tokens(
                np.stack([frame.relative_44 for frame in run]), np.stack([frame.intrinsics_4 for frame in run])
            )
            condition_CFYX = torch.stack([frame.condition_CYX for frame in run], dim=1)
            inputs = self._transformer.chunk_inputs(condition_CFYX, rays_TD, latent_frames.start)
            latents_CFYX = torch.stack([frame.latent_CYX for frame in run], dim=1)
            self._sampler.store_history(latents_CFYX, inputs, rewrite.part(latent_frames))
