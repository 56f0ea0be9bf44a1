"""What `inspect` says of a checkpoint of any model, and the arithmetic of sessions on a card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from kvcache.errors import BudgetTooSmall
from kvcache.spec import KVSpec
from worldmodel.checkpoint.errors import findings_of
from worldmodel.checkpoint.problems import Problem
from worldmodel.errors import LoadFailed
from worldmodel.kernels.fused_layer import large_linears
from worldmodel.wan.precision import PrecisionPlan
from worldmodel.wan.transformer import WanTransformer

CARDS_GB = (24.0, 48.0, 80.0, 141.0)

CONTEXT_BYTES = 1_500_000_000
"""What a CUDA context, libraries and torch's workspaces take besides weights and K/V; an estimate."""

MEMORY_FRACTION = 0.9
"""The default of `kvcache.gpu_memory_fraction`."""

MAX_SESSIONS = 64
"""Sessions are not counted further."""

SCALE_BYTES = 4
"""Of a float8 weight, for each of its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFacts:
    """One component as it is stored; as it should be, in 0 bytes, if that is made up or cannot be read."""

    name: str
    class_name: str
    dtypes: tuple[str, ...]
    num_tensors: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CardCapacity:
    """Sessions that fit on a card, counted up to `MAX_SESSIONS`, and what one session leaves free of what may be used.

    `spare_bytes` is 0 if none fits.
    """

    card_gb: float
    sessions: int
    spare_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Everything that `inspect` shows. `problems` are reasons why the checkpoint cannot be served."""

    checkpoint: str
    digest: str
    width: int
    height: int
    precision: str
    components: tuple[ComponentFacts, ...]
    geometry: Mapping[str, object]
    memory: Mapping[str, int]
    capacity: tuple[CardCapacity, ...]
    problems: tuple[Problem, ...]


def num_parameters(module: nn.Module) -> int:
    """Count the numbers of a module's weights."""
    return sum(parameter.numel() for parameter in module.parameters())


def transformer_bytes(transformer: WanTransformer, plan: PrecisionPlan) -> int:
    """Count a transformer's weights on the device. The few float32 parts are counted as its linears are."""
    total = num_parameters(transformer) * plan.linear.itemsize
    if not plan.quantizes_linears:
        return total
    for layer in transformer.layers:
        for linear in large_linears(layer.self_attn, layer.cross_attn, layer.ffn):
            total += linear.out_features * SCALE_BYTES - linear.weight.numel() * (plan.linear.itemsize - 1)
    return total


def session_memory(spec: KVSpec, *, cross_store: str) -> dict[str, int]:
    """Count what sessions take; `cross_store` says in a word what their cross-attention store holds."""
    return {
        "kv_per_session_bytes": spec.storage_bytes(2) - spec.storage_bytes(1),
        f"{cross_store}_kv_per_session_bytes": spec.cross_attention_bytes,
        "model_state_per_session_bytes": spec.model_owned_bytes,
        "each_further_session_bytes": spec.required_bytes(2) - spec.required_bytes(1),
        "shared_by_all_sessions_bytes": spec.worker_owned_bytes + spec.staging_bytes,
        "first_session_bytes": spec.required_bytes(1),
    }


def card_capacity(card_gb: float, spec: KVSpec, weights_bytes: int) -> CardCapacity:
    """Count the sessions that fit on a card beside the weights."""
    free_bytes = int(card_gb * 1e9) - weights_bytes - CONTEXT_BYTES
    try:
        sessions = spec.capacity(max(free_bytes, 0), MEMORY_FRACTION)
    except BudgetTooSmall:
        return CardCapacity(card_gb=card_gb, sessions=0, spare_bytes=0)
    return CardCapacity(card_gb=card_gb, sessions=sessions, spare_bytes=max(0, free_bytes - spec.required_bytes(1)))


def problems_of(check: Callable[[], None]) -> tuple[Problem, ...]:
    """Run what refuses by `LoadFailed`, and return its reason."""
    try:
        check()
    except LoadFailed as error:
        return findings_of(error)
    return ()
