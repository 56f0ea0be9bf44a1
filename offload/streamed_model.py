"""Put the weights of a whole model where the plan says, and keep everything that must be closed again.

    residency    which layers stay on the device               residency.py
    host plan    what memory the others are in                 host_plan.py
    transfer     how they travel                               transports.py, host_registration.py
    streamers    one a part, which the layer loops ask         streamer.py

Knows layers as numbers and parts as names; a model describes itself by `ModelLayers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from offload.copy_queue import CopyQueue, CudaQueue, HostQueue
from offload.cuda_runtime import CudaHostRuntime
from offload.errors import OffloadError, PlanRefused, RegistrationFailed
from offload.host_plan import HostPlan, Recipe
from offload.host_registration import HostRegistration, OnStuck, RegistrationLimits, end_process, register_pages
from offload.host_weights import HostPart, copy_plainly, mapped_part, own_part
from offload.layout import FlatLayout
from offload.mapped_memory import MappedMemory
from offload.residency import NUM_SLOTS, ResidencyPlan
from offload.sharded import RankAgreement, RankGroups, ShardedCopies, Sharing, own_share
from offload.streamer import RESIDENT, LayerStreamer, LayerWeights
from offload.transports import DirectCopies, StagedCopies, Transport

logger = logging.getLogger(__name__)

Progress = Callable[[float, str], None]
"""Called with (fraction 0..1, detail)."""

PartTensors = Mapping[str, Tensor]


class ModelLayers(Protocol):
    """The layers of one model. All have the same parts, and a part has the same layout in all of them."""

    @property
    def num_layers(self) -> int: ...

    @property
    def layouts(self) -> Mapping[str, FlatLayout]:
        """The layout of every part."""
        ...

    def make(self, index: int) -> Mapping[str, PartTensors]:
        """Load one layer the ordinary way and return its tensors in their final form, on the device, by part."""
        ...

    def bind(self, index: int, part: str, tensors: PartTensors) -> None:
        """Let a layer compute with these tensors, whatever it had before."""
        ...

    def recipes(self, index: int, part: str) -> Sequence[Recipe]:
        """Say how the part's tensors come out of the checkpoint; their names are those of the layout."""
        ...


class Transfer(StrEnum):
    """How streamed weights travel: from page-locked memory, or through staging buffers."""

    REGISTERED = "registered"
    STAGED = "staged"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWish:
    """`falls_back`: staging takes the place of page-locking where that fails.

    `reason`: why weights are to be staged where that was decided before, for `StreamedModel.describe`. `on_stuck` ends
    the process where a driver that was given up leaves memory locked.
    """

    transfer: Transfer
    limits: RegistrationLimits = field(default_factory=RegistrationLimits)
    falls_back: bool = False
    reason: str | None = None
    on_stuck: OnStuck = end_process


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostLayers:
    """Streamed layers on the host: parts by name, then layer.

    `files` are the mappings to close after use, `on_closed` is called when they are.
    """

    parts: Mapping[str, Mapping[int, HostPart]]
    files: tuple[MappedMemory, ...] = ()
    on_closed: Callable[[], None] = lambda: None

    @property
    def all_parts(self) -> tuple[HostPart, ...]:
        return tuple(part for layers in self.parts.values() for part in layers.values())


# ------------------------------------------------------------ host memory


def make_ordinary(
    layers: ModelLayers, residency: ResidencyPlan, progress: Progress | None = None, sharing: Sharing | None = None
) -> HostLayers:
    """Load layer by layer; what is streamed goes to memory of this process, what is resident stays.

    The device holds one layer at a time beside the resident ones. With `sharing` only this rank's share is kept.
    """
    host: dict[str, dict[int, HostPart]] = {name: {} for name in residency.parts}
    for index in range(layers.num_layers):
        made = layers.make(index)
        for name, plan in residency.parts.items():
            if index in plan.resident:
                layers.bind(index, name, made[name])
            else:
                layout = layers.layouts[name]
                part = own_part(layout, made[name]) if sharing is None else own_share(layout, made[name], sharing)
                host[name][index] = part
                layers.bind(index, name, without_memory(layers.layouts[name]))
        if progress is not None:
            progress((index + 1) / layers.num_layers, f"layer {index + 1} of {layers.num_layers}")
    return HostLayers(parts=host)


def map_files(
    layers: ModelLayers,
    residency: ResidencyPlan,
    plan: HostPlan,
    device: torch.device,
    progress: Progress | None = None,
    on_closed: Callable[[], None] = lambda: None,
) -> HostLayers:
    """Map the files that the plan binds, and copy what is resident to the device. Raises `OffloadError`."""
    names = sorted({str(stored.file) for binding in plan.bindings.values() for stored in binding.stored})
    paths = {str(stored.file): stored.file for binding in plan.bindings.values() for stored in binding.stored}
    files = {name: MappedMemory.of_file(paths[name]) for name in names}
    host: dict[str, dict[int, HostPart]] = {name: {} for name in residency.parts}
    for index in range(layers.num_layers):
        for name, part_plan in residency.parts.items():
            layout = layers.layouts[name]
            bindings = {
                place.tensor.name: plan.bindings[full_name(index, name, place.tensor.name)] for place in layout.places
            }
            part = mapped_part(layout, bindings, files)
            if index in part_plan.resident:
                layers.bind(index, name, copy_to_device(layout, part, device))
            else:
                host[name][index] = part
        if progress is not None:
            progress((index + 1) / layers.num_layers, f"layer {index + 1} of {layers.num_layers}")
    return HostLayers(parts=host, files=tuple(files.values()), on_closed=on_closed)


def full_name(index: int, part: str, tensor: str) -> str:
    """Return the name of a tensor among those of all layers."""
    return f"layers.{index}.{part}.{tensor}"


def without_memory(layout: FlatLayout) -> dict[str, Tensor]:
    """Return tensors that stand for a part which is not on the device."""
    return layout.views(torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta"))


# ------------------------------------------------------------ transfer and streamers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenTransfer:
    """How the weights travel. `registration` is what to unlock in the end, `reason` why it is not what was wished."""

    transfer: Transfer
    transport: Transport
    registration: HostRegistration | None = None
    reason: str | None = None


def choose_transfer(
    wish: TransferWish, host: HostLayers, device: torch.device, runtime: CudaHostRuntime | None
) -> ChosenTransfer:
    """Page-lock what is wished to be. `runtime` of None: there is no CUDA device to lock memory for.

    Raises:
        PlanRefused: for page-locking that failed, if the wish does not fall back.
        RollbackFailed: if memory stays locked that must not be.
    """
    if wish.transfer is Transfer.STAGED:
        return ChosenTransfer(transfer=Transfer.STAGED, transport=StagedCopies(device), reason=wish.reason)
    try:
        if runtime is None:
            raise RegistrationFailed(f"{device} is no CUDA device")
        pieces = [piece for part in host.all_parts for piece in part.pieces]
        registration = register_pages(runtime, pieces, wish.limits, on_stuck=wish.on_stuck)
    except RegistrationFailed as error:
        if not wish.falls_back:
            raise PlanRefused(f"transfer {wish.transfer.value!r}", str(error)) from error
        logger.warning("weights are staged, not copied directly: %s", error)
        return ChosenTransfer(transfer=Transfer.STAGED, transport=StagedCopies(device), reason=str(error))
    return ChosenTransfer(transfer=Transfer.REGISTERED, transport=DirectCopies(), registration=registration)


class StreamedModel:
    """The weights of a model while it serves. Build it with `stream_model`; `close` it before leaving a group."""

    def __init__(
        self,
        residency: ResidencyPlan,
        host: HostLayers,
        chosen: ChosenTransfer,
        streamers: Mapping[str, LayerStreamer],
        groups: RankGroups | None = None,
    ) -> None:
        self.residency = residency
        self._chosen = chosen
        self._host: HostLayers | None = host
        self._registration = chosen.registration
        self._streamers = dict(streamers)
        self._groups = groups

    @property
    def host(self) -> HostLayers:
        """What is streamed, on the host. Raises `OffloadError` after `close`."""
        if self._host is None:
            raise OffloadError("the streamed weights are closed")
        return self._host

    @property
    def transfer(self) -> Transfer:
        """How streamed weights travel now."""
        return self._chosen.transfer

    def use_transfer(self, wish: TransferWish, device: torch.device, runtime: CudaHostRuntime | None = None) -> None:
        """Let weights travel another way after the next `rearrange`. Raises what `choose_transfer` does."""
        for streamer in self._streamers.values():
            streamer.close()
        if self._registration is not None:
            self._registration.close()
        self._chosen = choose_transfer(wish, self.host, device, runtime)
        self._registration = self._chosen.registration

    def rearrange(self, layers: ModelLayers, residency: ResidencyPlan, device: torch.device) -> None:
        """Stream under another plan, which must find what it streams on the host. Ask `weights` again afterwards.

        Raises `OffloadError` for weights that are shared out: a rank alone can't make a layer resident.
        """
        if self._groups is not None:
            raise OffloadError("weights that are shared out among ranks stay as they were planned")
        for streamer in self._streamers.values():
            streamer.close()
        parts: dict[str, dict[int, HostPart]] = {}
        for name, plan in residency.parts.items():
            parts[name] = {index: self.host.parts[name][index] for index in plan.streamed}
            for index in plan.resident & self.host.parts[name].keys():
                layers.bind(index, name, copy_to_device(layers.layouts[name], self.host.parts[name][index], device))
        self.residency = residency
        self._streamers = make_streamers(layers, parts, self._chosen.transport, device)

    def weights(self, part: str) -> LayerWeights:
        """Return what a layer loop asks for one part."""
        return self._streamers.get(part, RESIDENT)

    def describe(self) -> str:
        """Say for people what stays on the device and how the rest travels."""
        reason = "" if self._chosen.reason is None else f" ({self._chosen.reason})"
        return f"{self._chosen.transfer.value}{reason}: {self.residency.describe()}"

    @property
    def locked_bytes(self) -> int:
        """Host memory that is page-locked for copies."""
        return 0 if self._registration is None else self._registration.num_bytes

    def close(self) -> None:
        """Wait for copies under way, unlock the host memory, give it back, leave the groups of ranks.

        May be called again after an error.

        Raises `RollbackFailed` if memory can't be unlocked; it stays mapped then. Raises `OffloadError` if somebody
        still has a view of a mapping.
        """
        for streamer in self._streamers.values():
            streamer.close()
        if self._registration is not None:
            self._registration.close()
            self._registration = None
        self._streamers.clear()
        if self._host is not None:
            for memory in self._host.files:
                memory.close()
            on_closed, self._host = self._host.on_closed, None
            on_closed()
        if self._groups is not None:
            groups, self._groups = self._groups, None
            groups.leave()


def stream_model(
    layers: ModelLayers,
    residency: ResidencyPlan,
    host: HostLayers,
    wish: TransferWish,
    device: torch.device,
    runtime: CudaHostRuntime | None = None,
    groups: RankGroups | None = None,
) -> StreamedModel:
    """Make the streamers of all parts and bind streamed layers to their places. Raises what `choose_transfer` does.

    With `groups` this rank copies its share of every layer, and nothing else of `host` is used or locked; all ranks
    must have the same residency.
    """
    if groups is not None:
        host = take_shares(host, layers.layouts, groups.sharing)
    chosen = choose_transfer(wish, host, device, runtime)
    streamers = make_streamers(layers, host.parts, chosen.transport, device, groups)
    return StreamedModel(residency, host, chosen, streamers, groups)


def take_shares(host: HostLayers, layouts: Mapping[str, FlatLayout], sharing: Sharing) -> HostLayers:
    """Return what a rank has to copy of host layers, which may be whole or its share already."""
    parts = {
        name: {index: part.share(*sharing.bounds(layouts[name].num_bytes)) for index, part in layers.items()}
        for name, layers in host.parts.items()
    }
    return replace(host, parts=parts)


def make_streamers(
    layers: ModelLayers,
    host: Mapping[str, Mapping[int, HostPart]],
    transport: Transport,
    device: torch.device,
    groups: RankGroups | None = None,
) -> dict[str, LayerStreamer]:
    """Return a streamer for every part that has streamed layers, which are bound to their places in its buffers."""
    if groups is not None:
        transport = ShardedCopies(transport, groups.sharing, groups.device_group)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    streamers = {}
    for number, (name, parts) in enumerate(host.items()):
        if parts:
            agreement = None if groups is None else RankAgreement(groups.sharing, groups.host_group, number)
            queue: CopyQueue = HostQueue() if stream is None else CudaQueue(stream, NUM_SLOTS)
            streamers[name] = LayerStreamer(layers.layouts[name], parts, transport, queue, device, agreement)
            for index in parts:
                layers.bind(index, name, streamers[name].tensors(index))
    return streamers


def copy_to_device(layout: FlatLayout, part: HostPart, device: torch.device) -> dict[str, Tensor]:
    """Return a part's tensors in memory of their own on the device."""
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    copy_plainly(part, flat)
    return layout.views(flat)
