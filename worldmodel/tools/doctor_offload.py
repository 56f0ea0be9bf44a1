"""What `doctor` says of streamed weights: the plan, and how long a chunk takes at the measured rates of this host.

Copying is measured with a buffer of 256 MiB, computing with one matrix product of each number format; all are given
back. Decoding, norms and the start of kernels come on top, so that a chunk takes no less than what is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvcache.spec import KVSpec
from offload.errors import IllegalCombination
from offload.layout import FlatLayout
from offload.link import measure_link
from offload.residency import ResidencyPlan
from worldmodel.errors import LoadFailed
from worldmodel.kernels.fused_layer import FusedFormat
from worldmodel.kernels.layer_ops import FP8, PlainOps
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import EmptyModel, build_empty, open_any
from worldmodel.lingbot.layer_parts import USES_PER_CHUNK, is_streamed_name
from worldmodel.lingbot.memory import outside_bytes, plan_kv
from worldmodel.lingbot.streamed_layers import part_layouts
from worldmodel.lingbot.streaming_plan import DeviceNumbers, check_settings, plan_layers
from worldmodel.messages import StartWorker
from worldmodel.tools.doctor import Check, Needs, Status
from worldmodel.wan.precision import PrecisionPlan, precision_plan

PRODUCT = 4096
"""Rows, columns and depth of the product that is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan and what a chunk takes under it at least, in milliseconds."""

    residency: ResidencyPlan
    link_bytes_per_s: float
    copy_ms: float
    compute_ms: float

    def describe(self) -> str:
        """Say it in a line."""
        longer = max(self.copy_ms, self.compute_ms)
        return (
            f"{self.residency.describe()}; at {self.link_bytes_per_s / 1e9:.1f} GB/s a chunk takes at least "
            f"{longer:.0f} ms (copying {self.copy_ms:.0f} ms, computing {self.compute_ms:.0f} ms)"
        )


def check_offload(start: StartWorker) -> Iterator[Check]:
    """Yield what is to be said of the section [offload]: nothing where weights are resident."""
    if not start.offload.streams:
        return
    expected = f"streamed weights, {start.offload.host}, {start.offload.transfer}"
    try:
        check_settings(start.offload, _precision(start), torch.device(start.device))
        forecast = predict(start)
    except (LoadFailed, IllegalCombination) as error:
        yield Check(status=Status.FAIL, name="offload", expected=expected, found=str(error))
        return
    yield Check(status=Status.OK, name="offload", expected=expected, found=forecast.describe())


def predict(start: StartWorker) -> Forecast:
    """Plan as a worker would, and measure the rates. The device must be there. Raises `LoadFailed` as a start does."""
    device = torch.device(start.device)
    empty = _empty(start)
    kv = _kv(start, empty)
    free_bytes = None
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0] - _outside_bytes(start, empty)
    residency = _plan(start, empty, kv, free_bytes)
    link = measure_link(device)
    return Forecast(
        residency=residency,
        link_bytes_per_s=link,
        copy_ms=residency.copy_ms(link),
        compute_ms=1000 * _compute_s(chunk_work(empty, kv), _precision(start), device),
    )


def plan_by_sizes(start: StartWorker) -> ResidencyPlan:
    """Plan as a worker would on a device that is not there. Raises `LoadFailed` as a start does."""
    empty = _empty(start)
    return _plan(start, empty, _kv(start, empty), None)


def streamed_needs(start: StartWorker, needs: Needs) -> Needs:
    """Return what a configuration needs if its layers are streamed: buffers on the device, the layers on the host."""
    if not start.offload.streams:
        return needs
    empty = _empty(start)
    plan = _precision(start)
    layouts = _layouts(empty, plan)
    buffers_bytes = 2 * sum(layout.num_bytes for layout in layouts.values())
    layers_bytes = empty.transformer.config.num_layers * buffers_bytes // 2
    resident_bytes = sum(
        parameter.numel() * plan.linear.itemsize
        for name, parameter in empty.transformer.named_parameters()
        if is_streamed_name(name)
    )
    locked_bytes = layers_bytes if start.offload.transfer == "registered" else 0
    return replace(
        needs,
        device_bytes=needs.device_bytes - resident_bytes + buffers_bytes,
        host_bytes=needs.host_bytes + layers_bytes,
        locked_bytes=needs.locked_bytes + locked_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWork:
    """Operations of a chunk: the layers' large linears, attention, and the linears of the camera."""

    linears_flop: float
    attention_flop: float
    camera_flop: float


def chunk_work(empty: EmptyModel, kv: KVSpec) -> ChunkWork:
    """Count the operations of a chunk with a full window: five forwards, the camera once, no decoding."""
    config = empty.transformer.config
    tokens = config.latent_frames_per_chunk * kv.tokens_per_latent_frame
    visible = config.sink_latent_frames + (config.window_latent_frames or config.latent_frames_per_chunk)
    keys = visible * kv.tokens_per_latent_frame + config.text_rows
    width = config.width
    forwards = config.num_layers * USES_PER_CHUNK["forward"]
    return ChunkWork(
        linears_flop=forwards * 2 * tokens * width * (6 * width + 2 * config.ffn_dim),
        attention_flop=forwards * 4 * tokens * keys * width,
        camera_flop=config.num_layers * 2 * tokens * width * 4 * width,
    )


def _compute_s(work: ChunkWork, plan: PrecisionPlan, device: torch.device) -> float:
    """Return how long a chunk's products take at the rates of this device. A CPU widens float8: no rate of its own."""
    rate = _product_rate(device, plan.linear)
    fast = _product_rate(device, FP8) if plan.quantizes_linears and device.type == "cuda" else rate
    linears_s = work.linears_flop / fast
    attention_s = work.attention_flop / (fast if plan.quantizes_kv else rate)
    return linears_s + attention_s + work.camera_flop / rate


def _options(start: StartWorker) -> LingBotOptions:
    return LingBotOptions.from_json(start.model_options).for_worker()


def _precision(start: StartWorker) -> PrecisionPlan:
    return precision_plan(start.precision, device=torch.device(start.device), vae=_options(start).vae_precision)


def _empty(start: StartWorker) -> EmptyModel:
    return build_empty(open_any(start.checkpoint), _options(start))


def _kv(start: StartWorker, empty: EmptyModel) -> KVSpec:
    return plan_kv(
        empty.transformer.config,
        empty.vae,
        _precision(start),
        width=start.width,
        height=start.height,
        requested_sessions=start.requested_sessions,
        keeps_camera=start.offload.camera_modulation == "per_chunk",
        decodes_whole_chunks=start.offload.decode == "whole_chunk",
        parks_vae=start.offload.vae == "parked",
    )


def _layouts(empty: EmptyModel, plan: PrecisionPlan) -> dict[str, FlatLayout]:
    layer_format = FusedFormat(PlainOps(), plan.linear, quantize=True) if plan.quantizes_linears else None
    return part_layouts(empty.transformer.config, plan, layer_format)


def _outside_bytes(start: StartWorker, empty: EmptyModel) -> int:
    plan, parks_vae = _precision(start), start.offload.vae == "parked"
    return outside_bytes(empty.transformer, empty.vae, plan, parks_vae=parks_vae)


def _plan(start: StartWorker, empty: EmptyModel, kv: KVSpec, free_bytes: int | None) -> ResidencyPlan:
    plan = _precision(start)
    numbers = DeviceNumbers(
        loaded_bytes=_outside_bytes(start, empty),
        free_bytes=free_bytes,
        gpu_memory_fraction=start.gpu_memory_fraction if free_bytes is not None else 1.0,
    )
    return plan_layers(_layouts(empty, plan), empty.transformer.config.num_layers, start.offload, kv, numbers)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations a second of a matrix product; smaller on a CPU, where it would take long."""
    size = PRODUCT if device.type == "cuda" else PRODUCT // 8
    product = _product(torch.ones(size, size, device=device).to(dtype))
    times_s = []
    for _ in range(3):
        started_s = time.perf_counter()
        product()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - started_s)
    return 2 * size**3 / min(times_s)


def _product(a_NN: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a product of a square matrix; in float8 that of the layers, with a scale per row."""
    if a_NN.dtype != FP8:
        return lambda: a_NN @ a_NN
    scales_N1 = torch.ones(a_NN.shape[0], 1, device=a_NN.device)
    return lambda: torch._scaled_mm(
        a_NN, a_NN.t(), scale_a=scales_N1, scale_b=scales_N1.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
