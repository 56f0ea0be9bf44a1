"""From one prompt to the next over several chunks: the text rows that each chunk attends to.

A transition of n chunks takes the chunk that brings the prompt to 1/n of the way and the n-th to the prompt itself,
linearly between the encoder's rows, the shorter ones padded with zeros as the network pads them. One chunk is a switch.

Shape suffixes: L text rows, C encoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from worldmodel.lingbot.controls import PROMPT_TRACK, PromptTransition, decode_control
from worldmodel.lingbot.prompts import Prompt
from worldmodel.messages import ControlEvent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptCourse:
    """The text of a session's latest chunk. Never changed; `advanced` gives that of the next one.

    `prompt` is the one in force, or the one under way to. `start_rows_LC` are the rows the way began at, None when the
    prompt has been reached.
    """

    prompt: Prompt
    start_rows_LC: torch.Tensor | None = None
    num_chunks: int = 1
    done_chunks: int = 0

    @property
    def is_reached(self) -> bool:
        """Whether the prompt is in force."""
        return self.start_rows_LC is None

    @property
    def rows_LC(self) -> torch.Tensor:
        """Text rows of the latest chunk, in the dtype of the prompt's."""
        if self.start_rows_LC is None:
            return self.prompt.rows_LC
        return blend_rows(self.start_rows_LC, self.prompt.rows_LC, self.done_chunks / self.num_chunks)

    def toward(self, prompt: Prompt, num_chunks: int) -> PromptCourse:
        """Set out for another prompt from where the text stands now; the way to the present one is left."""
        return PromptCourse(prompt=prompt, start_rows_LC=self.rows_LC, num_chunks=num_chunks)

    def advanced(self) -> PromptCourse:
        """Return the course one chunk further; itself if the prompt has been reached."""
        if self.start_rows_LC is None:
            return self
        if self.done_chunks + 1 == self.num_chunks:
            return PromptCourse(prompt=self.prompt)
        return replace(self, done_chunks=self.done_chunks + 1)


def transition_chunks(events: Sequence[ControlEvent]) -> int:
    """Return over how many chunks a new prompt comes into force: what the last control on its track says, else 1.

    Raises `RequestRefused` for a control that `decode_control` refuses.
    """
    num_chunks = 1
    for event in sorted(events, key=lambda event: event.event_id):
        for control in event.controls:
            decoded = decode_control(control) if control.track == PROMPT_TRACK else None
            if isinstance(decoded, PromptTransition):
                num_chunks = decoded.chunks
    return num_chunks


def blend_rows(start_LC: torch.Tensor, end_LC: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return (1 - fraction) * start + fraction * end, [max L, C] in the dtype of `end_LC`; missing rows are zeros."""
    num_rows = max(len(start_LC), len(end_LC))
    start_LC, padded_LC = (functional.pad(x_LC.float(), (0, 0, 0, num_rows - len(x_LC))) for x_LC in (start_LC, end_LC))
    return torch.lerp(start_LC, padded_LC, fraction).to(end_LC.dtype)
