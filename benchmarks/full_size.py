"""Time chunks of the published LingBot-World v2 size with random weights, in one process, through the real runtime.

    python benchmarks/full_size.py --precision bf16 --chunks 18 --profile --json full_size.json

No checkpoint and no network are needed: the weights are made on the device. Their values keep activations finite and
decide nothing about speed. `--tiny` runs the same code at a size that a CPU does in seconds, to check the script itself.

Steady chunks are those after the twelfth: the window is full and the condition is no longer encoded. `wall` is from the
tick to the pixels in host memory, without H.264 and without a server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from worldmodel.lingbot.adapter import LingBotAdapter
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.controls import parse_control
from worldmodel.lingbot.noise import PerChunkNoise
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig
from worldmodel.lingbot.weights import LoadedModel
from worldmodel.messages import (
    Control,
    ControlEvent,
    ImageSize,
    LoadStage,
    MediaFormat,
    OpenSession,
    RequestId,
    SessionId,
    StartWorker,
    Tick,
)
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime
from worldmodel.wan.flow_scheduler import nominal_table
from worldmodel.wan.precision import PrecisionPlan, precision_plan
from worldmodel.wan.text_encoder import TextEncoder
from worldmodel.wan.vae import WanVAE

FIRST_STEADY_CHUNK = 12
KEYS = ("w", "wl", "", "d", "j", "w", "i", "s")
PROMPT_TOKENS = 120
LATENT_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
LATENT_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
LATENT_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
LATENT_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of a run: those of the network, and the picture."""

    transformer: TransformerConfig
    vae_base_dim: int
    width: int
    height: int


def published_size(num_layers: int) -> Size:
    """Return the published network at 832x480, maybe with fewer layers."""
    return Size(transformer=_transformer_config(num_layers, 40, 128, 13824), vae_base_dim=96, width=832, height=480)


def tiny_size() -> Size:
    """Return a network of the same structure that a CPU runs in seconds."""
    return Size(transformer=_transformer_config(2, 2, 12, 48), vae_base_dim=4, width=64, height=32)


def _transformer_config(num_layers: int, num_heads: int, head_dim: int, ffn_dim: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        ffn_dim=ffn_dim,
        in_channels=36,
        out_channels=16,
        text_dim=4096 if num_heads > 2 else 16,
        freq_dim=256,
        eps=1e-6,
        latent_frames_per_chunk=3,
        sink_latent_frames=9,
        window_latent_frames=9,
    )


class RandomText:
    """Stands in for the text encoder, which the bench leaves out: rows of the right shape from the prompt's length."""

    num_parameters = 0

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self._device = device

    def encode(self, prompt: str) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(len(prompt))
        return 0.1 * torch.randn(PROMPT_TOKENS, self.width, device=self._device, generator=generator)


def random_transformer(config: TransformerConfig, plan: PrecisionPlan, device: torch.device) -> LingBotTransformer:
    """Make a transformer whose activations stay near 1."""
    with torch.device("meta"):
        transformer = LingBotTransformer(config)
    transformer.apply_precision(plan)
    transformer.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in transformer.named_parameters():
        with torch.no_grad():
            _fill(name, parameter, generator)
    return transformer.eval()


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if "norm" in name and name.endswith("weight"):
        parameter.fill_(1.0)
    elif parameter.dim() < 2 or name.endswith("bias"):
        parameter.normal_(0.0, 0.02, generator=generator)
    elif name.endswith("modulation"):
        parameter.normal_(0.0, 0.1, generator=generator)
    else:
        parameter.normal_(0.0, 0.7 * parameter[0].numel() ** -0.5, generator=generator)


def random_vae(base_dim: int, plan: PrecisionPlan, device: torch.device) -> WanVAE:
    """Make a VAE of the published structure."""
    vae = WanVAE.from_config(
        {
            "base_dim": base_dim,
            "z_dim": 16,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 2,
            "temperal_downsample": [False, True, True],
            "latents_mean": list(LATENT_MEAN),
            "latents_std": list(LATENT_STD),
        }
    )
    vae = vae.to(device)
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in vae.named_parameters():
        with torch.no_grad():
            if name.endswith("gamma"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
    vae = vae.to(plan.vae)
    vae.fold_weights()
    return vae.eval()


def build_runtime(size: Size, start: StartWorker, text_device: torch.device) -> tuple[Runtime, dict[str, float]]:
    """Return a runtime with random weights, not warmed up, and what building took in seconds."""
    device, plan = torch.device(start.device), precision_plan(start.precision)
    started_s = time.perf_counter()
    transformer = random_transformer(size.transformer, plan, device)
    vae = random_vae(size.vae_base_dim, plan, device)
    num_parameters = sum(parameter.numel() for parameter in transformer.parameters())
    model = LoadedModel(
        transformer=transformer,
        vae=vae,
        text_encoder=cast("TextEncoder", RandomText(size.transformer.text_dim, text_device)),
        flow_shift=5.0,
        digest="random",
        num_parameters=num_parameters,
    )
    table = nominal_table(5.0)
    options = LingBotOptions.from_json(start.model_options)
    adapter = LingBotAdapter(model, table, PerChunkNoise(device=device, num_draws=len(table)), options, start)
    cache = allocate_cache(adapter.kv_spec(), start, adapter.attention())
    _synchronize(device)
    built_s = time.perf_counter() - started_s
    return Runtime(cast("Any", adapter), cache, device=start.device), {"build_s": built_s}


def run_chunks(runtime: Runtime, size: Size, session_ids: list[str], first: int, last: int) -> list[dict[str, float]]:
    """Run chunks `first` .. `last` - 1 of every session in turn and return one row of times a tick."""
    rows = []
    for index in range(first, last):
        for session_id in session_ids:
            if index == 0:
                _open(runtime, size, session_id)
            rows.append({"chunk": float(index), **_tick(runtime, session_id, index)})
            print("  ".join(f"{name} {value:9.1f}" for name, value in rows[-1].items()), flush=True)
    return rows


def _open(runtime: Runtime, size: Size, session_id: str) -> None:
    image = np.random.default_rng(0).integers(0, 256, (size.height, size.width, 3), dtype=np.uint8)
    message = OpenSession(
        request_id=RequestId("open"),
        session_id=SessionId(session_id),
        prompt="a small town, day",
        seed=7,
        image=ImageSize(width=size.width, height=size.height),
        outputs=(MediaFormat.YUV420,),
    )
    runtime.open(message, image)


def _tick(runtime: Runtime, session_id: str, index: int) -> dict[str, float]:
    held = list(KEYS[index % len(KEYS)])
    data = parse_control("camera", "lingbot.camera_actions.v1", {"mode": "state", "held": held})
    control = Control(track="camera", schema="lingbot.camera_actions.v1", data=data)
    tick = Tick(
        request_id=RequestId(f"{session_id}-{index}"),
        session_id=SessionId(session_id),
        chunk_index=index,
        events=(ControlEvent(event_id=index, controls=(control,)),),
    )
    started_s = time.perf_counter()
    chunk = runtime.tick(tick)
    chunk.to_host()
    timings = chunk.committed.timings
    return {
        "denoise_ms": timings.denoise_ms,
        "commit_ms": timings.commit_ms,
        "decode_ms": timings.decode_ms,
        "wall_ms": 1000 * (time.perf_counter() - started_s),
    }


def profile_chunk(runtime: Runtime, size: Size, session_id: str, index: int, num_rows: int = 30) -> dict[str, Any]:
    """Run one chunk under the profiler: time by kernel, and how long the device had nothing to do."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run_chunks(runtime, size, [session_id], index, index + 1)
    spans: list[tuple[float, float]] = []
    totals: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        spans.append((event.time_range.start, event.time_range.end))
        totals.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))[:num_rows]
    kernels = [{"ms": sum(us) / 1000, "calls": len(us), "kernel": name[:110]} for name, us in ranked]
    return {"device_idle_ms": _idle_ms(spans), "num_kernels": len(spans), "kernels": kernels}


def _idle_ms(spans: list[tuple[float, float]]) -> float:
    """Return the time between the first and the last of these intervals (in microseconds) that none covers."""
    idle_us, end = 0.0, None
    for start, stop in sorted(spans):
        if end is not None and start > end:
            idle_us += start - end
        end = stop if end is None else max(end, stop)
    return idle_us / 1000


def summarize(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return median and 95th percentile of every time over the steady chunks (the last chunks of a short run)."""
    steady = [row for row in rows if row["chunk"] >= FIRST_STEADY_CHUNK] or rows[-3:]
    names = [name for name in steady[0] if name.endswith("_ms")]
    return {
        name: {
            "median": statistics.median(row[name] for row in steady),
            "p95": float(np.percentile([row[name] for row in steady], 95)),
        }
        for name in names
    }


def provenance(device: torch.device) -> dict[str, str]:
    """Say what was measured where."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"commit": head.stdout.strip() or "unknown", "device": name, "torch": torch.__version__}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16", help="precision plan (default bf16)")
    parser.add_argument("--options", default="{}", help="model options as JSON, as in [model.options]")
    parser.add_argument("--chunks", type=int, default=18, help="chunks of each session (default 18)")
    parser.add_argument("--sessions", type=int, default=1, help="sessions that take turns (default 1)")
    parser.add_argument("--layers", type=int, default=40, help="layers of the transformer (default 40)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="a tiny network, to check this script")
    parser.add_argument("--no-warm-up", action="store_true", help="start with the first chunk")
    parser.add_argument("--profile", action="store_true", help="profile one chunk more")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    size = tiny_size() if arguments.tiny else published_size(arguments.layers)
    device = torch.device(arguments.device)
    start = StartWorker(
        model="lingbot-world-v2",
        checkpoint="random",
        width=size.width,
        height=size.height,
        fps=16,
        device=arguments.device,
        precision=arguments.precision,
        requested_sessions=max(arguments.sessions, 1),
        model_options=arguments.options.encode(),
    )
    runtime, built = build_runtime(size, start, device)
    print(f"built in {built['build_s']:.1f} s", flush=True)
    print(runtime.info("lingbot-world-v2").attention_backend, flush=True)
    if not arguments.no_warm_up:
        warm_up_started_s = time.perf_counter()
        runtime.warm_up(_print_stage)
        built["warm_up_s"] = time.perf_counter() - warm_up_started_s
    session_ids = [f"session-{number}" for number in range(arguments.sessions)]
    rows = run_chunks(runtime, size, session_ids, 0, arguments.chunks)
    report: dict[str, Any] = {
        **provenance(device),
        **built,
        "precision": arguments.precision,
        "options": json.loads(arguments.options),
        "info": asdict(runtime.info("lingbot-world-v2")),
        "steady": summarize(rows),
        "rows": rows,
    }
    if device.type == "cuda":
        report["max_allocated_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    if arguments.profile:
        report["profile"] = profile_chunk(runtime, size, session_ids[0], arguments.chunks)
    _show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, default=str))


def _print_stage(stage: LoadStage, fraction: float, detail: str) -> None:
    if fraction == 1.0:
        print(f"{stage} {detail}", flush=True)


def _show(report: dict[str, Any]) -> None:
    for kernel in report.get("profile", {}).get("kernels", []):
        print(f"{kernel['ms']:9.2f} ms {kernel['calls']:6d} x {kernel['kernel']}")
    if "profile" in report:
        print(f"device idle in the profiled chunk: {report['profile']['device_idle_ms']:.1f} ms")
    for name, value in report["steady"].items():
        print(f"steady {name}: median {value['median']:.1f}, p95 {value['p95']:.1f}")
    facts = ("commit", "device", "torch", "precision", "build_s", "warm_up_s", "max_allocated_gib")
    print({key: report[key] for key in facts if key in report})


if __name__ == "__main__":
    main()
