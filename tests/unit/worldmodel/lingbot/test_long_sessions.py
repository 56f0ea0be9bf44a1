"""Long sessions: nothing grows, no chunk does more than the one before, and no frame number is special."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache.cache import KVCache
from tests.support.fake_model import image, keys, open_session, tick
from tests.support.lingbot_network import SESSION, open_cache, transformer, transformer_config
from tests.support.lingbot_tiny import OUTPUTS, SINK, VISIBLE, cache_of, history_kv, tiny_adapter
from worldmodel.lingbot.adapter import LingBotAdapter
from worldmodel.lingbot.reducer import CameraPlan
from worldmodel.lingbot.transformer import ChunkInputs
from worldmodel.messages import SessionId
from worldmodel.runtime import Runtime
from worldmodel.wan.rope import split_head

SETTLED_CHUNKS = 20
"""By then the window has slid and the condition of the tiny VAE is at its fixed point."""

OFFICIAL_LAST_FRAME = 1023
"""Where the table of the official code ends."""

TWO_HOURS_CHUNKS = 2 * 3600 * 16 // 12

RSS_ALLOWANCE_BYTES = 16e6


class CountedWork(TorchDispatchMode):
    """Counts tensor operations, and the elements they give."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations[str(function)] += 1
        if isinstance(result, torch.Tensor):
            self.elements += result.numel()
        return result


@dataclass(frozen=True, slots=True)
class Size:
    """What a process holds between two chunks."""

    objects: int
    tensors: int
    tensor_bytes: int
    pages: int
    resident_latent_frames: int


def size_of(kv: KVCache) -> Size:
    gc.collect()
    objects = gc.get_objects()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        # By type: asking some objects for their class runs their code, and a compiler's fake tensors have no storage.
        for tensor in objects
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    }
    return Size(
        objects=len(objects),
        tensors=len(storages),
        tensor_bytes=sum(storages.values()),
        pages=kv.total_pages - kv.free_pages,
        resident_latent_frames=len(kv.resident_latent_frames("a")),
    )


def play(num_chunks: int, *, recache: bool) -> None:
    """Run a session and compare what it holds, and what a chunk does, now and then with the settled state."""
    adapter = tiny_adapter(recache_on_prompt=recache)
    kv = cache_of(adapter)
    runtime = Runtime(adapter, kv)
    runtime.open(open_session("a", outputs=OUTPUTS), image())
    # Even ones: where the ring begins in an extent of 3 + 6 frames repeats every second chunk. The first one is a
    # rehearsal.
    sampled = [SETTLED_CHUNKS, SETTLED_CHUNKS + 2, *range(40, num_chunks, num_chunks // 5 // 2 * 2)]
    settled: tuple[Size, Counter[str], int] | None = None
    settled_rss = 0
    for index in range(num_chunks):
        request = tick("a", index, keys(index, "w"), prompt=f"prompt {index // 2 % 2}" if index % 2 == 0 else None)
        if index not in sampled:
            runtime.tick(request).to_host()
            continue
        with CountedWork() as work:
            runtime.tick(request).to_host()
        size = size_of(kv)
        if index <= SETTLED_CHUNKS + 2:
            settled, settled_rss = (size, work.operations, work.elements), psutil.Process().memory_info().rss
            continue
        assert settled is not None
        assert (work.operations, work.elements) == settled[1:], f"chunk {index}"
        assert (size.tensors, size.tensor_bytes) == (settled[0].tensors, settled[0].tensor_bytes), f"chunk {index}"
        assert (size.pages, size.resident_latent_frames) == (VISIBLE, VISIBLE)
        # What this loop keeps is a few objects too; a leak of one object a chunk would be more than that.
        assert size.objects - settled[0].objects < (index - SETTLED_CHUNKS) // 2, f"chunk {index}"
    state = runtime._sessions[SessionId("a")].state
    assert len(state.history) == (VISIBLE if recache else 0)
    assert state.condition.is_fixed
    assert kv.num_latent_frames("a") == 3 * num_chunks
    assert kv.resident_latent_frames("a") == (*range(SINK), *range(3 * num_chunks - VISIBLE + SINK, 3 * num_chunks))
    assert psutil.Process().memory_info().rss - settled_rss < RSS_ALLOWANCE_BYTES


@pytest.mark.parametrize("recache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_100_chunks_hold_and_do_no_more_than_20(recache: bool) -> None:
    play(100, recache=recache)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_2000_chunks_hold_and_do_no_more_than_20() -> None:
    play(2000, recache=False)


# ---------------------------------------------------------------- beyond latent frame 1023


def advance_cheaply(cache: KVCache, num_chunks: int) -> None:
    """Commit chunks of zeros; every one must see what a list of frames says."""
    spec = cache.spec
    frames = [*cache.resident_latent_frames(SESSION)]
    zeros = torch.zeros(3 * spec.tokens_per_latent_frame, spec.num_kv_heads, spec.head_dim)
    for _ in range(num_chunks):
        with cache.lease(SESSION) as lease:
            chunk = lease.begin_chunk()
            frames += range(chunk.first_latent_frame, chunk.first_latent_frame + 3)
            while len(frames) > spec.session_latent_frames:
                del frames[spec.sink_latent_frames]
            assert sorted(chunk.visible_latent_frames) == frames
            for layer in range(spec.num_layers):
                chunk.write(layer, zeros, zeros)
            chunk.commit()


def keys_of_layer_0(run: Callable[[Any], None], cache: KVCache) -> torch.Tensor:
    """Run a forward in the next chunk and return the keys that it wrote, [tokens, heads, head size]."""
    with cache.lease(SESSION) as lease:
        chunk = lease.begin_chunk()
        run(chunk)
        return chunk._bound.read_frames(0, 0, tuple(chunk.staged.latent_frames))[0].clone()


def turned(keys_THK: torch.Tensor, latent_frame: int) -> np.ndarray:
    """Turn keys of latent frame 0, as complex pairs [tokens, heads, pairs], to another frame in float64.

    position * 10000^(-2i / d) for the d = 2 * time_pairs dimensions of the time axis.
    """
    tokens, heads, head_dim = keys_THK.shape
    time_pairs = split_head(head_dim).time_pairs
    angles = latent_frame * np.power(10000.0, -np.arange(time_pairs) / time_pairs)
    pairs = keys_THK.double().numpy().copy().reshape(tokens, heads, -1, 2).view(np.complex128)[..., 0]
    pairs[..., :time_pairs] *= np.exp(1j * angles)
    return pairs


@pytest.mark.parametrize("first", [OFFICIAL_LAST_FRAME - 2, OFFICIAL_LAST_FRAME + 1, 4095, 99_999])
def test_frames_beyond_the_official_table_have_the_positions_of_the_formula(first: int) -> None:
    model = transformer(transformer_config(sink_latent_frames=SINK, visible_latent_frames=VISIBLE))
    x, condition = torch.randn(16, 3, 4, 6), torch.randn(20, 3, 4, 6)
    rays = torch.randn(18, model.config.width)

    def forward(first_latent_frame: int) -> Callable[[Any], None]:
        def run(chunk: Any) -> None:
            model.publish_text(torch.ones(2, model.config.text_dim), chunk)
            inputs = model.chunk_inputs(condition, rays, first_latent_frame)
            model.flow(x, model.time_constants(0.0), inputs, chunk)

        return run

    with torch.inference_mode():
        at_start = keys_of_layer_0(forward(0), open_cache(model, 4, 6))
        there = keys_of_layer_0(forward(first), open_cache(model, 4, 6))
    np.testing.assert_allclose(turned(there, 0), turned(at_start, first), atol=1e-5, rtol=0)


def store_at_start(adapter: LingBotAdapter, clean: torch.Tensor, inputs: ChunkInputs, chunk: Any) -> None:
    """Run the commit forward in a fresh chunk; its text is any, since keys of the first layer come before it."""
    adapter._transformer.publish_text(torch.ones(2, adapter._transformer.config.text_dim), chunk)
    adapter._sampler.store_clean(clean, inputs, chunk)


def check_positions(
    adapter: LingBotAdapter, kv: KVCache, index: int, clean: torch.Tensor, condition: torch.Tensor, camera: CameraPlan
) -> None:
    """Make the keys of the chunk committed last again at latent frame 0, turn them to where it was, and compare.

    Keys of the first layer depend on nothing but a frame's own latents, condition, camera and position.
    """
    model = adapter._transformer
    with torch.inference_mode():
        rays = adapter._camera.tokens(camera.relative_n44, camera.intrinsics_n4)
        inputs = model.chunk_inputs(condition, rays, 0)
        at_start = keys_of_layer_0(partial(store_at_start, adapter, clean, inputs), open_cache(model, 4, 6))
    stored = history_kv(kv, "a")
    for offset, frame_keys in enumerate(at_start.chunk(3)):
        # The tokens of a chunk that starts at frame 0 are at frames 0, 1 and 2 already.
        there, found = turned(frame_keys, 3 * index), turned(stored[0, 3 * index + offset][0], 0)
        np.testing.assert_allclose(found, there, atol=1e-5, rtol=0, err_msg=f"latent frame {3 * index + offset}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hours_of_chunks_with_keys_where_the_formula_puts_them() -> None:
    """Two hours at 16 frames a second, decoded, turning all the time; positions in float64 and memory now and then."""
    adapter = tiny_adapter()
    kv = cache_of(adapter)
    runtime = Runtime(adapter, kv)
    runtime.open(open_session("a", outputs=OUTPUTS), image())
    checked = {OFFICIAL_LAST_FRAME // 3, OFFICIAL_LAST_FRAME // 3 + 1, 1000, 5000, TWO_HOURS_CHUNKS - 1}
    settled: Size | None = None
    settled_rss = 0
    for index in range(TWO_HOURS_CHUNKS):
        state = runtime._sessions[SessionId("a")].state
        events = (keys(index, "w", "l"),) if index % 3 == 0 else ()
        _, (latents, _) = runtime.tick(tick("a", index, *events)).to_host()
        if index == SETTLED_CHUNKS:
            settled, settled_rss = size_of(kv), psutil.Process().memory_info().rss
        if index not in checked:
            continue
        assert settled is not None
        size = size_of(kv)
        assert (size.tensors, size.tensor_bytes) == (settled.tensors, settled.tensor_bytes), f"chunk {index}"
        assert (size.pages, size.resident_latent_frames) == (VISIBLE, VISIBLE)
        assert psutil.Process().memory_info().rss - settled_rss < RSS_ALLOWANCE_BYTES, f"chunk {index}"
        clean = torch.from_numpy(np.frombuffer(latents, np.float32).reshape(16, 3, 4, 6).copy())
        condition = state.condition.fixed_condition_20FHW
        check_positions(adapter, kv, index, clean, condition, adapter._reducer.prepare(state.camera, events, 3))
        del clean, condition
    assert kv.num_latent_frames("a") == 3 * TWO_HOURS_CHUNKS


def test_the_window_and_a_tick_are_ordinary_beyond_the_official_table() -> None:
    adapter = tiny_adapter()
    kv = cache_of(adapter)
    runtime = Runtime(adapter, kv)
    runtime.open(open_session(SESSION, outputs=OUTPUTS), image())
    advance_cheaply(kv, OFFICIAL_LAST_FRAME // 3)
    for index, first in enumerate((1023, 1026, 1029)):
        assert kv.num_latent_frames(SESSION) == first
        _, (latents, frames) = runtime.tick(tick(SESSION, index, keys(index, "w"))).to_host()
        assert np.isfinite(np.frombuffer(latents, np.float32)).all()
        assert len(frames.tobytes()) == 12 * 48 * 48 or index == 0
    assert kv.resident_latent_frames(SESSION) == (0, 1, 2, *range(1026, 1032))
