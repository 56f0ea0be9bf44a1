"""Ranks that share the weights of some layers out over gloo: `python -m` this module FOLDER NUM_RANKS.

Every rank is a forked process; the program prints one JSON list with what each rank found.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from offload.copy_queue import HostQueue
from offload.errors import CopyFailed, RanksDisagree
from offload.host_plan import Binding, HostKind, HostPlan, Recipe, StoredTensor
from offload.layout import FlatLayout, TensorSpec, flat_layout
from offload.residency import LayerPart, plan_residency
from offload.sharded import RankAgreement, RankGroups, ShardedCopies, Sharing, own_share
from offload.streamed_model import Transfer, TransferWish, full_name, make_ordinary, map_files, stream_model
from offload.streamer import LayerStreamer
from offload.transports import DirectCopies

NUM_LAYERS = 5
LAYOUT = flat_layout(
    [
        TensorSpec(name="weight", dtype=torch.float32, shape=(37, 11)),
        TensorSpec(name="bias", dtype=torch.bfloat16, shape=(7,)),
    ]
)


def layer_tensors(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "weight": torch.randn(37, 11, generator=generator),
        "bias": torch.randn(7, generator=generator).bfloat16(),
    }


def run_pass(streamer: LayerStreamer, *, fails_at: int | None = None) -> bool:
    """Use all layers; return whether every one was the whole layer. Raises RuntimeError at `fails_at`."""
    is_whole = True
    for index in range(NUM_LAYERS):
        with streamer.layer(index):
            if index == fails_at:
                raise RuntimeError("this rank failed")
            tensors = streamer.tensors(index)
            is_whole &= all(torch.equal(tensors[name], value) for name, value in layer_tensors(index).items())
    return is_whole


class Layers:
    """Implements `ModelLayers` with one part."""

    num_layers = NUM_LAYERS
    layouts: Mapping[str, FlatLayout] = {"forward": LAYOUT}

    def __init__(self) -> None:
        self.bound: dict[int, Mapping[str, torch.Tensor]] = {}

    def make(self, index: int) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {"forward": layer_tensors(index)}

    def bind(self, index: int, part: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.bound[index] = tensors

    def recipes(self, index: int, part: str) -> Sequence[Recipe]:
        return ()


def mapped_plan(file: Path) -> HostPlan:
    """Write all layers into a file with gaps between the tensors, and return the plan that binds them to it."""
    content, bindings = b"head", {}
    for index in range(NUM_LAYERS):
        for place in LAYOUT.places:
            tensor, name = place.tensor, full_name(index, "forward", place.tensor.name)
            stored = StoredTensor(key=name, file=file, start_byte=len(content), dtype=tensor.dtype, shape=tensor.shape)
            bindings[name] = Binding(tensor=tensor, stored=(stored,))
            content += layer_tensors(index)[tensor.name].view(torch.uint8).numpy().tobytes() + b"gap"
    file.write_bytes(content)
    return HostPlan(kind=HostKind.RUNTIME_CACHE, bindings=bindings)


def run_model(groups: RankGroups, *, residents: int, file: Path | None = None) -> bool:
    """Share a whole model out, with `file` from a mapping; return whether two passes see every layer whole."""
    cpu, layers = torch.device("cpu"), Layers()
    part = LayerPart(name="forward", layer_bytes=LAYOUT.num_bytes, uses_per_chunk=5)
    residency = plan_residency([part], NUM_LAYERS, (2 + residents) * LAYOUT.num_bytes)
    if file is None:
        host = make_ordinary(layers, residency, sharing=groups.sharing)
    else:
        host = map_files(layers, residency, mapped_plan(file), cpu)
    model = stream_model(layers, residency, host, TransferWish(transfer=Transfer.STAGED), cpu, groups=groups)
    is_whole = True
    for index in [*range(NUM_LAYERS)] * 2:
        with model.weights("forward").layer(index):
            tensors = layers.bound[index]
            is_whole &= all(torch.equal(tensors[name], value) for name, value in layer_tensors(index).items())
    model.close()
    return is_whole


def run_rank(folder: Path, rank: int, num_ranks: int) -> dict[str, object]:
    """Share the layers out, run passes, fail on the last rank alone, and go on."""
    store = dist.FileStore(str(folder / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=30))
    group = dist.group.WORLD
    assert group is not None
    sharing = Sharing(rank=rank, num_ranks=num_ranks)
    groups = RankGroups(sharing=sharing, device_group=group, host_group=group)
    host = {index: own_share(LAYOUT, layer_tensors(index), sharing) for index in range(NUM_LAYERS)}
    transport = ShardedCopies(DirectCopies(), sharing, group)
    streamer, other = (
        LayerStreamer(LAYOUT, host, transport, HostQueue(), torch.device("cpu"), RankAgreement(sharing, group, part))
        for part in range(2)
    )
    found: dict[str, object] = {"host_bytes": sum(part.num_bytes for part in host.values())}
    found["passes"] = [run_pass(streamer) for _ in range(3)]
    # Behind the last copy of a pass a rank can fail alone; the others finish theirs.
    try:
        found["failing pass"] = run_pass(streamer)
        if rank == num_ranks - 1:
            streamer.forget()
    except (RuntimeError, CopyFailed) as error:
        found["failing pass"] = str(error)
    try:
        found["after failure"] = run_pass(streamer)
    except RanksDisagree as error:
        found["after failure"] = type(error).__name__
    found["recovered"] = run_pass(streamer)
    # The last rank is at another part, whose buffers hold what the others' do.
    other.forget()
    streamer.forget()
    try:
        found["elsewhere"] = run_pass(other if rank == num_ranks - 1 else streamer)
    except RanksDisagree as error:
        found["elsewhere"] = type(error).__name__
    found["together again"] = run_pass(streamer) and run_pass(other)
    streamer.close()
    found["model"] = run_model(groups, residents=2) and run_model(groups, residents=0)
    found["mapped model"] = run_model(groups, residents=1, file=folder / f"weights-{rank}")
    dist.destroy_process_group()
    return found


def main() -> None:
    folder, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    pids = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            (folder / f"{rank}.json").write_text(json.dumps(run_rank(folder, rank, num_ranks)))
            os._exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * num_ranks, codes
    print(json.dumps([json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]))


if __name__ == "__main__":
    main()
