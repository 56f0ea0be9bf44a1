"""Which layers keep their weights on the device, under a budget of bytes.

A byte kept on the device saves as many bytes of copying a chunk as its part has uses, so that parts are served in that
order. The layers of a part that stay are spread over the model rather than leading: while a resident layer computes,
the copies of the streamed ones before and after it go on, with two buffers as with many. (Ten leading layers of forty
that stay would leave the copies of thirty in a row to hide under thirty computations.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.errors import BudgetTooSmall

NUM_SLOTS = 2
"""Device buffers of a part: one layer computes, the next one is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """What one loop of the model uses of a layer: its name, its bytes in one layer, how often a chunk uses it.

    `uses_per_chunk` may be a fraction: text weights are used once a prompt.
    """

    name: str
    layer_bytes: int
    uses_per_chunk: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """The layers of one part that stay on the device, of all `num_layers`."""

    part: LayerPart
    num_layers: int
    resident: frozenset[int]

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that are copied, in the order of their use."""
        return tuple(index for index in range(self.num_layers) if index not in self.resident)

    @property
    def num_slots(self) -> int:
        return min(NUM_SLOTS, len(self.streamed))

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: resident layers and buffers."""
        return (len(self.resident) + self.num_slots) * self.part.layer_bytes

    @property
    def host_bytes(self) -> int:
        return len(self.streamed) * self.part.layer_bytes

    @property
    def copied_bytes_per_chunk(self) -> float:
        """Bytes that a chunk copies; layers that all have a buffer of their own are copied once and stay."""
        if len(self.streamed) <= self.num_slots:
            return 0.0
        return self.part.uses_per_chunk * self.host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPlan:
    """The plans of all parts by name."""

    parts: Mapping[str, PartPlan]

    @property
    def device_bytes(self) -> int:
        return sum(part.device_bytes for part in self.parts.values())

    @property
    def host_bytes(self) -> int:
        return sum(part.host_bytes for part in self.parts.values())

    @property
    def copied_bytes_per_chunk(self) -> float:
        return sum(part.copied_bytes_per_chunk for part in self.parts.values())

    def copy_ms(self, link_bytes_per_s: float) -> float:
        """Return how long a chunk's copies take at a measured rate; a chunk takes no less."""
        return 1000 * self.copied_bytes_per_chunk / link_bytes_per_s

    def describe(self) -> str:
        """Say for people what stays and what is copied."""
        rows = [
            f"{name}: {len(part.resident)} of {part.num_layers} layers resident, "
            f"{part.device_bytes / 1e9:.2f} GB on the device"
            for name, part in self.parts.items()
        ]
        total = f"{self.copied_bytes_per_chunk / 1e9:.1f} GB copied a chunk, {self.host_bytes / 1e9:.1f} GB on the host"
        return "; ".join([*rows, total])


def plan_residency(parts: Sequence[LayerPart], num_layers: int, budget_bytes: int | None) -> ResidencyPlan:
    """Keep as many layers of each part as the budget holds beside the buffers of all; None keeps everything.

    Raises `BudgetTooSmall` where not even the buffers fit.
    """
    smallest = {part.name: PartPlan(part=part, num_layers=num_layers, resident=frozenset()) for part in parts}
    required_bytes = sum(plan.device_bytes for plan in smallest.values())
    if budget_bytes is None:
        return ResidencyPlan(parts={part.name: _keep(part, num_layers, num_layers) for part in parts})
    if required_bytes > budget_bytes:
        detail = ", ".join(f"{name} {plan.device_bytes} bytes" for name, plan in smallest.items())
        raise BudgetTooSmall(
            required_bytes=required_bytes, budget_bytes=budget_bytes, detail=f"two buffers a part: {detail}"
        )
    spare_bytes = budget_bytes - required_bytes
    chosen = {}
    for part in sorted(parts, key=lambda part: part.uses_per_chunk, reverse=True):
        plan = _keep(part, num_layers, _num_that_fit(part, num_layers, smallest[part.name].device_bytes + spare_bytes))
        spare_bytes -= plan.device_bytes - smallest[part.name].device_bytes
        chosen[part.name] = plan
    return ResidencyPlan(parts={part.name: chosen[part.name] for part in parts})


def _num_that_fit(part: LayerPart, num_layers: int, budget_bytes: int) -> int:
    """Return how many layers may stay; with all of them, buffers are not needed."""
    num_places = budget_bytes // part.layer_bytes
    return num_layers if num_places >= num_layers else max(0, num_places - NUM_SLOTS)


def _keep(part: LayerPart, num_layers: int, num_resident: int) -> PartPlan:
    """Spread the layers that stay, beginning with the first: the copy of the next step's first one hides behind it."""
    resident = frozenset(index * num_layers // num_resident for index in range(num_resident))
    return PartPlan(part=part, num_layers=num_layers, resident=resident)
