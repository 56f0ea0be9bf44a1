"""Stream the layers of a LingBot transformer as the configuration says. Once, at load.

Everything is decided, and told, before the first layer is loaded: residency, kind of host memory. What can't be had
stops the start or is replaced as `on_unavailable` says, and the description that operators see has the reason.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

import torch

from kvcache.spec import KVSpec
from offload.cuda_runtime import LoadedCudaRuntime
from offload.errors import OffloadError
from offload.host_plan import HostKind, HostPlan
from offload.host_registration import RegistrationLimits
from offload.residency import ResidencyPlan
from offload.streamed_model import (
    HostLayers,
    StreamedModel,
    TransferWish,
    make_ordinary,
    map_files,
    stream_model,
)
from worldmodel.adapter import ProgressFn
from worldmodel.errors import LoadFailed
from worldmodel.kernels.fused_layer import FusedFormat, FusedLayer
from worldmodel.lingbot.layer_parts import CAMERA, FORWARD, TEXT, TIME_NETWORKS, PartWeights
from worldmodel.lingbot.streamed_layers import StreamedLayers, stored_tensors
from worldmodel.lingbot.streaming_cache import StreamRequest, open_cache
from worldmodel.lingbot.streaming_plan import DeviceNumbers, StreamPlan, plan_stream, without_host
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.weights import LoadedModel
from worldmodel.messages import LoadStage, StartWorker
from worldmodel.offload_settings import OffloadSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedTransformer:
    """The weights to close in the end, the layers they belong to, the device, and what operators are told."""

    model: StreamedModel
    layers: StreamedLayers
    device: torch.device
    description: str

    @property
    def fused(self) -> tuple[FusedLayer, ...]:
        """The fused layers, empty where they run as written."""
        return self.layers.fused

    def rearrange(self, transformer: LingBotTransformer, residency: ResidencyPlan) -> None:
        """Let the transformer stream under another plan; see `StreamedModel.rearrange`."""
        self.model.rearrange(self.layers, residency, self.device)
        self.connect(transformer)

    def connect(self, transformer: LingBotTransformer) -> None:
        """Let the transformer's loops ask these weights."""
        transformer.weights = PartWeights(
            forward=self.model.weights(FORWARD),
            camera=self.model.weights(CAMERA),
            text=self.model.weights(TEXT),
            streamed=self,
        )


def stream_request(model: LoadedModel, config: StartWorker, progress: ProgressFn) -> StreamRequest | None:
    """Return what streaming needs to know of a loaded model, None for one that is not streamed."""
    if model.layer_source is None:
        return None
    device = model.layer_source.device
    is_cuda = device.type == "cuda"
    return StreamRequest(
        source=model.layer_source,
        settings=config.offload,
        numbers=DeviceNumbers(
            loaded_bytes=torch.cuda.memory_allocated(device) if is_cuda else _loaded_bytes(model, config),
            free_bytes=torch.cuda.mem_get_info(device)[0] if is_cuda else None,
            gpu_memory_fraction=config.gpu_memory_fraction if is_cuda else 1.0,
        ),
        digest=model.digest,
        progress=lambda fraction, detail: progress(LoadStage.TRANSFORMER, fraction, detail),
    )


def use_growing_segments(device: torch.device) -> None:
    """Let torch grow and shrink its memory instead of taking pieces of fixed size; call it before the first of them.

    Activations of a gigabyte come and go between caches that stay. Pieces of fixed size are then broken up: a device
    that had been planned full had 1.2 GiB that nothing could use.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.empty(1, device=device)
    # torch takes settings that it ignores without a word.
    if not torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments"):
        logger.warning("torch's memory does not grow in place here: a device planned full may run out of memory")


def set_time_networks_aside(transformer: LingBotTransformer) -> None:
    """Take the networks of the time path to the host, after the constants of all timesteps have been made."""
    transformer.time_embedding.cpu()
    transformer.time_projection.cpu()
    if transformer.device.type == "cuda":
        # Whoever plans asks the device what is free.
        torch.cuda.empty_cache()


def _loaded_bytes(model: LoadedModel, config: StartWorker) -> int:
    """Count what `memory_allocated` sees of a device, where that is the host: all weights but those of the layers."""
    parameters = [
        parameter
        for name, parameter in model.transformer.named_parameters()
        if not (parameter.is_meta or name.startswith(TIME_NETWORKS))
    ]
    if config.offload.vae != "parked":
        parameters += model.vae.parameters()
    return sum(parameter.nbytes for parameter in parameters) + model.text_encoder.num_bytes


def stream_transformer(
    transformer: LingBotTransformer, request: StreamRequest, layer_format: FusedFormat | None, kv: KVSpec
) -> StreamedTransformer:
    """Load the layers and let the transformer stream them. Raises `LoadFailed`."""
    settings, device = request.settings, request.source.device
    layers = StreamedLayers(transformer, request.source, layer_format)
    try:
        plan = plan_stream(
            layers.form,
            stored_tensors(request.source.component),
            settings,
            transformer.plan,
            kv,
            request.numbers,
            device,
        )
        _tell(plan, settings)
        host_plan, host = _load_host(layers, plan, request)
        wish = TransferWish(
            transfer=plan.transfer,
            limits=RegistrationLimits(max_bytes=settings.registered_bytes, timeout_s=settings.registration_timeout_s),
            falls_back=settings.falls_back,
            reason=plan.transfer_reason,
        )
        runtime = LoadedCudaRuntime(device) if device.type == "cuda" else None
        model = stream_model(layers, plan.residency, host, wish, device, runtime)
    except OffloadError as error:
        raise LoadFailed(f"offload: {error}", field="offload") from error
    # At the latest when the interpreter ends: memory is unlocked before it is unmapped.
    weakref.finalize(transformer, model.close)
    description = _describe(host_plan, model)
    logger.info("%s", description)
    streamed = StreamedTransformer(model=model, layers=layers, device=device, description=description)
    streamed.connect(transformer)
    return streamed


def _tell(plan: StreamPlan, settings: OffloadSettings) -> None:
    logger.info("weights: %s", plan.describe())
    for reason in plan.host.reasons:
        logger.warning("host weights %r can't be used: %s", settings.host, reason)
    if plan.transfer_reason is not None:
        logger.warning("weights are staged, not copied directly: %s", plan.transfer_reason)


def _load_host(layers: StreamedLayers, plan: StreamPlan, request: StreamRequest) -> tuple[HostPlan, HostLayers]:
    """Load or map the layers; the plan that comes back is the one that was carried out."""
    if plan.host.kind is HostKind.ORDINARY:
        return plan.host, make_ordinary(layers, plan.residency, request.progress)
    try:
        return _map_host(layers, plan, request)
    except OffloadError as error:
        ordinary = without_host(error, request.settings)
        logger.warning("host weights are ordinary memory: %s", error)
        return ordinary, make_ordinary(layers, plan.residency, request.progress)


def _map_host(layers: StreamedLayers, plan: StreamPlan, request: StreamRequest) -> tuple[HostPlan, HostLayers]:
    """Map the checkpoint's files, or those of the runtime cache, made first where they are not there."""
    device, progress = request.source.device, request.progress
    if plan.host.kind is HostKind.CHECKPOINT_MMAP:
        return plan.host, map_files(layers, plan.residency, plan.host, device, progress)
    cached = open_cache(layers, request)
    try:
        host = map_files(layers, plan.residency, cached.plan, device, progress, on_closed=cached.entry.close)
    except BaseException:
        cached.entry.close()
        raise
    return cached.plan, host


def _describe(plan: HostPlan, model: StreamedModel) -> str:
    reasons = f" ({'; '.join(plan.reasons)})" if plan.reasons else ""
    return f"weights streamed from {plan.kind.value} memory{reasons}, {model.describe()}"
