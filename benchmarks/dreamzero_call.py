"""Time calls of DreamZero at its published sizes with random weights, in one process, through the real runtime.

    python benchmarks/dreamzero_call.py --scale 14b --rounds 3 --json dreamzero_call.json

No checkpoint and no network are needed: the weights are made on the device. Their values decide nothing about speed.
A round is four calls: a new run at start frame 1, then start frames 3, 5 and 7; the headline is the mean over the last
three. `wall` is from the tick to the actions in host memory, without a server. Prompts are cached from the first call
on, as in service, so the text encoder is no part of it. `--scale tiny --device cpu` checks the script itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.arguments import device_name, new_file
from benchmarks.provenance import provenance
from kvcache.cache import KVCache
from server.config import DEFAULT_CPU_THREADS
from training.demo_world.options import count
from worldmodel.checkpoint.inspection import num_parameters
from worldmodel.checkpoint.random_weights import RandomWeights, fill_random
from worldmodel.dreamzero.adapter import DreamZeroAdapter
from worldmodel.dreamzero.config import DreamZeroOptions, parse_options
from worldmodel.dreamzero.embodiments import embodiment
from worldmodel.dreamzero.normalize import NormalizationMode
from worldmodel.dreamzero.published import DIMS, TAG, Published, Scale, metadata_file, published
from worldmodel.dreamzero.robot import Robot, read_robot
from worldmodel.dreamzero.sizes import Sizes, read_sizes
from worldmodel.dreamzero.training_config import TrainingConfig
from worldmodel.dreamzero.weights import LoadedModel, empty_modules
from worldmodel.messages import MediaFormat, OpenSession, RequestId, SessionId, StartWorker, Tick
from worldmodel.observations import describe_array
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Runtime
from worldmodel.wan.precision import precision_plan

PROMPT_TOKENS = 100
CALLS_PER_ROUND = 4
FACTS = ("commit", "device", "torch", "scale", "precision")
STAGES = (
    "observations.read",
    "vae.encode_clip",
    "image_encoder.encode",
    "transformer.publish_text",
    "transformer.publish_image",
    "forward.commit",
    "forward.velocity",
)


class RandomText:
    """Rows of a prompt without an encoder."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._width = width
        self._device = device

    def token_ids(self, prompt: str) -> list[int]:
        return [len(prompt), *range(PROMPT_TOKENS - 1)]

    def encode(self, prompt: str) -> Tensor:
        generator = torch.Generator().manual_seed(len(prompt))
        return torch.randn(PROMPT_TOKENS, self._width, generator=generator).to(self._device)


@dataclass
class Stopwatch:
    """Device time of methods, by name, of the call under way."""

    device: torch.device
    spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)

    def watch(self, owner: object, method: str, name: str) -> None:
        """Time every call of a method of one object from now on."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = self._mark()
            result = inner(*arguments, **keywords)
            self.spans.setdefault(name, []).append((start, self._mark()))
            return result

        # A module's own `__setattr__` takes functions as they are; the class stays untouched.
        object.__setattr__(owner, method, timed)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """Return milliseconds and numbers of calls by name, and begin anew."""
        _synchronize(self.device)
        totals: dict[str, float] = {}
        for name, spans in self.spans.items():
            totals[f"{name}_ms"] = sum(_span_ms(start, end) for start, end in spans)
            totals[f"{name}_calls"] = len(spans)
        self.spans.clear()
        return totals


def _span_ms(start: Any, end: Any) -> float:
    return 1000.0 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------- the model


def build_model(model: Published, precision: str, device: torch.device) -> LoadedModel:
    """Make a model of these sizes with random weights on the device."""
    problems: list[str] = []
    sizes = read_sizes(model.head, problems)
    if sizes is None:
        raise SystemExit("; ".join(problems))
    plan = precision_plan(precision, device=device)
    modules = empty_modules(sizes)
    weights = RandomWeights(seed=0, device=device)
    fill_random(modules.transformer, weights, dtype=plan.linear, device=device)
    fill_random(modules.vae, weights, dtype=plan.vae, device=device)
    fill_random(modules.image_encoder, weights, dtype=plan.linear, device=device)
    modules.transformer.apply_precision(plan)
    modules.vae.fold_weights()
    return LoadedModel(
        sizes=sizes,
        robot=_robot(sizes),
        view_size=None,
        transformer=modules.transformer.eval(),
        vae=modules.vae.eval(),
        image_encoder=modules.image_encoder.requires_grad_(False).eval(),
        text_encoder=RandomText(sizes.transformer.text_dim, device),
        digest="random weights",
        num_parameters=sum(map(num_parameters, (modules.transformer, modules.vae, modules.image_encoder))),
    )


def _robot(sizes: Sizes) -> Robot:
    problems: list[str] = []
    robot = read_robot(
        metadata_file(),
        TrainingConfig(
            modes={f"{kind}.{key}": NormalizationMode.Q99 for kind in ("state", "action") for key in DIMS},
            relative_action=True,
            relative_action_keys=("joint_position",),
        ),
        embodiment(TAG),
        state_width=sizes.transformer.state_dim,
        action_width=sizes.transformer.action_dim,
        action_rows=sizes.transformer.actions_per_chunk,
        problems=problems,
    )
    if robot is None:
        raise SystemExit("; ".join(problems))
    return robot


# ---------------------------------------------------------------- the calls


def observe(robot: Robot, call: int) -> dict[str, np.ndarray]:
    """Draw a request: one frame in the first call of a session, four in each later one."""
    rng = np.random.default_rng(call)
    shape = (1 if call == 0 else 4, robot.camera_height, robot.camera_width, 3)
    arrays: dict[str, np.ndarray] = {key: rng.integers(0, 256, shape, np.uint8) for key in robot.cameras}
    return arrays | {f"observation/{state.name}": rng.uniform(-0.5, 0.5, state.num_dims) for state in robot.states}


def run_call(runtime: Runtime, robot: Robot, session: str, index: int) -> dict[str, Any]:
    """Run one call and return its times in milliseconds."""
    arrays = observe(robot, index)
    tick = Tick(
        request_id=RequestId(f"{session}-{index}"),
        session_id=SessionId(session),
        chunk_index=index,
        prompt="pick up the cup",
        arrays=tuple(describe_array(name, array) for name, array in arrays.items()),
    )
    started_s = time.perf_counter()
    chunk = runtime.tick(tick, arrays)
    _, (actions,) = chunk.to_host()
    wall_ms = 1000.0 * (time.perf_counter() - started_s)
    values = np.frombuffer(actions, np.float32)
    timings = chunk.committed.timings
    return {
        "session": session,
        "start_frame": 1 + 2 * (index % CALLS_PER_ROUND),
        "wall_ms": wall_ms,
        "observe_and_commit_ms": timings.commit_ms,
        "denoise_ms": timings.denoise_ms,
        "finite": bool(np.isfinite(values).all()),
    }


def open_session(runtime: Runtime, session: str) -> None:
    runtime.open(
        OpenSession(
            request_id=RequestId(session),
            session_id=SessionId(session),
            prompt="",
            seed=0,
            outputs=(MediaFormat.ACTIONS,),
        ),
        None,
    )


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean of every time: of calls that begin a run, and over start frames 3, 5 and 7 together."""
    groups = {
        "restart": [row for row in rows if row["start_frame"] == 1],
        "start_3_5_7": [row for row in rows if row["start_frame"] > 1],
    }
    names = sorted({name for row in rows for name in row if name.endswith(("_ms", "_calls"))})
    return {
        group: {name: statistics.fmean(row.get(name, 0.0) for row in members) for name in names}
        for group, members in groups.items()
        if members
    }


@contextmanager
def _profiled(enabled: bool, num_rows: int = 30) -> Any:
    if not enabled:
        yield
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=num_rows, max_name_column_width=90))


def build_runtime(
    model: LoadedModel, config: Published, *, precision: str, num_sessions: int, options: dict[str, object]
) -> tuple[DreamZeroAdapter, KVCache, Runtime]:
    """Give a model the adapter, the storage and the runtime that serve it."""
    start = StartWorker(
        model="dreamzero",
        checkpoint="random",
        width=config.width,
        height=config.height,
        fps=5,
        device=str(model.transformer.device),
        precision=precision,
        requested_sessions=num_sessions,
        model_options=parse_options(options),
    )
    adapter = DreamZeroAdapter(model, DreamZeroOptions.from_json(start.model_options), start)
    cache = allocate_cache(adapter.kv_spec(), start, adapter.attention())
    return adapter, cache, Runtime(adapter, cache, device=start.device)


def measure(
    model: LoadedModel, config: Published, arguments: argparse.Namespace, options: dict[str, object]
) -> dict[str, Any]:
    """Run rounds of calls under some options and return rows and means."""
    device = model.transformer.device
    adapter, cache, runtime = build_runtime(
        model, config, precision=arguments.precision, num_sessions=arguments.sessions, options=options
    )
    spec = adapter.kv_spec()
    watch = Stopwatch(device)
    owners = {
        "observations": adapter._observations,
        "vae": model.vae,
        "image_encoder": model.image_encoder,
        "transformer": model.transformer,
        "forward": adapter._sampler._forward,
    }
    for stage in STAGES:
        owner, method = stage.split(".")
        watch.watch(owners[owner], method, stage)
    open_session(runtime, "warm-up")
    for index in range(CALLS_PER_ROUND):
        run_call(runtime, model.robot, "warm-up", index)
    watch.take()
    rows = []
    sessions = [f"robot-{number}" for number in range(max(1, arguments.sessions - 1))]
    for session in sessions:
        open_session(runtime, session)
    for index in range(arguments.rounds * CALLS_PER_ROUND):
        for session in sessions:
            rows.append(run_call(runtime, model.robot, session, index) | watch.take())
    with _profiled(arguments.profile):
        for index in range(1, 3):
            run_call(runtime, model.robot, "warm-up", CALLS_PER_ROUND + index - 1)
    watch.take()
    for stage in STAGES:
        owner, method = stage.split(".")
        delattr(owners[owner], method)
    return {
        "options": options,
        "means": summarize(rows),
        "rows": rows,
        "sessions": len(sessions),
        "session_bytes": spec.required_bytes(2) - spec.required_bytes(1),
        "first_session_bytes": spec.required_bytes(1),
        "cache_bytes": cache.storage_bytes,
        "info": asdict(runtime.info("dreamzero")),
    }


def show(name: str, result: dict[str, Any]) -> None:
    """Print the means as a table."""
    print(f"\n{name}: {result['sessions']} sessions, {result['session_bytes'] / 2**30:.2f} GiB each more")
    for group, means in result["means"].items():
        print(f"  {group}")
        for stage, value in means.items():
            print(f"    {stage:38s} {value:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=[str(scale) for scale in Scale], default="14b", help="default 14b")
    parser.add_argument("--device", type=device_name, default="cuda", help="cuda or cpu (default cuda)")
    parser.add_argument("--precision", default="bf16", help="precision plan (default bf16)")
    parser.add_argument(
        "--rounds", type=count(least=1), default=3, help="rounds of four calls of each session (default 3)"
    )
    parser.add_argument(
        "--sessions", type=count(least=1), default=2, help="session places; one of them warms up (default 2)"
    )
    parser.add_argument("--modes", default="8,16,dynamic", help="computed steps or `dynamic`, comma-separated")
    parser.add_argument("--options", default="{}", help="more model options as JSON")
    parser.add_argument("--profile", action="store_true", help="profile two calls of each mode")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    torch.set_num_threads(min(torch.get_num_threads(), DEFAULT_CPU_THREADS))
    device, config = torch.device(arguments.device), published(Scale(arguments.scale))
    started_s = time.perf_counter()
    model = build_model(config, arguments.precision, device)
    _synchronize(device)
    print(f"built {model.num_parameters / 1e9:.3f} B parameters in {time.perf_counter() - started_s:.1f} s", flush=True)
    report: dict[str, Any] = {**provenance(device), "scale": arguments.scale, "precision": arguments.precision}
    for mode in arguments.modes.split(","):
        options: dict[str, object] = json.loads(arguments.options)
        options |= {"step_skipping": "dynamic"} if mode == "dynamic" else {"computed_steps": int(mode)}
        if arguments.precision.startswith("fp8") and len(report) > len(FACTS):
            # Float8 layers give the weights they were made from up.
            model = build_model(config, arguments.precision, device)
        report[mode] = measure(model, config, arguments, options)
        show(mode, report[mode])
        if device.type == "cuda":
            report[mode]["max_allocated_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, default=str))
    print({key: report[key] for key in FACTS})


if __name__ == "__main__":
    main()
