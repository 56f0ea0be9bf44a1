"""What `doctor` says of streamed weights: the worker's own plan, and how long a chunk takes at the rates of this host.

Copying is measured with a buffer of 256 MiB, computing with one matrix product of each number format; all are given
back. Decoding, norms and the start of kernels come on top, so that a chunk takes no less than what is said.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvcache.spec import KVSpec
from offload.cache_folder import nearest_folder
from offload.errors import OffloadError
from offload.host_plan import HostKind
from offload.link import measure_link, measure_staged
from offload.streamed_model import Transfer
from worldmodel.checkpoint.component import Checkpoint
from worldmodel.checkpoint.inspection import num_parameters
from worldmodel.errors import LoadFailed
from worldmodel.kernels.layer_ops import FP8
from worldmodel.lingbot.acceleration import layer_format
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import EmptyModel, build_empty, open_any
from worldmodel.lingbot.layer_parts import USES_PER_CHUNK
from worldmodel.lingbot.memory import configured_kv, outside_bytes
from worldmodel.lingbot.streamed_layers import LayerForm, stored_tensors
from worldmodel.lingbot.streaming_plan import (
    WORKING_BYTES,
    DeviceNumbers,
    StreamPlan,
    buffers_bytes,
    plan_stream,
)
from worldmodel.messages import StartWorker
from worldmodel.tools.amounts import bytes_text
from worldmodel.tools.doctor import Check, Needs, Status
from worldmodel.wan.precision import PrecisionPlan, precision_plan
from worldmodel.wan.text_encoder import default_placement
from worldmodel.wan.text_names import TextPlacement

PRODUCT = 4096
"""Rows, columns and depth of the product that is timed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preview:
    """What a worker plans with, before it has weights. Build it with `preview`."""

    start: StartWorker
    checkpoint: Checkpoint
    empty: EmptyModel
    options: LingBotOptions
    precision: PrecisionPlan
    kv: KVSpec

    @property
    def device(self) -> torch.device:
        return torch.device(self.start.device)

    @property
    def loaded_bytes(self) -> int:
        """Count what a worker finds on its device when it plans: all weights but those of the layers."""
        empty, precision = self.empty, self.precision
        parks_vae = self.start.offload.vae == "parked"
        text_bytes = num_parameters(empty.text_encoder) * precision.text_encoder.itemsize
        placement = self.options.text_encoder or default_placement(
            empty.text_encoder, precision.text_encoder, self.device
        )
        is_there = placement is TextPlacement.RESIDENT or self.device.type != "cuda"
        return outside_bytes(empty.transformer, empty.vae, precision, parks_vae=parks_vae) + is_there * text_bytes

    def form(self) -> LayerForm:
        """Return the layers as the worker would have them. Raises `LoadFailed` for operations that can't be had."""
        config = self.empty.transformer.config
        return LayerForm(config, self.precision, layer_format(self.options, self.precision, self.device))

    def plan(self, device_free_bytes: int | None = None) -> StreamPlan:
        """Plan as a worker would. `device_free_bytes`: of a device without this worker; None if nobody measured it.

        Raises `LoadFailed` or `OffloadError` as a start does.
        """
        loaded_bytes = self.loaded_bytes
        numbers = DeviceNumbers(
            loaded_bytes=loaded_bytes,
            free_bytes=None if device_free_bytes is None else device_free_bytes - loaded_bytes,
            gpu_memory_fraction=self.start.gpu_memory_fraction if self.device.type == "cuda" else 1.0,
        )
        stored = stored_tensors(self.checkpoint.component("transformer"))
        return plan_stream(self.form(), stored, self.start.offload, self.precision, self.kv, numbers, self.device)


def preview(start: StartWorker, checkpoint: Checkpoint, empty: EmptyModel, options: LingBotOptions) -> Preview:
    """Put together what a worker of this configuration plans with. Raises ValueError for an unknown precision."""
    precision = precision_plan(start.precision, device=torch.device(start.device), vae=options.vae_precision)
    kv = configured_kv(
        empty.transformer.config,
        empty.vae,
        precision,
        width=start.width,
        height=start.height,
        options=options,
        offload=start.offload,
        requested_sessions=start.requested_sessions,
    )
    return Preview(start=start, checkpoint=checkpoint, empty=empty, options=options, precision=precision, kv=kv)


def open_preview(start: StartWorker) -> Preview:
    """Open the checkpoint of a configuration for a preview. Raises what a load raises."""
    options = LingBotOptions.from_json(start.model_options).for_worker()
    checkpoint = open_any(start.checkpoint)
    return preview(start, checkpoint, build_empty(checkpoint, options), options)


def streamed_needs(before: Preview, needs: Needs, plan: StreamPlan | None) -> Needs | None:
    """Return what the configuration needs when layers are streamed, None for layers that can't be as they are wished.

    `plan` of None: there is none, every layer counts.
    """
    try:
        layouts = before.form().layouts
    except LoadFailed:
        return None
    num_layers = before.empty.transformer.config.num_layers
    all_bytes = num_layers * sum(layout.num_bytes for layout in layouts.values())
    return replace(
        needs,
        shared_bytes=0 if plan is None or plan.host.kind is HostKind.ORDINARY else plan.residency.host_bytes,
        device={
            "other weights": before.loaded_bytes,
            "buffers of layers": buffers_bytes(layouts, num_layers),
            "working memory": WORKING_BYTES if before.device.type == "cuda" else 0,
            "one session": before.kv.required_bytes(1),
        },
        host={**needs.host, "streamed layers": all_bytes if plan is None else plan.residency.host_bytes},
        locked={**needs.locked, "streamed layers": 0 if plan is None else plan.locked_bytes},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The plan of a worker on the device that is there, or why there is none."""

    before: Preview
    plan: StreamPlan | None
    problem: str = ""

    def checks(self) -> Iterator[Check]:
        """Say the plan, and of a cache whether there is room for it."""
        yield self._check_plan()
        if self.plan is not None and self.plan.host.kind is HostKind.RUNTIME_CACHE:
            yield self._check_cache()

    def _check_cache(self) -> Check:
        """Compare the disk with an entry. FAIL where none can be there yet, WARN where it may be or need not."""
        layouts, num_layers = self.before.form().layouts, self.before.empty.transformer.config.num_layers
        entry_bytes = num_layers * sum(place.tensor.num_bytes for each in layouts.values() for place in each.places)
        root = Path(self.before.start.offload.cache_folder)
        free_bytes = shutil.disk_usage(nearest_folder(root)).free
        may_start = (root / "entries").is_dir() or self.before.start.offload.falls_back
        return Check(
            status=Status.OK if free_bytes >= entry_bytes else Status.WARN if may_start else Status.FAIL,
            name="disk for the cache",
            expected=f"{bytes_text(entry_bytes)} in {root}, if the weights are not there yet",
            found=f"{bytes_text(free_bytes)} free",
        )

    def _check_plan(self) -> Check:
        """Say it, and measure how long a chunk takes under it. WARN: something is not as it was wished for."""
        wish = self.before.start.offload
        expected = f"streamed weights, {wish.host}, {wish.transfer}"
        if self.plan is None:
            return Check(status=Status.FAIL, name="offload", expected=expected, found=self.problem)
        is_as_wished = self.plan.host.kind is HostKind(wish.host) and self.plan.transfer is Transfer(wish.transfer)
        found = f"{self.plan.describe()}; {_forecast(self.before, self.plan)}"
        return Check(status=Status.OK if is_as_wished else Status.WARN, name="offload", expected=expected, found=found)


def look_ahead(before: Preview) -> Outlook:
    """Plan as a worker would on this device, which must be there."""
    device = before.device
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    try:
        return Outlook(before=before, plan=before.plan(free_bytes))
    except (LoadFailed, OffloadError) as error:
        return Outlook(before=before, plan=None, problem=str(error))


def _forecast(before: Preview, plan: StreamPlan) -> str:
    """Measure the rates of this device, and say what a chunk takes at least."""
    device = before.device
    compute_ms = 1000 * _compute_s(chunk_work(before.empty, before.kv), before.precision, device)
    if plan.residency.copied_bytes_per_chunk == 0:
        return f"nothing is copied, a chunk takes at least {compute_ms:.0f} ms"
    measure = measure_link if plan.transfer is Transfer.REGISTERED else measure_staged
    rate = measure(device)
    copy_ms = plan.residency.copy_ms(rate)
    return (
        f"at {rate / 1e9:.1f} GB/s a chunk takes at least {max(copy_ms, compute_ms):.0f} ms "
        f"(copying {copy_ms:.0f} ms, computing {compute_ms:.0f} ms)"
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
