"""The parts of a LingBot layer that can be copied to the device apart from each other, and their tensors by name.

    part      its linears                                     used
    forward   self-attention, cross-attention q and o, ffn    in every forward
    camera    the four of the camera injector                 once a chunk
    text      cross-attention k and v                         once a prompt

Norms and modulation are small and stay on the device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from offload.streamer import RESIDENT, LayerWeights
from worldmodel.kernels.fused_layer import FusedLayer
from worldmodel.kernels.linears import Fp8Linear, HighLinear

if TYPE_CHECKING:
    from worldmodel.lingbot.streaming import StreamedTransformer
    from worldmodel.lingbot.transformer import Layer

FORWARD, CAMERA, TEXT = "forward", "camera", "text"

USES_PER_CHUNK: Mapping[str, float] = {FORWARD: 5.0, CAMERA: 1.0, TEXT: 0.02}
"""Four steps and the commit; the camera once; a prompt is taken to change every fifty chunks."""

TIME_NETWORKS = ("time_embedding.", "time_projection.")
"""Beginnings of the names of what computes the modulation of a timestep: used at load, never in a chunk."""

_LINEARS = re.compile(r"blocks\.\d+\.((self|cross)_attn\.[qkvo]|ffn\.\d+|cam_\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWeights:
    """What the layer loops of the transformer ask for the weights they are about to use.

    `streamed` is what stands behind them, None where everything is resident.
    """

    forward: LayerWeights = RESIDENT
    camera: LayerWeights = RESIDENT
    text: LayerWeights = RESIDENT
    streamed: StreamedTransformer | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPlace:
    """One tensor a layer computes with: the attribute that holds it, and the checkpoint's keys below the layer.

    `transform` names what makes its bytes different from theirs; None says that nothing does.
    """

    name: str
    owner: object
    attribute: str
    keys: tuple[str, ...]
    transform: str | None = None

    @property
    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.attribute)
        return found.detach()

    def put(self, tensor: Tensor) -> None:
        """Compute with another tensor from now on."""
        is_parameter = isinstance(self.owner, nn.Module)
        setattr(self.owner, self.attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def is_streamed_name(name: str) -> bool:
    """Tell whether a tensor of the transformer, by its name in the checkpoint, belongs to a part of a layer."""
    return _LINEARS.fullmatch(name) is not None


def places_of(layer: Layer, fused: FusedLayer | None) -> dict[str, tuple[TensorPlace, ...]]:
    """Return the places of a layer's tensors by part. `fused` is what computes in place of the layer's own linears."""
    camera = ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")
    return {
        FORWARD: tuple(_forward_places(layer) if fused is None else _fused_places(layer, fused)),
        CAMERA: tuple(place for name in camera for place in _plain(layer, name)),
        TEXT: tuple(place for name in ("cross_attn.k", "cross_attn.v") for place in _plain(layer, name)),
    }


def _forward_places(layer: Layer) -> list[TensorPlace]:
    attention = [f"self_attn.{name}" for name in "qkvo"]
    names = [*attention, "cross_attn.q", "cross_attn.o", "ffn.0", "ffn.2"]
    return [place for name in names for place in _plain(layer, name)]


def _plain(layer: Layer, name: str) -> list[TensorPlace]:
    owner = layer.get_submodule(name)
    return [
        TensorPlace(name=f"{name}.{kind}", owner=owner, attribute=kind, keys=(f"{name}.{kind}",))
        for kind in ("weight", "bias")
    ]


def _fused_places(layer: Layer, fused: FusedLayer) -> list[TensorPlace]:
    balances = layer.plan.quantizes_kv
    qkv = ("self_attn.q", "self_attn.k", "self_attn.v")
    return [
        *_linear_places("qkv", fused.qkv, qkv, is_balanced=balances),
        *_linear_places("self_output", fused.self_output, ("self_attn.o",), is_balanced=balances),
        *_linear_places("cross_query", fused.cross_query, ("cross_attn.q",)),
        *_linear_places("cross_output", fused.cross_output, ("cross_attn.o",)),
        *_linear_places("feed_forward_in", fused.feed_forward_in, ("ffn.0",)),
        *_linear_places("feed_forward_out", fused.feed_forward_out, ("ffn.2",)),
    ]


def _linear_places(
    name: str, linear: HighLinear | Fp8Linear, linears: tuple[str, ...], *, is_balanced: bool = False
) -> list[TensorPlace]:
    weights, biases = (tuple(f"{each}.{kind}" for each in linears) for kind in ("weight", "bias"))
    balanced = "values balanced for float8" if is_balanced else None
    bias = TensorPlace(name=f"{name}.bias", owner=linear, attribute="bias_N", keys=biases, transform=balanced)
    if isinstance(linear, HighLinear):
        weight = TensorPlace(
            name=f"{name}.weight", owner=linear, attribute="weight_ND", keys=weights, transform=balanced
        )
        return [weight, bias]
    transform = "float8 by row"
    values = TensorPlace(name=f"{name}.values", owner=linear, attribute="values_ND", keys=weights, transform=transform)
    scales = TensorPlace(name=f"{name}.scales", owner=linear, attribute="scales_1N", keys=weights, transform=transform)
    return [values, scales, bias]
