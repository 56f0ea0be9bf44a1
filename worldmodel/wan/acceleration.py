"""What a worker computes with: the attention backend and the operations of the layers. Chosen once, at load.

Whatever is chosen is said in `description`, which operators see; a choice by name that can't be had stops the start.
Knows no model: which forward the operations run is the model's to say.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kvcache.attention import Attention
from kvcache.attention_backends import AttentionBackend, AttentionShape, ChosenAttention, choose_attention
from kvcache.attention_indexed import indexed_name
from kvcache.errors import AttentionUnavailable
from worldmodel.errors import LoadFailed
from worldmodel.kernels.choice import OpsUnavailable, create_ops
from worldmodel.kernels.layer_ops import LayerOps, PlainOps
from worldmodel.kernels.names import AttentionChoice, LayerOperations
from worldmodel.wan.precision import PrecisionPlan

logger = logging.getLogger(__name__)

ForwardT = TypeVar("ForwardT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceleration(Generic[ForwardT]):
    """The parts of a worker that have more than one implementation.

    `graph_attention` names what attends in captured forwards, if anything can: see `indexed_name`.
    """

    attention: Attention
    graph_attention: str
    forward: ForwardT
    description: str

    @property
    def in_graphs(self) -> str:
        """What to add where captured forwards are described: their attention, if it is not the chosen one."""
        return "" if self.graph_attention == self.attention.name else f", which attend with {self.graph_attention}"


def attention_backend(choice: AttentionChoice, shape: AttentionShape) -> ChosenAttention:
    """Return the attention of a choice. Raises `LoadFailed` naming the option for one that can't run on the device."""
    try:
        return choose_attention(AttentionBackend(choice.value), shape)
    except AttentionUnavailable as error:
        raise LoadFailed(str(error), field="attention") from error


def layer_operations(choice: LayerOperations, plan: PrecisionPlan, device: torch.device) -> LayerOps | None:
    """Return the operations of a choice, None for the layers as they are written.

    Raises `LoadFailed` naming the option for one that can't run on the device or in the precision.
    """
    if plan.quantizes_linears and choice is LayerOperations.UNFUSED:
        raise LoadFailed(
            f"the precision {plan.name!r} has no unfused form: use layer_operations 'auto'", field="layer_operations"
        )
    try:
        ops = create_ops(choice, device)
    except OpsUnavailable as error:
        raise LoadFailed(str(error), field="layer_operations") from error
    return PlainOps() if ops is None and plan.quantizes_linears else ops


def join(
    attention: ChosenAttention, forward: ForwardT, ops: LayerOps | None, plan: PrecisionPlan
) -> Acceleration[ForwardT]:
    """Put what was chosen together and say it."""
    layers = LayerOperations.UNFUSED.value if ops is None else ops.name
    if plan.quantizes_linears:
        layers += " with float8 linears"
    description = f"{attention.describe()}; layers {layers}"
    logger.info("attention %s", description)
    return Acceleration(
        attention=attention.attention,
        graph_attention=indexed_name(attention),
        forward=forward,
        description=description,
    )
