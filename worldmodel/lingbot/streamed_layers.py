"""The layers of a LingBot transformer as `offload` sees them: loaded one by one, fused, bound to any memory.

A transformer to be streamed is loaded without the linears of its layers. They come here, one layer at a time, in the
very operations that make resident weights, so that streamed weights are the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offload.host_plan import Recipe, StoredTensor
from offload.layout import FlatLayout, TensorSpec, flat_layout
from offload.streamed_model import PartTensors, full_name
from worldmodel.checkpoint.component import Component
from worldmodel.checkpoint.tensor_stream import TORCH_DTYPES
from worldmodel.kernels.fused_layer import FusedFormat, FusedLayer
from worldmodel.lingbot.fused_forward import fuse_layer
from worldmodel.lingbot.layer_parts import is_streamed_name, places_of
from worldmodel.lingbot.transformer import Layer, LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.wan.precision import PrecisionPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSource:
    """Where the linears of the layers are loaded from, and the device that makes their final form."""

    component: Component
    device: torch.device

    def load(self, transformer: LingBotTransformer, index: int) -> None:
        """Load the linears of one layer to the device. Raises `CheckpointError`."""
        prefix = f"blocks.{index}."
        self.component.load_into(
            transformer,
            dtype=transformer.plan.linear,
            device=self.device,
            only=lambda name: name.startswith(prefix) and is_streamed_name(name),
        )


class LayerForm:
    """What the layers of a model are, by sizes alone: nothing is allocated. `layer_format` of None: as written."""

    def __init__(self, config: TransformerConfig, plan: PrecisionPlan, layer_format: FusedFormat | None) -> None:
        self.num_layers = config.num_layers
        self._places = places_of(*_twin(config, plan, layer_format))
        self.layouts: Mapping[str, FlatLayout] = {
            part: flat_layout([TensorSpec.of(place.name, place.tensor) for place in places])
            for part, places in self._places.items()
        }

    def recipes(self, index: int, part: str) -> tuple[Recipe, ...]:
        """Say which of the checkpoint's tensors each tensor of a layer's part is made of."""
        return tuple(
            Recipe(
                tensor=TensorSpec.of(place.name, place.tensor),
                keys=tuple(f"blocks.{index}.{key}" for key in place.keys),
                transform=place.transform,
            )
            for place in self._places[part]
        )

    def all_recipes(self) -> list[Recipe]:
        """Return the recipes of all layers, their tensors by the names among those of all layers."""
        return [
            replace(recipe, tensor=replace(recipe.tensor, name=full_name(index, part, recipe.tensor.name)))
            for index in range(self.num_layers)
            for part in self.layouts
            for recipe in self.recipes(index, part)
        ]


class StreamedLayers:
    """Implements `offload.streamed_model.ModelLayers`. `layer_format` of None computes with the layers as written.

    `fused` has the fused form of every layer once all are bound; the layers' own linears are given up then.
    """

    def __init__(self, transformer: LingBotTransformer, source: LayerSource, layer_format: FusedFormat | None) -> None:
        self._transformer = transformer
        self._source = source
        self._format = layer_format
        self._fused: dict[int, FusedLayer] = {}
        self.form = LayerForm(transformer.config, transformer.plan, layer_format)

    @property
    def num_layers(self) -> int:
        return len(self._transformer.layers)

    @property
    def layouts(self) -> Mapping[str, FlatLayout]:
        return self.form.layouts

    @property
    def metadata(self) -> dict[str, str]:
        """Return what decides the bytes of the layers besides the checkpoint.

        Quantising is arithmetic, which torch and the device do. The model is not cut among ranks: there is one
        tensor-parallel coordinate, and no layout that a sequence-parallel group depends on.
        """
        return {
            "model": "lingbot_world_v2",
            "precision": self._transformer.plan.name,
            "form": "as written" if self._format is None else "fused",
            "torch": str(torch.__version__),
            "device": self._source.device.type,
            "tensor_parallel": "0 of 1",
            "sequence_parallel_layout": "whole",
        }

    @property
    def fused(self) -> tuple[FusedLayer, ...]:
        """The fused layers in order; empty where nothing is fused."""
        return tuple(self._fused[index] for index in sorted(self._fused))

    def make(self, index: int) -> Mapping[str, PartTensors]:
        """Load a layer and return its tensors by part, on the device."""
        self._source.load(self._transformer, index)
        with torch.inference_mode():
            self._fuse(index)
        places = places_of(self._transformer.layers[index], self._fused.get(index))
        return {part: {place.name: place.tensor for place in places[part]} for part in places}

    def bind(self, index: int, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Let a layer compute with these tensors."""
        if self._format is not None and index not in self._fused:
            self._fuse(index)
        for place in places_of(self._transformer.layers[index], self._fused.get(index))[part]:
            place.put(tensors[place.name])

    def recipes(self, index: int, part: str) -> tuple[Recipe, ...]:
        """Say which of the checkpoint's tensors each of the part's tensors is made of."""
        return self.form.recipes(index, part)

    def _fuse(self, index: int) -> None:
        if self._format is None:
            return
        layer = self._transformer.layers[index]
        self._fused[index] = fuse_layer(layer, self._format)
        _give_up_linears(layer)


def stored_tensors(component: Component) -> dict[str, tuple[StoredTensor, ...]]:
    """Describe what a component stores for the layers' linears; empty where tensors are made up."""
    return {
        name: (
            StoredTensor(
                key=name,
                file=info.file,
                start_byte=info.start_byte,
                dtype=TORCH_DTYPES.get(info.dtype),
                shape=info.shape,
                span_bytes=info.num_bytes,
            ),
        )
        for name, info in component.tensors.items()
        if is_streamed_name(name)
    }


def _twin(
    config: TransformerConfig, plan: PrecisionPlan, layer_format: FusedFormat | None
) -> tuple[Layer, FusedLayer | None]:
    """Return a layer without memory in its final form."""
    with torch.device("meta"):
        layer = Layer(config, is_first=False)
    layer.requires_grad_(False).to(plan.linear)
    layer.apply_precision(plan)
    return layer, None if layer_format is None else fuse_layer(layer, layer_format)


def _give_up_linears(layer: Layer) -> None:
    """Let go of the linears that a fused layer has taken over. Their shapes stay, for the layer may be loaded again.

    Quantising has emptied some of them already.
    """
    attention, cross = layer.self_attn, layer.cross_attn
    for linear in (attention.q, attention.k, attention.v, attention.o, cross.q, cross.o, *layer.ffn):
        if isinstance(linear, nn.Linear):
            weight = torch.empty(linear.out_features, linear.in_features, dtype=linear.weight.dtype, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = nn.Parameter(torch.empty_like(linear.bias, device="meta"), requires_grad=False)
