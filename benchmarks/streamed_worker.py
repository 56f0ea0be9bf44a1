"""Workers of LingBot-World v2 with streamed random weights, and the chunks that `offload_rate.py` runs in them."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any, cast

import torch

from benchmarks.device_memory import bound_device, memory_gib
from benchmarks.full_size import FULL, MODEL, TINY, build_runtime, open_session, start_worker
from offload.residency import LayerPart, ResidencyPlan, plan_residency
from worldmodel.checkpoint.inspection import CONTEXT_BYTES
from worldmodel.kernels.fused_layer import FusedFormat
from worldmodel.kernels.layer_ops import PlainOps
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.empty_model import build_empty, open_any
from worldmodel.lingbot.layer_parts import USES_PER_CHUNK
from worldmodel.lingbot.memory import outside_bytes
from worldmodel.lingbot.streamed_layers import LayerForm
from worldmodel.lingbot.streaming import StreamedTransformer
from worldmodel.lingbot.streaming_plan import WORKING_BYTES, buffers_bytes
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.messages import CloseSession, RequestId, SessionId, StartWorker, Tick
from worldmodel.offload_settings import OffloadSettings
from worldmodel.runtime import Runtime
from worldmodel.wan.precision import precision_plan

CHECKED_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A runtime whose weights are streamed, and handles on them."""

    runtime: Runtime
    start: StartWorker
    transformer: LingBotTransformer
    streamed: StreamedTransformer
    device: torch.device


def load(arguments: argparse.Namespace) -> Loaded:
    """Build the runtime that the arguments ask for, under their bound of device memory."""
    device = torch.device(arguments.device)
    if arguments.device_gib and device.type == "cuda":
        bound_device(device, int(arguments.device_gib * 2**30) - CONTEXT_BYTES)
    start = start_message(arguments)
    runtime = build_runtime(start)
    adapter = cast("Any", runtime)._adapter
    streamed = adapter._transformer.weights.streamed
    print(runtime.info(MODEL).attention_backend, flush=True)
    loaded = Loaded(runtime=runtime, start=start, transformer=adapter._transformer, streamed=streamed, device=device)
    show_memory(loaded, "loaded")
    return loaded


def show_memory(loaded: Loaded, moment: str) -> None:
    """Print what this process has of its device in GiB; nothing on a CPU."""
    if loaded.device.type == "cuda":
        print(f"memory, {moment}: {json.dumps(memory_gib(loaded.device))}", flush=True)


def planned_gib(loaded: Loaded) -> dict[str, float]:
    """Return what the plan counts: all that torch may have of the device, and what is left for workspaces."""
    adapter = cast("Any", loaded.runtime)._adapter
    kv = adapter.kv_spec()
    counted = {
        "other_weights": outside_bytes(
            loaded.transformer, adapter._vae, loaded.transformer.plan, parks_vae=loaded.start.offload.vae == "parked"
        ),
        "layers_and_buffers": loaded.streamed.model.residency.device_bytes,
        "sessions": kv.required_bytes(loaded.start.requested_sessions),
    }
    counted["all"] = sum(counted.values())
    return {name: round(num_bytes / 2**30, 3) for name, num_bytes in {**counted, "working": WORKING_BYTES}.items()}


def start_message(arguments: argparse.Namespace) -> StartWorker:
    # A small card, or one that two workers share, has room for one session and none for the text encoder.
    is_small = bool(arguments.device_gib or arguments.second_worker)
    return start_worker(
        device=arguments.device,
        precision=arguments.precision,
        is_tiny=arguments.tiny,
        num_sessions=1 if is_small else 2,
        options={"text_encoder": "streamed" if is_small else "resident", **arguments.options},
        offload=settings(arguments),
    )


def settings(arguments: argparse.Namespace) -> OffloadSettings:
    """Stream everything, except under a bound of device memory, where the plan decides."""
    return OffloadSettings(
        weights="streamed",
        host=arguments.host,
        transfer="staged" if arguments.device == "cpu" else "registered",
        resident_bytes=None if arguments.device_gib else smallest_budget(arguments),
        device_bytes=int(arguments.device_gib * 2**30) if arguments.device_gib else None,
        cache_folder=arguments.cache,
        vae=arguments.vae,
        camera_modulation=arguments.camera,
        decode=arguments.decode,
    )


def smallest_budget(arguments: argparse.Namespace) -> int:
    """Return what two buffers of every part take: the smallest budget."""
    empty = build_empty(open_any(TINY if arguments.tiny else FULL), LingBotOptions())
    plan = precision_plan(arguments.precision)
    is_fused = arguments.device != "cpu" or plan.quantizes_linears
    layer_format = FusedFormat(PlainOps(), plan.linear, quantize=plan.quantizes_linears) if is_fused else None
    form = LayerForm(empty.transformer.config, plan, layer_format)
    return buffers_bytes(form.layouts, form.num_layers)


def plan_share(loaded: Loaded, share: float) -> ResidencyPlan:
    """Keep this share of the layers' bytes on the device, buffers not counted."""
    layouts = loaded.streamed.layers.layouts
    parts = [
        LayerPart(name=name, layer_bytes=layout.num_bytes, uses_per_chunk=USES_PER_CHUNK[name])
        for name, layout in layouts.items()
    ]
    num_layers = loaded.streamed.layers.num_layers
    layer_bytes = sum(part.layer_bytes for part in parts)
    if share >= 1.0:
        return plan_residency(parts, num_layers, None)
    return plan_residency(parts, num_layers, int((share * num_layers + 2) * layer_bytes))


def check_bits(loaded: Loaded, name: str) -> str:
    """Run the first chunks of a new session; return a digest of all their outputs."""
    digest = hashlib.sha256()
    session = f"check-{name}"
    for index in range(CHECKED_CHUNKS):
        digest.update(one_chunk(loaded, session, index))
    close_session(loaded, session)
    return digest.hexdigest()


def close_session(loaded: Loaded, session: str) -> None:
    loaded.runtime.close(CloseSession(request_id=RequestId("close"), session_id=SessionId(session)))


def one_chunk(loaded: Loaded, session: str, index: int) -> bytes:
    """Run one chunk of a session, which chunk 0 opens; return its pixels."""
    if index == 0:
        open_session(loaded.runtime, loaded.start, session)
    tick = Tick(request_id=RequestId(f"{session}-{index}"), session_id=SessionId(session), chunk_index=index)
    started_s = time.perf_counter()
    _, parts = loaded.runtime.tick(tick).to_host()
    print(f"{session}: chunk {index} in {1000 * (time.perf_counter() - started_s):.1f} ms", flush=True)
    show_memory(loaded, f"{session}, chunk {index}")
    return b"".join(bytes(part) for part in parts)
