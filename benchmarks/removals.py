"""Time what a worker does once, or not at all, beside the form that does it again and again. One process, same inputs.

    python -m benchmarks.removals --json removals.json
    python -m benchmarks.removals --scale full --device cuda --json removals_full.json

`demo` is the demo world with its weights, in float32. `full` is the published size with random weights: one layer and
the VAE are made, and the layer stands for all 40 (about 40 GB of device memory, most of it K/V). Plain and served form
of a removal take turns; both do what they do in one whole chunk of four steps and a commit with a full window, nothing
else. On CUDA a time is that of the form alone, from an idle device to an idle device: launches are in it, and what a
chunk would hide behind other work is not hidden. `difference` is the largest one between the results of the two, as a
part of the largest number of the plain one.

Shapes: L text rows, C channels, D model width, F latent frames, T media frames, H height, W width, Y and X latent rows
and columns, n latent frames of a chunk, 4 rows or columns of a pose or (fx, fy, cx, cy), 3 colours, 20 channels of a
condition.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from benchmarks.arguments import device_name, new_file
from benchmarks.provenance import provenance
from benchmarks.removals_world import (
    PROMPT_ROWS,
    World,
    build_world,
    drawn_png,
    fill_window,
    inputs_of,
    latents,
    street,
    walk,
)
from kvcache.transaction import ChunkTransaction
from server.config import LimitsSection
from server.uploads import decode_image
from training.demo_world.options import count
from worldmodel.lingbot.camera import CameraEmbedding
from worldmodel.lingbot.condition import ConditionState, next_condition, start_condition
from worldmodel.lingbot.media import DeviceMedia
from worldmodel.lingbot.transformer import TEXT_STORE, CameraModulation, ChunkInputs
from worldmodel.messages import MediaFormat
from worldmodel.start_image import read_image
from worldmodel.wan.fixed_value import tensors_of
from worldmodel.wan.flow_scheduler import COMMIT_TIMESTEP, nominal_table
from worldmodel.wan.image import prepare_image
from worldmodel.wan.pixels import to_yuv420
from worldmodel.wan.vae import VAECache, WanVAE

FORWARDS = (*(step.timestep for step in nominal_table(5.0)), COMMIT_TIMESTEP)
"""Timesteps of the forwards of a chunk, the commit last."""

MAX_ENCODED_CHUNKS = 20
"""More than any encoder needs to forget the start image."""

CAMERA_TEST = "tests/golden/test_lingbot_camera.py::test_lingbot_camera_basis_equals_the_packed_route"
COMMIT_TEST = (
    "tests/unit/worldmodel/lingbot/test_transformer.py::"
    "test_storing_clean_latents_writes_the_same_history_as_a_whole_forward"
)
FIXED_TEST = (
    "tests/unit/worldmodel/lingbot/test_condition.py::"
    "test_after_the_fixed_point_nothing_is_encoded_and_the_cache_is_let_go"
)
IMAGE_TEST = "tests/unit/worldmodel/lingbot/test_condition.py::test_the_opening_frame_is_the_encoded_image"
RESET_TEST = "tests/unit/worldmodel/lingbot/test_adapter.py::test_a_reset_starts_over_with_the_old_image"
KEPT_TEST = (
    "tests/unit/worldmodel/lingbot/test_offloaded_worker.py::"
    "test_chunks_have_the_bits_of_a_worker_that_keeps_everything"
)
OWN_TEST = "tests/unit/benchmarks/test_removals.py::test_every_removal_equals_its_plain_form"
MEDIA_TEST = "tests/gpu/test_serving_gpu.py::test_pixels_made_on_the_device_arrive_as_those_made_on_the_host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Both forms of one thing, for a whole chunk. `test` holds them equal; `tolerance` is what rounding explains.

    `seen` reads what a form has left behind, for one whose result is not what it returns.
    """

    name: str
    plain: Callable[[], object]
    served: Callable[[], object]
    test: str
    tolerance: float = 0.0
    seen: Callable[[object], list[Tensor]] = tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Milliseconds a chunk: medians of the wall clock and of this process's CPU time, and the shortest wall time."""

    name: str
    plain_ms: float
    served_ms: float
    plain_cpu_ms: float
    served_cpu_ms: float
    plain_least_ms: float
    served_least_ms: float
    difference: float
    tolerance: float
    test: str

    @property
    def gain_ms(self) -> float:
        return self.plain_ms - self.served_ms


# ------------------------------------------------------------ the removals


def removals(world: World, chunk: ChunkTransaction, inputs: ChunkInputs) -> Iterator[Removal]:
    """Yield all of them; those of copies and pixels only where the device is not the host."""
    yield time_constants(world)
    yield camera_modulation(world, inputs)
    yield text_key_value(world, chunk)
    yield rays(world)
    yield from source_image(world)
    yield fixed_condition(world)
    yield commit_forward(world, chunk, inputs)
    if world.transformer.device.type == "cuda":
        yield from media(world)


def time_constants(world: World) -> Removal:
    model = world.transformer
    kept = [model.time_constants(timestep) for timestep in FORWARDS]
    return Removal(
        name="time embedding and modulations of a step, made at load",
        plain=lambda: tuple(model.time_constants(timestep) for timestep in FORWARDS),
        served=lambda: tuple(kept),
        test=OWN_TEST,
    )


def camera_modulation(world: World, inputs: ChunkInputs) -> Removal:
    """A forward that keeps nothing computes each layer's scale and shift as it comes to it."""
    model = world.transformer

    def forwards(given: ChunkInputs) -> tuple[CameraModulation, ...]:
        for _ in FORWARDS:
            found = tuple(model.camera_at(index, given) for index in range(len(model.layers)))
        return found

    def once() -> object:
        made = tuple(model.camera_modulation(index, inputs.camera_TD) for index in range(len(model.layers)))
        return forwards(replace(inputs, camera=made))

    return Removal(
        name="camera modulation, once a chunk",
        plain=lambda: forwards(replace(inputs, camera=())),
        served=once,
        test=KEPT_TEST,
    )


def text_key_value(world: World, chunk: ChunkTransaction) -> Removal:
    """Both have the same padding rows, so that only the repetition differs."""
    model = world.transformer
    padded_LC = model.pad_text(world.rows_LC, merge_padding=world.merges_padding)
    store = chunk.cross_store(TEXT_STORE)

    def plain() -> object:
        for _ in FORWARDS:
            text_LD = model.embed_text(padded_LC)
            pairs = tuple(layer.cross_attn.key_value(text_LD) for layer in model.layers)
        return pairs

    def served() -> object:
        for _ in FORWARDS:
            pairs = tuple(store.read(index)[:2] for index in range(len(model.layers)))
        return pairs

    return Removal(name="text embedding, K and V, once a prompt", plain=plain, served=served, test=OWN_TEST)


def rays(world: World) -> Removal:
    linear = world.transformer.patch_embedding_wancamctrl
    relative_n44, intrinsics_n4 = walk(world)

    def tokens(max_bases: int) -> Callable[[], Tensor]:
        size, dtype = (world.height, world.width), world.transformer.plan.linear
        embedding = CameraEmbedding(linear.weight, linear.bias, *size, max_bases=max_bases, dtype=dtype)
        return lambda: embedding.tokens(relative_n44, intrinsics_n4)

    return Removal(
        name="rays as 12 numbers a frame times a basis, not 384 channels a pixel",
        plain=tokens(0),
        served=tokens(1),
        test=CAMERA_TEST,
        tolerance=world.rounding,
    )


def source_image(world: World) -> Iterator[Removal]:
    device = world.transformer.device
    file = drawn_png(world.height, world.width)

    def decoded() -> Tensor:
        raw = decode_image(file, limits=LimitsSection(), field="image")
        pixels = read_image(raw.size, memoryview(raw.pixels))
        return prepare_image(pixels, world.height, world.width).to(device)

    image_3HW = decoded()
    num_frames = world.transformer.config.latent_frames_per_chunk
    opening_20FYX, _ = next_condition(world.vae, start_condition(image_3HW), num_frames)
    kept_CFYX = opening_20FYX[4:, :1].clone()
    yield Removal(
        name="start image decoded and resized, once a session",
        plain=decoded,
        served=lambda: image_3HW,
        test=RESET_TEST,
    )
    yield Removal(
        name="start image encoded, once a session",
        plain=lambda: world.vae.encode(image_3HW[None, :, None])[0][0],
        served=lambda: kept_CFYX,
        test=IMAGE_TEST,
        tolerance=1e-5 if world.vae.dtype == torch.float32 else 2e-2,
    )


def fixed_condition(world: World) -> Removal:
    """Grey frames go through the encoder's last cache again, which gives the same for ever."""
    vae, num_frames = world.vae, world.transformer.config.latent_frames_per_chunk
    image_3HW = prepare_image(street(world.height, world.width), world.height, world.width)
    before, fixed = _until_fixed(vae, start_condition(image_3HW.to(world.transformer.device)), num_frames)
    grey_13THW = torch.zeros(
        1, 3, vae.config.temporal_factor * num_frames, world.height, world.width, device=world.transformer.device
    )
    return Removal(
        name="condition of grey frames, constant from its fixed point on",
        plain=lambda: vae.encode(grey_13THW, before)[0][0],
        served=lambda: next_condition(vae, fixed, num_frames)[0][4:],
        test=FIXED_TEST,
        tolerance=1e-5 if vae.dtype == torch.float32 else 2e-2,
    )


def _until_fixed(vae: WanVAE, state: ConditionState, num_frames: int) -> tuple[VAECache, ConditionState]:
    """Return the encoder's last cache and the state that is fixed."""
    for _ in range(MAX_ENCODED_CHUNKS):
        cache = state.cache
        _, state = next_condition(vae, state, num_frames)
        if state.is_fixed and cache is not None:
            return cache, state
    raise RuntimeError(f"the condition still changes after {MAX_ENCODED_CHUNKS} chunks")


def commit_forward(world: World, chunk: ChunkTransaction, inputs: ChunkInputs) -> Removal:
    """Whole forwards: all but the end of the last layer and the head is the same in both."""
    time_of_commit = world.transformer.time_constants(COMMIT_TIMESTEP)
    x0_CFYX = latents(world, seed=9)

    def seen(_: object) -> list[Tensor]:
        return [tensor.clone() for tensor in chunk.visible(len(world.transformer.layers) - 1)]

    return Removal(
        name="commit forward, ended after K and V of the last layer",
        plain=lambda: world.forward.flow(x0_CFYX, time_of_commit, inputs, chunk),
        served=lambda: world.forward.store_clean(x0_CFYX, time_of_commit, inputs, chunk),
        test=COMMIT_TEST,
        seen=seen,
    )


def media(world: World) -> Iterator[Removal]:
    num_frames = world.vae.config.temporal_factor * world.transformer.config.latent_frames_per_chunk
    latents_CFYX = latents(world, seed=9)
    frames_3THW = torch.rand(3, num_frames, world.height, world.width, device=latents_CFYX.device) * 2 - 1
    frames_3THW = frames_3THW.to(world.vae.dtype)

    def pinned() -> Tensor:
        (array,) = DeviceMedia((MediaFormat.YUV420,), latents_CFYX, frames_3THW).to_host()
        return torch.from_numpy(array.array)

    yield Removal(
        name="pixels to YUV 4:2:0 on the device, not on the host",
        plain=lambda: to_yuv420(frames_3THW.cpu()),
        served=lambda: to_yuv420(frames_3THW).cpu(),
        test=MEDIA_TEST,
    )
    yield Removal(
        name="pixels through pinned memory, waited for at the end",
        plain=lambda: to_yuv420(frames_3THW).cpu(),
        served=pinned,
        test=MEDIA_TEST,
    )


# ------------------------------------------------------------ measuring


def measure(world: World, repeats: int) -> list[Timed]:
    """Time all removals in a chunk with a full window, which is rolled back in the end."""
    world.cache.open("timed")
    fill_window(world, "timed")
    with world.cache.lease("timed") as lease:
        chunk = lease.begin_chunk()
        inputs = inputs_of(world, chunk)
        found = [time_removal(each, world.transformer.device, repeats) for each in removals(world, chunk, inputs)]
        chunk.rollback()
    return found


def time_removal(removal: Removal, device: torch.device, repeats: int) -> Timed:
    """Run both forms once to compare them, then in turns to time them."""
    plain, served = (removal.seen(form()) for form in (removal.plain, removal.served))
    difference = _difference(plain, served)
    del plain, served
    rows = [(_time(removal.plain, device), _time(removal.served, device)) for _ in range(repeats)]
    walls, cpus = ([[pair[form][clock] for pair in rows] for form in range(2)] for clock in range(2))
    return Timed(
        name=removal.name,
        plain_ms=statistics.median(walls[0]),
        served_ms=statistics.median(walls[1]),
        plain_cpu_ms=statistics.median(cpus[0]),
        served_cpu_ms=statistics.median(cpus[1]),
        plain_least_ms=min(walls[0]),
        served_least_ms=min(walls[1]),
        difference=difference,
        tolerance=removal.tolerance,
        test=removal.test,
    )


def _time(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return milliseconds of the wall clock and of CPU time."""
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - started_s), 1000 * (time.process_time() - cpu_started_s)


def _difference(plain: Sequence[Tensor], served: Sequence[Tensor]) -> float:
    """Return the largest difference over the largest number. Raises ValueError for results of another make."""
    distance, largest = 0.0, 0.0
    for ours, theirs in zip(plain, served, strict=True):
        if ours.shape != theirs.shape:
            raise ValueError(f"expected a result {tuple(ours.shape)}, got {tuple(theirs.shape)}")
        distance = max(distance, (ours.double() - theirs.double()).abs().max().item())
        largest = max(largest, ours.double().abs().max().item())
    return distance / largest if distance else 0.0


def show(rows: Sequence[Timed]) -> None:
    print("| removal | plain (CPU), ms a chunk | served (CPU) | gain | largest difference | test |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        plain, served = f"{row.plain_ms:.2f} ({row.plain_cpu_ms:.2f})", f"{row.served_ms:.2f} ({row.served_cpu_ms:.2f})"
        equal = f"{row.difference:.1e}" if row.difference else "0"
        print(f"| {row.name} | {plain} | {served} | {row.gain_ms:.2f} | {equal} | `{row.test}` |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=sorted(PROMPT_ROWS), default="demo", help="sizes (default demo)")
    parser.add_argument("--device", type=device_name, default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default fp32 on a CPU, bf16 on CUDA")
    parser.add_argument("--repeats", type=count(least=1), default=15, help="timed turns of each (default 15)")
    parser.add_argument("--json", type=new_file, help="write everything here")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.scale == "full" and device.type != "cuda":
        parser.error("argument --scale: full needs about 40 GB of a CUDA device; expected --device cuda")
    precision = arguments.precision or ("bf16" if device.type == "cuda" else "fp32")
    with torch.inference_mode():
        rows = measure(build_world(arguments.scale, device, precision), arguments.repeats)
    show(rows)
    facts = {**provenance(device), "scale": arguments.scale, "precision": precision, "repeats": arguments.repeats}
    if device.type == "cuda":
        facts["max_allocated_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    print(facts)
    if arguments.json:
        report = {**facts, "removals": [{**asdict(row), "gain_ms": row.gain_ms} for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1))
    if wrong := [row.name for row in rows if row.difference > row.tolerance]:
        raise SystemExit(f"not equal: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
