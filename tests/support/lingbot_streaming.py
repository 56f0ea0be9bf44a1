"""A LingBot transformer of six layers whose checkpoint is a file, resident or streamed, and what it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvcache.cache import KVCache
from kvcache.spec import KVSpec
from offload.streamed_model import StreamedModel
from tests.support.lingbot_network import SESSION, transformer_config
from worldmodel.checkpoint.loading import Progress
from worldmodel.checkpoint.random_weights import RandomWeights
from worldmodel.checkpoint.safetensors_header import read_safetensors_header
from worldmodel.checkpoint.stored_component import StoredComponent
from worldmodel.kernels.fused_layer import FusedFormat
from worldmodel.kernels.layer_ops import PlainOps
from worldmodel.lingbot.fused_forward import FusedForward
from worldmodel.lingbot.layer_parts import is_streamed_name
from worldmodel.lingbot.pipeline import Forward
from worldmodel.lingbot.published import RANDOM_GAINS
from worldmodel.lingbot.streamed_layers import LayerSource
from worldmodel.lingbot.streaming import stream_transformer
from worldmodel.lingbot.streaming_cache import StreamRequest
from worldmodel.lingbot.streaming_plan import DeviceNumbers
from worldmodel.lingbot.transformer import LingBotTransformer, kv_geometry
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.offload_settings import OffloadSettings
from worldmodel.wan.precision import precision_plan

CPU = torch.device("cpu")
NUM_LAYERS, FRAMES, HEIGHT, WIDTH = 6, 2, 4, 6
NUM_CHUNKS = 3


def config() -> TransformerConfig:
    """Return the sizes of the golden transformer, with more layers."""
    golden = transformer_config(sink_latent_frames=1, visible_latent_frames=5, latent_frames_per_chunk=FRAMES)
    return replace(golden, num_layers=NUM_LAYERS)


def write_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> StoredComponent:
    """Write random weights into one file and open it."""
    weights = RandomWeights(seed=4, gains=RANDOM_GAINS["transformer"])
    with torch.device("meta"):
        model = LingBotTransformer(config())
    file = folder / f"weights-{dtype}.safetensors"
    save_file({name: weights.tensor(name, tuple(slot.shape), dtype) for name, slot in model.state_dict().items()}, file)
    tensors = {info.name: info for info in read_safetensors_header(file).tensors}
    return StoredComponent(subject="transformer", class_name="", config={}, tensors=tensors, folder=folder)


def load(
    component: StoredComponent, precision: str, *, streams: bool, device: torch.device = CPU
) -> LingBotTransformer:
    """Load as a worker does; with `streams` all but the linears of the layers."""
    plan = precision_plan(precision)
    with torch.device("meta"):
        model = LingBotTransformer(config())
    component.load_into(
        model, dtype=plan.linear, device=device, only=(lambda name: not is_streamed_name(name)) if streams else None
    )
    model.apply_precision(plan)
    return model


def resident(
    component: StoredComponent, precision: str, *, is_fused: bool, device: torch.device = CPU
) -> tuple[LingBotTransformer, Forward]:
    """Return a transformer with all weights, and what runs its forwards."""
    model = load(component, precision, streams=False, device=device)
    if not is_fused:
        return model, model
    return model, FusedForward(model, PlainOps(), quantize=model.plan.quantizes_linears)


def streamed(
    component: StoredComponent,
    precision: str,
    settings: OffloadSettings,
    *,
    is_fused: bool,
    numbers: DeviceNumbers | None = None,
    device: torch.device = CPU,
    digest: str = "golden",
    progress: Progress = lambda fraction, detail: None,
) -> tuple[LingBotTransformer, Forward, StreamedModel, str]:
    """Return a transformer that streams, what runs its forwards, the weights to close, and the description."""
    model = load(component, precision, streams=True, device=device)
    layer_format = None
    if is_fused:
        layer_format = FusedFormat(PlainOps(), model.plan.linear, quantize=model.plan.quantizes_linears)
    request = StreamRequest(
        source=LayerSource(component=component, device=device),
        settings=settings,
        numbers=numbers or DeviceNumbers(loaded_bytes=0, free_bytes=None),
        digest=digest,
        progress=progress,
    )
    found = stream_transformer(model, request, layer_format, kv_spec(model))
    forward: Forward = model
    if is_fused:
        quantizes = model.plan.quantizes_linears
        forward = FusedForward(model, PlainOps(), quantize=quantizes, layers=found.fused)
    return model, forward, found.model, found.description


def kv_spec(model: LingBotTransformer, height: int = HEIGHT, width: int = WIDTH) -> KVSpec:
    return kv_geometry(model.config, model.plan, latent_height=height, latent_width=width)


def rollout(
    model: LingBotTransformer, forward: Forward, *, height: int = HEIGHT, width: int = WIDTH
) -> list[torch.Tensor]:
    """Return the flow of some chunks, the last ones past a slid window, with a prompt that changes on the way.

    `height` and `width` are those of latent frames.
    """
    cache = KVCache(kv_spec(model, height, width), capacity=1, device=model.device, dtype=model.plan.kv)
    cache.open(SESSION)
    generator = torch.Generator().manual_seed(3)
    sizes, frames = model.config, model.config.latent_frames_per_chunk

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(model.device)

    flows = []
    with torch.inference_mode():
        noisy_time, clean_time = model.time_constants(500.0), model.time_constants(0.0)
        for index in range(NUM_CHUNKS):
            latents = draw(sizes.out_channels, frames, height, width)
            condition = draw(sizes.in_channels - sizes.out_channels, frames, height, width)
            with cache.lease(SESSION) as lease:
                chunk = lease.begin_chunk()
                if index != 1:
                    model.publish_text(draw(4, sizes.text_dim), chunk)
                rays = model.project_rays(draw(sizes.camera_channels, frames, height, width))
                inputs = model.chunk_inputs(condition, rays, index * frames)
                for _ in range(2):
                    flows.append(forward.flow(latents, noisy_time, inputs, chunk))
                forward.store_clean(latents, clean_time, inputs, chunk)
                chunk.commit()
    return flows
