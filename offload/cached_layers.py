"""The layers of a model in the runtime weight cache: one file a layer, all parts in it, whatever stays resident.

So the content of an entry does not depend on budgets, and a worker with another budget finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from offload.cache_manifest import CacheRequest, Validation
from offload.host_plan import Binding, HostKind, HostPlan
from offload.layout import TensorSpec
from offload.streamed_model import ModelLayers, full_name, without_memory
from offload.weight_cache import CacheEntry, WeightCache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedLayers:
    """An entry in use and the plan that binds every runtime tensor to it."""

    entry: CacheEntry
    plan: HostPlan


def cache_request(layers: ModelLayers, source: str, metadata: Mapping[str, str]) -> CacheRequest:
    """Return the request for all layers of a model; see `CacheRequest` for what `metadata` must say."""
    return CacheRequest(
        source=source,
        metadata=metadata,
        files={_file_name(index): _specs(layers, index) for index in range(layers.num_layers)},
    )


def open_cached(
    layers: ModelLayers,
    cache: WeightCache,
    request: CacheRequest,
    validation: Validation,
    on_made: Callable[[int], None] = lambda index: None,
) -> CachedLayers:
    """Open the entry of a model's layers, loading them the ordinary way only where there is none.

    `on_made` is told of every layer that was made. Raises `CacheError` and what `layers.make` raises.
    """
    indices = {_file_name(index): index for index in range(layers.num_layers)}

    def make(file: str) -> Iterator[Tensor]:
        index = indices[file]
        made = layers.make(index)
        for part, layout in layers.layouts.items():
            for place in layout.places:
                yield made[part][place.tensor.name]
        for part, layout in layers.layouts.items():
            layers.bind(index, part, without_memory(layout))
        on_made(index)

    entry = cache.open_or_build(request, make, validation)
    stored = entry.tensors
    bindings = {
        spec.name: Binding(tensor=spec, stored=(stored[spec.name],))
        for specs in request.files.values()
        for spec in specs
    }
    return CachedLayers(entry=entry, plan=HostPlan(kind=HostKind.RUNTIME_CACHE, bindings=bindings))


def _file_name(index: int) -> str:
    return f"layer-{index:05}.safetensors"


def _specs(layers: ModelLayers, index: int) -> list[TensorSpec]:
    return [
        TensorSpec(name=full_name(index, part, place.tensor.name), dtype=place.tensor.dtype, shape=place.tensor.shape)
        for part, layout in layers.layouts.items()
        for place in layout.places
    ]
