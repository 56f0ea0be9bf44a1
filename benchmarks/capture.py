"""Measure what CUDA graphs and regional compile would gain: one forward of a model with a full window, in every form.

    python -m benchmarks.capture --model lingbot --json capture_lingbot.json
    python -m benchmarks.capture --model dreamzero --scale 5b --json capture_dreamzero.json

A real runtime with random weights runs until its window is full; in the next tick one forward is run again and again on
the same input: as it serves, captured in a CUDA graph, with the layers as written, and with those compiled between
their attentions (one compilation for all layers). `device lengths` is the form that one graph for all sessions and fill
states needs: FlashAttention-3 that reads extent and length from device memory. `calls` is the mean of calls back to
back, `host` until one call returns to the host, `idle` the gaps between the kernels of one call under the profiler.
`--tiny --device cpu` checks the script: there are no graphs on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import dreamzero_call, full_size
from benchmarks.arguments import device_name, new_file, precision_name
from benchmarks.provenance import provenance
from kvcache.attention import Attention
from kvcache.attention_backends import FLASH3_MODULE
from training.demo_world.options import count
from worldmodel.dreamzero.published import Scale, published
from worldmodel.lingbot.transformer import TEXT_STORE, ChunkInputs, Layer, LingBotTransformer
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime
from worldmodel.wan.layers import unpatchify
from worldmodel.wan.transformer import LayerModulation

SESSION = "session"
FULL_WINDOW_CHUNK = 7
DREAMZERO_CALL = 3
"""The call at the last start frame before the restart: the longest history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of a forward: what runs it, and what has to be in force meanwhile."""

    name: str
    call: Callable[[], Tensor]
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one form takes; `prepared_s` is the first call, with compilation, or the capture."""

    name: str
    calls_ms: float
    host_ms: float
    idle_ms: float | None
    prepared_s: float
    graph_bytes: int
    distance: float


class Interposed:
    """Takes the place of a model's forward. Calls pass through until it is armed, then the next one is measured."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner = inner
        self._method = method
        self.measure: Callable[..., None] | None = None

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)
        return self._through if name == self._method else inner

    def _through(self, *arguments: Any) -> Any:
        call = getattr(self._inner, self._method)
        measure, self.measure = self.measure, None
        if measure is not None:
            measure(*arguments)
        return call(*arguments)


# ------------------------------------------------------------ the layers as written, compiled between attentions


class CompiledLayers:
    """`LingBotTransformer.flow` whose layers are compiled in three pieces; the K/V cache stays outside of them."""

    def __init__(self, transformer: LingBotTransformer, backend: str) -> None:
        self._transformer = transformer
        pieces = (_before_attention, _between_attentions, _after_attentions)
        self._before, self._between, self._after = (torch.compile(each, backend=backend) for each in pieces)

    def flow(self, x_CFYX: Tensor, time_: Any, inputs: ChunkInputs, chunk: Any) -> Tensor:
        """Predict the flow as the transformer does."""
        model = self._transformer
        turns_T1R2 = torch.view_as_real(inputs.rotations.to(torch.complex64)).contiguous()
        h_TD = model.embed_latents(x_CFYX, inputs)
        for index, layer in enumerate(model.layers):
            m, camera = time_.layers[index], model.camera_at(index, inputs)
            query_THK, key_THK, value_THK = self._before(layer, h_TD, m, turns_T1R2)
            chunk.write(index, key_THK, value_THK)
            attended_THK = chunk.attend(index, query_THK)
            h_TD, query_THK = self._between(layer, h_TD, attended_THK, m, camera)
            text_THK = chunk.cross_store(TEXT_STORE).attend(index, query_THK)
            h_TD = self._after(layer, h_TD, text_THK, m)
        return unpatchify(
            model.head(h_TD, time_),
            num_frames=inputs.num_latent_frames,
            latent_height=inputs.latent_height,
            latent_width=inputs.latent_width,
        )


def _before_attention(
    layer: Layer, h_TD: Tensor, m: LayerModulation, turns_T1R2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    a_TD = layer.self_attention_input(h_TD, m)
    key_THK, value_THK = layer.self_attn.key_value(a_TD)
    return _turn(layer.self_attn.query(a_TD), turns_T1R2), _turn(key_THK, turns_T1R2), value_THK


def _between_attentions(
    layer: Layer, h_TD: Tensor, attended_THK: Tensor, m: LayerModulation, camera: Any
) -> tuple[Tensor, Tensor]:
    h_TD = layer.after_self_attention(h_TD, attended_THK, m, camera)
    return h_TD, layer.cross_query(h_TD)


def _after_attentions(layer: Layer, h_TD: Tensor, text_THK: Tensor, m: LayerModulation) -> Tensor:
    return layer.after_cross_attention(h_TD, text_THK, m)


def _turn(x_THK: Tensor, turns_T1R2: Tensor) -> Tensor:
    """Rotate pairs in real numbers: inductor has no complex ones."""
    even, odd = x_THK.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = turns_T1R2.unbind(-1)
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
    return turned.flatten(-2).to(x_THK.dtype)


class DeviceLengths:
    """FlashAttention-3 over history that reads extent and length from device memory; other calls go to `inner`."""

    name = "flash3, device lengths"

    def __init__(self, inner: Attention, num_keys: int, device: torch.device) -> None:
        self._inner = inner
        self._num_keys = num_keys
        self._forward = importlib.import_module(FLASH3_MODULE).flash_attn_with_kvcache
        self._extent = torch.zeros(1, dtype=torch.int32, device=device)
        self._length = torch.full((1,), num_keys, dtype=torch.int32, device=device)

    def __call__(self, q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, logit_bias_S: Tensor | None = None) -> Tensor:
        if logit_bias_S is not None or k_SHD.shape[0] != self._num_keys:
            return self._inner(q_NHD, k_SHD, v_SHD, logit_bias_S=logit_bias_S)
        out = self._forward(
            q_NHD[None],
            k_SHD[None],
            v_SHD[None],
            cache_seqlens=self._length,
            cache_batch_idx=self._extent,
            num_splits=1,
        )
        out_1NHD: Tensor = out[0] if isinstance(out, tuple) else out
        return out_1NHD[0]


# ------------------------------------------------------------ measuring


class Meter:
    """Run forms one after the other, each against the output of the first."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats
        self._expected: Tensor | None = None
        self.rows: list[Timed] = []
        self.failures: dict[str, str] = {}

    def measure(self, form: Form) -> None:
        """Time a form as it is and, on CUDA, captured in a graph.

        One that cannot be had is noted, so that the others follow.
        """
        with form.within():
            try:
                started_s = self._now_s()
                form.call()
                self._add(form.name, form.call, self._now_s() - started_s, 0)
                if self._device.type == "cuda":
                    self._measure_captured(form)
            except RuntimeError as error:
                self.failures[form.name] = (str(error).splitlines() or ["?"])[0][:200]
                print(f"{form.name}: failed: {self.failures[form.name]}", flush=True)

    def _measure_captured(self, form: Form) -> None:
        torch.cuda.empty_cache()
        before_bytes, started_s = torch.cuda.memory_reserved(self._device), self._now_s()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = form.call()
        prepared_s, graph_bytes = self._now_s() - started_s, torch.cuda.memory_reserved(self._device) - before_bytes

        def replay() -> Tensor:
            graph.replay()
            return out

        self._add(f"{form.name}, in a graph", replay, prepared_s, graph_bytes)
        graph.reset()

    def _add(self, name: str, call: Callable[[], Tensor], prepared_s: float, graph_bytes: int) -> None:
        out = call().float()
        expected = out.clone() if self._expected is None else self._expected
        self._expected = expected
        distance = float((out - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        started_s = self._now_s()
        for _ in range(self._repeats):
            call()
        calls_ms = 1000 * (self._now_s() - started_s) / self._repeats
        started_s = self._now_s()
        call()
        host_ms = 1000 * (time.perf_counter() - started_s)
        row = Timed(
            name=name,
            calls_ms=calls_ms,
            host_ms=host_ms,
            idle_ms=self._idle_ms(call),
            prepared_s=prepared_s,
            graph_bytes=graph_bytes,
            distance=distance,
        )
        self.rows.append(row)
        idle = "" if row.idle_ms is None else f"  idle {row.idle_ms:6.2f} ms"
        print(
            f"{name:45} {calls_ms:8.2f} ms  host {host_ms:7.2f} ms{idle}  prepared in {prepared_s:5.1f} s  "
            f"graph {graph_bytes / 2**20:6.0f} MiB  distance {distance:.1e}",
            flush=True,
        )

    def _idle_ms(self, call: Callable[[], Tensor]) -> float | None:
        if self._device.type != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize(self._device)
        on_device = torch.autograd.DeviceType.CUDA
        spans = [
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events()
            if event.device_type == on_device
        ]
        return sum(gap["ms"] for gap in full_size.gaps(spans)) if spans else None

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


# ------------------------------------------------------------ the two models


def measure_lingbot(arguments: argparse.Namespace, meter: Meter) -> dict[str, Any]:
    """Measure a forward of LingBot-World v2 with a full window."""
    options = {"text_encoder": "resident"}
    start = full_size.start_worker(
        device=arguments.device, precision=arguments.precision, is_tiny=arguments.tiny, options=options
    )
    adapter = full_size.build_adapter(start)
    runtime = Runtime(adapter, allocate_cache(adapter.kv_spec(), start, adapter.attention()), device=start.device)
    forward = adapter._acceleration.forward
    interposed = Interposed(forward, "flow")
    adapter._sampler.use(interposed)
    full_size.run_chunks(runtime, start, [SESSION], 0, FULL_WINDOW_CHUNK)

    def measure(x_CFYX: Tensor, time_: Any, inputs: ChunkInputs, chunk: Any) -> None:
        transformer = adapter._transformer
        given = (x_CFYX, time_, inputs, chunk)
        meter.measure(Form(name="as it serves", call=lambda: forward.flow(*given)))
        if adapter._acceleration.description.startswith("flash3") and not transformer.plan.quantizes_kv:
            attention = DeviceLengths(chunk._attention, chunk.visible(0)[0].shape[0], transformer.device)
            within = _attention_of(chunk, attention)
            meter.measure(Form(name="device lengths", call=lambda: forward.flow(*given), within=within))
        if not transformer.plan.quantizes_linears:
            compiled = CompiledLayers(transformer, arguments.backend)
            meter.measure(Form(name="layers as written", call=lambda: transformer.flow(*given)))
            meter.measure(Form(name="layers compiled", call=lambda: compiled.flow(*given)))

    interposed.measure = measure
    full_size.run_chunks(runtime, start, [SESSION], FULL_WINDOW_CHUNK, FULL_WINDOW_CHUNK + 1)
    return {"attention": adapter._acceleration.description, "compiled_graphs": _num_compiled()}


def _attention_of(chunk: Any, attention: Attention) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def replaced() -> Any:
        kept, chunk._attention = chunk._attention, attention
        try:
            yield
        finally:
            chunk._attention = kept

    return replaced


def _num_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def measure_dreamzero(arguments: argparse.Namespace, meter: Meter) -> dict[str, Any]:
    """Measure a denoising forward of DreamZero at its last start frame."""
    config = published(Scale.TINY if arguments.tiny else Scale(arguments.scale or "5b"))
    model = dreamzero_call.build_model(config, arguments.precision, torch.device(arguments.device))
    adapter, _, runtime = dreamzero_call.build_runtime(
        model, config, precision=arguments.precision, num_sessions=1, options={}
    )
    forward = adapter._acceleration.forward
    interposed = Interposed(forward, "velocity")
    adapter._sampler._forward = interposed
    dreamzero_call.open_session(runtime, SESSION)
    for index in range(DREAMZERO_CALL):
        dreamzero_call.run_call(runtime, model.robot, SESSION, index)

    def measure(*given: Any) -> None:
        meter.measure(Form(name="as it serves", call=lambda: forward.velocity(*given).video_BCFYX))

    interposed.measure = measure
    dreamzero_call.run_call(runtime, model.robot, SESSION, DREAMZERO_CALL)
    return {"attention": adapter._acceleration.description}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("lingbot", "dreamzero"), default="lingbot", help="default lingbot")
    parser.add_argument("--scale", choices=("14b", "5b"), help="of DreamZero (default 5b)")
    parser.add_argument("--precision", type=precision_name, default="bf16", help="precision plan (default bf16)")
    parser.add_argument("--backend", default="inductor", help="what compiles the layers (default inductor)")
    parser.add_argument("--repeats", type=count(least=1), default=5, help="timed calls of each form (default 5)")
    parser.add_argument("--device", type=device_name, default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="a tiny network, to check this script")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    if arguments.scale and (arguments.model != "dreamzero" or arguments.tiny):
        parser.error("argument --scale: expected --model dreamzero without --tiny")
    device = torch.device(arguments.device)
    meter = Meter(device, arguments.repeats)
    facts = (measure_lingbot if arguments.model == "lingbot" else measure_dreamzero)(arguments, meter)
    report = {
        **provenance(device),
        "model": arguments.model,
        "precision": arguments.precision,
        **facts,
        "forms": [asdict(row) for row in meter.rows],
        "failures": meter.failures,
    }
    print({key: value for key, value in report.items() if key != "forms"})
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
