"""What float8 does to a world: error by layer, latents over a long closed loop, pictures against the truth.

    python benchmarks/fp8_fidelity.py --only-walks walks.npz
    python benchmarks/fp8_fidelity.py --walks walks.npz --json fidelity.json
    python benchmarks/fp8_fidelity.py --random-layers --json layers.json

The demo world has trained weights and a renderer that knows what each picture should have been, so that it is what is
measured: the same noise and the same keys in every precision. The first line renders the walks (a C++ compiler is
needed), where another machine measures; without `--walks` they are rendered first. `--random-layers` takes the layers
of the full-size network with random weights instead of the demo world's, and nothing else.

On a CPU float8 products are computed on dequantised numbers, which is what the device's kernels are tested against.
The demo world's heads have 64 numbers: FlashAttention-3, which has float8 for 128, gets them padded with zeros.

Shapes: T tokens, D model width, N query tokens, S key tokens, H heads, M media frames, C latent channels, F latent
frames, Y and X latent rows and columns.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.arguments import device_name, new_file, old_file, require_cuda
from benchmarks.demo_walks import LOOKED_AT, Frames, Walk, load_walks, render_walks, save_walks
from benchmarks.full_size import MODEL, PROMPT, build_adapter, start_worker
from benchmarks.provenance import provenance
from kvcache.attention import Attention
from kvcache.attention_backends import FLASH3_MODULE
from server.config_reading import load_config
from server.package_files import bundled_config
from training.demo_world.options import count
from worldmodel.catalog import options_parser
from worldmodel.lingbot.controls import parse_control
from worldmodel.lingbot.fused_forward import FusedForward
from worldmodel.messages import (
    CloseSession,
    Control,
    ControlEvent,
    ImageSize,
    MediaFormat,
    OpenSession,
    RequestId,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime
from worldmodel.wan.precision import precision_plan
from worldmodel.wan.transformer import TimeConstants

PLANS = ("fp32", "bf16", "fp8", "fp8_kv")
REFERENCE = "bf16"
FLASH3_HEAD_DIM = 128
SESSION = SessionId("fidelity")


@dataclass(slots=True, kw_only=True)
class Played:
    """What a precision made of a walk: latents [C, F, Y, X] of every chunk, pictures [M, H, W, 3] of some."""

    latents: list[Tensor] = field(default_factory=list)
    frames: dict[int, Frames] = field(default_factory=dict)


# ------------------------------------------------------------ one precision


class PaddedFlash3:
    """FlashAttention-3 for smaller heads: zeros beside them change no product, and the scale stays theirs."""

    name = "flash3, padded heads"

    def __init__(self) -> None:
        self._forward = importlib.import_module(FLASH3_MODULE).flash_attn_func

    def __call__(self, q_NHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, logit_bias_S: Tensor | None = None) -> Tensor:
        if logit_bias_S is not None:
            raise ValueError("logit_bias_S: FlashAttention-3 takes none")
        head_dim = q_NHD.shape[-1]
        padding = (0, FLASH3_HEAD_DIM - head_dim)
        # As bytes: torch has few operations on float8, and a byte of zeros is 0.0.
        q, k, v = (functional.pad(x.view(torch.uint8), padding).view(x.dtype)[None] for x in (q_NHD, k_SHD, v_SHD))
        out = self._forward(q, k, v, softmax_scale=head_dim**-0.5)
        out_1NHD: Tensor = out[0] if isinstance(out, tuple) else out
        return out_1NHD[0, ..., :head_dim]


def demo_start(precision: str, device: str) -> StartWorker:
    """Return the start message of the demo world as it is served, in another precision."""
    demo = load_config(bundled_config("demo"), environment={})
    options = {
        **demo.model.options,
        # `PaddedFlash3` may take the place of an attention that merges padding rows, which it can't.
        "pad_text_exact": device != "cpu",
        **fused_options(device),
    }
    return StartWorker(
        model=MODEL,
        checkpoint=str(demo.checkpoint_path),
        width=demo.model.width,
        height=demo.model.height,
        fps=demo.model.fps,
        device=device,
        precision=precision,
        requested_sessions=1,
        model_options=options_parser(MODEL)(options),
    )


def chosen_start(arguments: argparse.Namespace, precision: str) -> StartWorker:
    """Return the start message of the network that the arguments name."""
    if not arguments.random_layers:
        return demo_start(precision, arguments.device)
    options = {"text_encoder": "resident", **fused_options(arguments.device)}
    return start_worker(device=arguments.device, precision=precision, is_tiny=arguments.tiny, options=options)


def fused_options(device: str) -> dict[str, str]:
    """Let a CPU compute in the order of the fused layers too, whose streams are compared."""
    return {"layer_operations": "plain"} if device == "cpu" else {}


def build(start: StartWorker) -> tuple[Runtime, FusedForward, str]:
    """Return a runtime, its forward, and what computes its attention."""
    adapter = build_adapter(start)
    attention: Attention = adapter.attention()
    spec = adapter.kv_spec()
    if start.device != "cpu" and precision_plan(start.precision).quantizes_kv and spec.head_dim < FLASH3_HEAD_DIM:
        attention = PaddedFlash3()
    cache = allocate_cache(spec, start, attention)
    return Runtime(adapter, cache, device=start.device), adapter._acceleration.forward, attention.name


def play(runtime: Runtime, walk: Walk, num_chunks: int) -> Played:
    """Play a walk from its first chunk on, closed loop."""
    image = ImageSize(width=walk.image.shape[1], height=walk.image.shape[0])
    opening = OpenSession(
        request_id=RequestId("open"),
        session_id=SESSION,
        prompt=walk.prompt,
        seed=7,
        image=image,
        outputs=(MediaFormat.LATENT, MediaFormat.RGB24),
    )
    runtime.open(opening, walk.image)
    played = Played()
    script = {"mode": "script", "frames": [list(keys) for keys in walk.held]}
    schema = "lingbot.camera_actions.v1"
    control = Control(track="camera", schema=schema, data=parse_control("camera", schema, script))
    for index in range(num_chunks):
        events = (ControlEvent(event_id=0, controls=(control,)),) if index == 0 else ()
        tick = Tick(request_id=RequestId(f"tick-{index}"), session_id=SESSION, chunk_index=index, events=events)
        message, (latents, pixels) = runtime.tick(tick).to_host()
        shapes = [part.shape for part in message.parts]
        played.latents.append(torch.frombuffer(bytearray(latents), dtype=torch.float32).view(shapes[0]))
        if index + 1 in LOOKED_AT:
            played.frames[index + 1] = np.frombuffer(bytes(pixels), np.uint8).reshape(shapes[1])
    runtime.close(CloseSession(request_id=RequestId("close"), session_id=SESSION))
    return played


# ------------------------------------------------------------ layers


class StreamWatch:
    """Sees the residual stream in front of every layer of the next flow, and the flow.

    With `taught`, every layer gets those streams instead of what came before it, so that its own error is seen.
    """

    def __init__(self, forward: FusedForward, num_layers: int, taught: Sequence[Tensor] | None = None) -> None:
        self.streams: list[Tensor] = []
        self.flow: Tensor | None = None
        self._num_layers, self._taught = num_layers, taught
        self._enter, self._run = FusedForward._attention_input.__get__(forward), FusedForward.flow.__get__(forward)
        watched = cast("Any", forward)
        watched._attention_input, watched.flow = self._see_stream, self._see_flow

    def _see_stream(self, index: int, h_TD: Tensor, update: Any, time: TimeConstants) -> Any:
        h_TD, a_TD = self._enter(index, h_TD, update, time)
        if len(self.streams) == self._num_layers:
            return h_TD, a_TD
        self.streams.append(h_TD.clone())
        return (h_TD, a_TD) if self._taught is None else self._enter(index, self._taught[index].clone(), None, time)

    def _see_flow(self, *arguments: Any) -> Tensor:
        flow_CFYX: Tensor = self._run(*arguments)
        if self.flow is None:
            self.flow = flow_CFYX.clone()
        return flow_CFYX


def watch_layers(
    runtime: Runtime, walk: Walk, forward: FusedForward, taught: Sequence[Tensor] | None = None
) -> StreamWatch:
    """Run the first chunk of a walk, whose first forward is watched."""
    watch = StreamWatch(forward, len(forward._layers), taught)
    play(runtime, walk, 1)
    return watch


def random_walk(start: StartWorker) -> Walk:
    """Return a walk for weights that mean nothing."""
    image = np.random.default_rng(0).integers(0, 256, (start.height, start.width, 3), dtype=np.uint8)
    return Walk(image=image, prompt=PROMPT, held=("w",), truth={})


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference over that of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def layer_rows(found: StreamWatch, alone: StreamWatch, expected: StreamWatch) -> list[dict[str, float]]:
    """Return for every layer but the last the error of what it adds by itself, and of the stream behind it."""
    rows = []
    for index in range(len(expected.streams) - 1):
        before, after = expected.streams[index].float(), expected.streams[index + 1].float()
        rows.append(
            {
                "layer": index,
                "alone": relative_error(alone.streams[index + 1].float() - before, after - before),
                "stream": relative_error(found.streams[index + 1], after),
            }
        )
    return rows


# ------------------------------------------------------------ comparing


def psnr_db(shown: Frames, true: Frames) -> float:
    squared = np.square(shown.astype(np.float64) - true.astype(np.float64)).mean()
    return float(10 * np.log10(255**2 / max(squared, 1e-3)))


def edges(frames: Frames) -> float:
    """Return the mean absolute difference of neighbouring pixels: what blur takes away."""
    values = frames.astype(np.float64)
    return float(np.abs(np.diff(values, axis=2)).mean() + np.abs(np.diff(values, axis=1)).mean())


def chunk_rows(walks: Sequence[Walk], found: Sequence[Played], expected: Sequence[Played]) -> list[dict[str, float]]:
    """Return means over the walks by chunk: latents against the reference, pictures against it and the truth."""
    rows = []
    for chunk in sorted(walks[0].truth):
        triples = list(zip(walks, found, expected, strict=True))
        rows.append(
            {
                "chunk": chunk,
                "latents": _mean(relative_error(a.latents[chunk - 1], b.latents[chunk - 1]) for _, a, b in triples),
                "psnr_to_reference_db": _mean(psnr_db(a.frames[chunk], b.frames[chunk]) for _, a, b in triples),
                "psnr_to_truth_db": _mean(psnr_db(a.frames[chunk], walk.truth[chunk]) for walk, a, _ in triples),
                "edges_over_truth": _mean(edges(a.frames[chunk]) / edges(walk.truth[chunk]) for walk, a, _ in triples),
            }
        )
    return rows


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


# ------------------------------------------------------------ the command


def measure(arguments: argparse.Namespace, walks: Sequence[Walk]) -> dict[str, Any]:
    """Run every plan, the reference first, and compare."""
    others = [plan for plan in arguments.plans if plan != REFERENCE]
    report: dict[str, Any] = {"attention": {}, "layers": {}, "flow": {}, "chunks": {}}
    expected: list[Played] = []
    seen: StreamWatch | None = None
    for plan in (REFERENCE, *others):
        start = chosen_start(arguments, plan)
        runtime, forward, report["attention"][plan] = build(start)
        print(f"{plan}: attention {report['attention'][plan]}", flush=True)
        found = [play(runtime, walk, arguments.chunks) for walk in walks]
        if plan == REFERENCE:
            first = walks[0] if walks else random_walk(start)
            expected, seen = found, watch_layers(runtime, first, forward)
        elif precision_plan(plan).quantizes_linears and seen is not None and seen.flow is not None:
            free, alone = (watch_layers(runtime, first, forward, taught) for taught in (None, seen.streams))
            report["layers"][plan] = layer_rows(free, alone, seen)
            report["flow"][plan] = relative_error(cast("Tensor", free.flow), seen.flow)
        if walks:
            report["chunks"][plan] = chunk_rows(walks, found, expected)
        show(report, plan)
        del runtime, forward
        gc.collect()
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
    return report


def show(report: Mapping[str, Any], plan: str) -> None:
    for row in report["layers"].get(plan, []):
        print(f"{plan}: layer {row['layer']:2d}: what it adds {row['alone']:.4f}, stream {row['stream']:.4f}")
    if plan in report["flow"]:
        print(f"{plan}: flow of one forward {report['flow'][plan]:.4f}")
    for row in report["chunks"].get(plan, []):
        print(
            f"{plan}: chunk {row['chunk']:2d}: latents {row['latents']:.4f}, to {REFERENCE} "
            f"{row['psnr_to_reference_db']:.1f} dB, to the truth {row['psnr_to_truth_db']:.2f} dB, edges "
            f"{row['edges_over_truth']:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=PLANS, help=f"compared with {REFERENCE}")
    parser.add_argument("--chunks", type=count(least=1), default=LOOKED_AT[-1], help="chunks of each walk (default 40)")
    parser.add_argument("--num-walks", type=count(least=1), default=3, help="walks to render (default 3)")
    parser.add_argument("--walks", type=old_file, help="walks that were rendered before, of as many chunks")
    parser.add_argument("--only-walks", type=new_file, metavar="FILE.npz", help="render the walks into a file and end")
    parser.add_argument("--random-layers", action="store_true", help="only layers, of the full-size random network")
    parser.add_argument("--tiny", action="store_true", help="a tiny random network, to check --random-layers")
    parser.add_argument("--device", type=device_name, help="cuda:0 (default) or cpu")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    if arguments.tiny and not arguments.random_layers:
        parser.error("argument --tiny: expected --random-layers, since the demo world has one size")
    if arguments.only_walks is not None:
        save_walks(render_walks(arguments.num_walks, arguments.chunks), arguments.only_walks)
        return
    if arguments.device is None:
        require_cuda(parser)
        arguments.device = "cuda:0"
    if arguments.random_layers:
        walks: list[Walk] = []
    else:
        walks = load_walks(arguments.walks) if arguments.walks else render_walks(arguments.num_walks, arguments.chunks)
    if walks and max(walks[0].truth) > arguments.chunks:
        parser.error(f"argument --chunks: the walks go on to chunk {max(walks[0].truth)}; got {arguments.chunks}")
    report = {**provenance(torch.device(arguments.device)), "walks": len(walks), **measure(arguments, walks)}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
