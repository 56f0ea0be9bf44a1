"""The naive twin of the K/V cache: Python lists and `torch.cat`. Slow, obvious, and written without its arithmetic.

Each (layer, branch) keeps a list of (frame, K, V). A chunk appends its frames and drops the oldest frame behind the
sink until the visible set is small enough; what is left after a commit is the new history.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.spec import KVSpec

Frame = tuple[int, Tensor, Tensor]


class ConcatSession:
    """History of one session."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.num_latent_frames = 0
        self.history: dict[tuple[int, int], list[Frame]] = {}

    def extend(self, layer: int, branch: int, k_NHD: Tensor, v_NHD: Tensor) -> list[Frame]:
        """Return the visible frames, ascending, if the chunk's K/V were these."""
        frames = list(self.history.get((layer, branch), []))
        tokens = self.spec.tokens_per_latent_frame
        for i, (k, v) in enumerate(zip(k_NHD.split(tokens), v_NHD.split(tokens), strict=True)):
            frames.append((self.num_latent_frames + i, k, v))
        window = self.spec.window_latent_frames
        while window is not None and len(frames) > self.spec.sink_latent_frames + window:
            del frames[self.spec.sink_latent_frames]
        return frames

    def rewritten(self, layer: int, branch: int, first: int, k_NHD: Tensor, v_NHD: Tensor) -> ConcatSession:
        """Return a session whose committed frames from `first` on hold these K and V instead."""
        tokens = self.spec.tokens_per_latent_frame
        pieces = zip(k_NHD.split(tokens), v_NHD.split(tokens), strict=True)
        new = {first + i: pair for i, pair in enumerate(pieces)}
        twin = ConcatSession(self.spec)
        twin.num_latent_frames = self.num_latent_frames
        twin.history = dict(self.history)
        old = self.history[layer, branch]
        twin.history[layer, branch] = [(frame, *new.get(frame, (k, v))) for frame, k, v in old]
        return twin

    def attend_up_to(self, layer: int, branch: int, end: int, visible: Sequence[int], q_NHD: Tensor) -> Tensor:
        """Return attention over the committed frames among `visible` that lie before `end`."""
        kept = [(k, v) for frame, k, v in self.history[layer, branch] if frame < end and frame in visible]
        return naive_attention(q_NHD, torch.cat([k for k, _ in kept]), torch.cat([v for _, v in kept]))

    def attend(self, layer: int, branch: int, k_NHD: Tensor, v_NHD: Tensor, q_NHD: Tensor) -> Tensor:
        frames = self.extend(layer, branch, k_NHD, v_NHD)
        k_SHD = torch.cat([k for _, k, _ in frames])
        v_SHD = torch.cat([v for _, _, v in frames])
        return naive_attention(q_NHD, k_SHD, v_SHD)

    def commit(self, written: list[tuple[int, int, Tensor, Tensor]], num_latent_frames: int) -> None:
        self.history.update({(layer, branch): self.extend(layer, branch, k, v) for layer, branch, k, v in written})
        self.num_latent_frames += num_latent_frames


def naive_attention(q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor) -> Tensor:
    """Softmax attention in float64, head by head."""
    heads = []
    for head in range(q_NHD.shape[1]):
        q, k, v = (x[:, head].double() for x in (q_NHD, k_SHD, v_SHD))
        heads.append(F.softmax(q @ k.T / q.shape[-1] ** 0.5, dim=-1) @ v)
    return torch.stack(heads, dim=1).to(q_NHD.dtype)
