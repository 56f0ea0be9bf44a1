"""Ranks that share the weights of a LingBot transformer out: `python -m` this module FOLDER NUM_RANKS, see `main`.

The layers are those of a published model with random weights, a few of them. A rank writes what it found into
FOLDER/RANK.json; then the last one hangs, and each of the others writes into FOLDER/RANK.hang.json how it noticed.
Exit codes are in FOLDER/codes.json, in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from offload.cuda_runtime import LoadedCudaRuntime
from offload.errors import OffloadError, RanksDisagree
from offload.residency import LayerPart, ResidencyPlan, plan_residency
from offload.sharded import RankGroups, Sharing
from offload.streamed_model import StreamedModel, Transfer, TransferWish, make_ordinary, stream_model
from offload.streamer import LayerStreamer
from tests.support.lingbot_streaming import rollout
from worldmodel.checkpoint.component import Component
from worldmodel.checkpoint.loading import NameChoice
from worldmodel.checkpoint.random_checkpoint import RandomComponent
from worldmodel.checkpoint.random_weights import RandomWeights, fill_random
from worldmodel.kernels.choice import create_ops
from worldmodel.kernels.fused_layer import FusedFormat
from worldmodel.kernels.names import LayerOperations
from worldmodel.lingbot.empty_model import random_checkpoint
from worldmodel.lingbot.fused_forward import FusedForward
from worldmodel.lingbot.layer_parts import CAMERA, FORWARD, TEXT, USES_PER_CHUNK, PartWeights, is_streamed_name
from worldmodel.lingbot.pipeline import Forward
from worldmodel.lingbot.streamed_layers import LayerSource, StreamedLayers
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.lingbot.transformer_config import TransformerConfig, read_transformer_config
from worldmodel.wan.precision import precision_plan

NUM_LAYERS = 5
NUM_RESIDENT = 1
NUM_TIMED_PASSES = 8

IMPATIENT_HOST_S, IMPATIENT_DEVICE_S = 4.0, 10.0
"""How long ranks wait for one that hangs: shorter on the host, where an error can still be raised."""

REPOSITORY = Path(__file__).resolve().parents[2]


class RandomLinears:
    """A component whose weights are drawn from one sequence, made once: a `RandomComponent` makes it at every load."""

    def __init__(self, component: RandomComponent, device: torch.device) -> None:
        self.config = component.config
        self._weights = RandomWeights(seed=component.seed, device=device, gains=component.gains)

    def load_into(
        self, module: nn.Module, *, dtype: torch.dtype, device: torch.device, only: NameChoice | None = None
    ) -> None:
        fill_random(module, self._weights, dtype=dtype, device=device, only=only)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rank:
    """This process among the others, and the model that all of them run. `impatient` are groups that wait less."""

    sharing: Sharing
    groups: RankGroups
    impatient: RankGroups
    device: torch.device
    component: RandomLinears
    height: int
    width: int

    @property
    def config(self) -> TransformerConfig:
        published = read_transformer_config(self.component.config)
        return replace(published, num_layers=NUM_LAYERS, sink_latent_frames=1, window_latent_frames=4)

    @property
    def is_last(self) -> bool:
        return self.sharing.rank == self.sharing.num_ranks - 1

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rollout(self, model: LingBotTransformer, forward: Forward) -> list[torch.Tensor]:
        return rollout(model, forward, height=self.height, width=self.width)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streamed:
    """A transformer that streams, and what it streams."""

    transformer: LingBotTransformer
    forward: Forward
    model: StreamedModel

    @property
    def streamer(self) -> LayerStreamer:
        found = self.model.weights(FORWARD)
        assert isinstance(found, LayerStreamer)
        return found


def load(rank: Rank, *, streams: bool) -> LingBotTransformer:
    plan = precision_plan("bf16")
    with torch.device("meta"):
        transformer = LingBotTransformer(rank.config)
    only = (lambda name: not is_streamed_name(name)) if streams else None
    rank.component.load_into(transformer, dtype=plan.linear, device=rank.device, only=only)
    transformer.apply_precision(plan)
    return transformer


def resident(rank: Rank) -> tuple[LingBotTransformer, Forward]:
    transformer = load(rank, streams=False)
    ops = create_ops(LayerOperations.AUTO, rank.device)
    return transformer, transformer if ops is None else FusedForward(transformer, ops)


def streamed(rank: Rank, *, is_shared: bool) -> Streamed:
    """Stream all layers but one; with `is_shared` this rank keeps its share of them, without it all."""
    transformer = load(rank, streams=True)
    ops = create_ops(LayerOperations.AUTO, rank.device)
    layer_format = None if ops is None else FusedFormat(ops, transformer.plan.linear, quantize=False)
    layers = StreamedLayers(
        transformer, LayerSource(component=cast(Component, rank.component), device=rank.device), layer_format
    )
    residency = _residency(layers)
    is_cuda = rank.device.type == "cuda"
    model = stream_model(
        layers,
        residency,
        make_ordinary(layers, residency, sharing=rank.sharing if is_shared else None),
        TransferWish(transfer=Transfer.REGISTERED if is_cuda else Transfer.STAGED),
        rank.device,
        LoadedCudaRuntime(rank.device) if is_cuda else None,
        rank.groups if is_shared else None,
    )
    transformer.weights = PartWeights(
        forward=model.weights(FORWARD), camera=model.weights(CAMERA), text=model.weights(TEXT)
    )
    forward = transformer if ops is None else FusedForward(transformer, ops, layers=layers.fused)
    return Streamed(transformer=transformer, forward=forward, model=model)


def _residency(layers: StreamedLayers) -> ResidencyPlan:
    parts = [
        LayerPart(name=name, layer_bytes=layout.num_bytes, uses_per_chunk=USES_PER_CHUNK[name])
        for name, layout in layers.layouts.items()
    ]
    buffers_bytes = 2 * sum(part.layer_bytes for part in parts)
    return plan_residency(parts, layers.num_layers, buffers_bytes + NUM_RESIDENT * parts[0].layer_bytes)


def host_bytes(model: StreamedModel) -> int:
    return sum(part.num_bytes for part in model.host.all_parts)


def equals(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def find(rank: Rank) -> Iterator[tuple[str, object]]:
    """Run everything that all ranks can do, and yield what was found by name."""
    expected = rank.rollout(*resident(rank))
    shared = streamed(rank, is_shared=True)
    yield "host_bytes", host_bytes(shared.model)
    yield "whole_bytes", shared.model.residency.host_bytes
    yield "locked_bytes", shared.model.locked_bytes
    yield "equal", [equals(rank.rollout(shared.transformer, shared.forward), expected) for _ in range(2)]

    if rank.is_last:
        # As a tick does that failed here alone.
        shared.streamer.forget()
    try:
        rank.rollout(shared.transformer, shared.forward)
        yield "after a failure", "nothing"
    except RanksDisagree as error:
        yield "after a failure", type(error).__name__
    yield "recovered", equals(rank.rollout(shared.transformer, shared.forward), expected)

    if rank.device.type == "cuda":
        yield "shared_gb_per_s", rate(rank, shared) / 1e9
        yield "alone_gb_per_s", in_turns(rank, lambda: rate_alone(rank)) / 1e9
    shared.model.close()
    yield "locked_bytes after", shared.model.locked_bytes


def rate(rank: Rank, found: Streamed) -> float:
    """Return bytes of layers a second that reach this device while nothing is computed."""
    pass_bytes = found.model.residency.parts[FORWARD].host_bytes
    _pass(found)
    rank.synchronize()
    started_s = time.perf_counter()
    for _ in range(NUM_TIMED_PASSES):
        _pass(found)
    rank.synchronize()
    return NUM_TIMED_PASSES * pass_bytes / (time.perf_counter() - started_s)


def rate_alone(rank: Rank) -> float:
    whole = streamed(rank, is_shared=False)
    found = rate(rank, whole)
    whole.model.close()
    return found


def _pass(found: Streamed) -> None:
    for index in range(NUM_LAYERS):
        with found.streamer.layer(index):
            pass


def in_turns(rank: Rank, measure: Callable[[], float]) -> float:
    """Measure while the other ranks wait."""
    found = 0.0
    for turn in range(rank.sharing.num_ranks):
        if turn == rank.sharing.rank:
            found = measure()
        dist.barrier(rank.groups.host_group)
    return found


def outlive(rank: Rank, report: Path, is_released: int) -> None:
    """Let the last rank hang in the middle of a pass until the descriptor ends; report how this one notices."""
    shared = streamed(replace(rank, groups=rank.impatient), is_shared=True)
    dist.barrier(rank.groups.host_group)
    if rank.is_last:
        # Whether it has got so far with the others or they have given it up before makes no difference to them.
        with suppress(OffloadError), shared.streamer.layer(0):
            os.read(is_released, 1)
            os._exit(0)
        os.read(is_released, 1)
        os._exit(0)
    started_s = time.monotonic()
    error = "none"
    try:
        # On a CUDA device the host is not held up by the first pass, whose copies wait on the device.
        for _ in range(2):
            _pass(shared)
    except OffloadError as found:
        error = type(found).__name__
    report.write_text(json.dumps({"error": error, "after_s": time.monotonic() - started_s}))
    # What waits on the device is ended by the watchdog of its group, and the process with it.
    rank.synchronize()


def join(arguments: argparse.Namespace, number: int) -> Rank:
    """Join the process groups: gloo for the host, and for CUDA devices NCCL."""
    store = dist.FileStore(str(arguments.folder / "store"), arguments.num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=arguments.num_ranks, timeout=timedelta(seconds=60)
    )
    sharing = Sharing(rank=number, num_ranks=arguments.num_ranks)
    is_cuda = arguments.device == "cuda"
    device = torch.device(f"cuda:{number}" if is_cuda else "cpu")
    if is_cuda:
        torch.cuda.set_device(device)

    def groups(host_s: float, device_s: float) -> RankGroups:
        host_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=host_s))
        device_group = dist.new_group(backend="nccl", timeout=timedelta(seconds=device_s)) if is_cuda else host_group
        return RankGroups(sharing=sharing, device_group=device_group, host_group=host_group)

    return Rank(
        sharing=sharing,
        groups=groups(60, 60),
        impatient=groups(IMPATIENT_HOST_S, IMPATIENT_DEVICE_S),
        device=device,
        component=RandomLinears(random_checkpoint(arguments.model, 1).component("transformer"), device),
        height=arguments.height,
        width=arguments.width,
    )


def run_ranks(folder: Path, num_ranks: int, *options: str, timeout_s: float) -> list[int]:
    """Run ranks until all but the last have ended, then let that one go; return their exit codes.

    Raises AssertionError with what they printed if that takes longer than `timeout_s`.
    """
    command = [sys.executable, "-m", "tests.support.sharded_transformer", str(folder), str(num_ranks), *options]
    # Without NVLink multicast, which not every host may use, without a dump of what NCCL did, and whatever the name
    # of the host resolves to.
    settings = {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **settings}
    log = folder / "log"
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        code: int | str = started.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = f"none within {timeout_s} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    codes = folder / "codes.json"
    assert codes.exists(), f"exit code {code}: {log.read_text(errors='replace')[-6000:]}"
    found: list[int] = json.loads(codes.read_text())
    return found


def run_rank(rank: Rank, folder: Path, is_released: int) -> None:
    """Write what this rank found; the last one then hangs until the descriptor `is_released` ends."""
    with torch.inference_mode():
        found = dict(find(rank))
    (folder / f"{rank.sharing.rank}.json").write_text(json.dumps(found))
    outlive(rank, folder / f"{rank.sharing.rank}.hang.json", is_released)
    # A group with a rank that hung can't be left in order.
    os._exit(0)


def fork_ranks(arguments: argparse.Namespace) -> list[int]:
    """Run every rank in a process of its own and return their exit codes; nothing has used a device before."""
    is_released, release = os.pipe()
    pids = []
    for number in range(arguments.num_ranks):
        pid = os.fork()
        if pid == 0:
            os.close(release)
            try:
                run_rank(join(arguments, number), arguments.folder, is_released)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids[:-1]]
    os.close(release)
    return [*codes, os.waitstatus_to_exitcode(os.waitpid(pids[-1], 0)[1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="lingbot-world-v2-tiny")
    parser.add_argument("--height", type=int, default=4, help="of latent frames")
    parser.add_argument("--width", type=int, default=6, help="of latent frames")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    (arguments.folder / "codes.json").write_text(json.dumps(fork_ranks(arguments)))


if __name__ == "__main__":
    main()
