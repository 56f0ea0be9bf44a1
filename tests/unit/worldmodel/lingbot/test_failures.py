"""A failure at each step of a tick, in every state of the window: nothing is left, a retry gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

import worldmodel.lingbot.adapter
import worldmodel.lingbot.media
from kvcache.cross_store import CrossStore
from kvcache.pool import ExtentPool
from kvcache.rewrite import HistoryPart
from kvcache.transaction import ChunkTransaction
from tests.support.fake_model import image, keys, open_session, pixels, tick
from tests.support.lingbot_tiny import OUTPUTS, cache_of, frozen_copy, snapshot, tiny_adapter
from worldmodel.errors import TickRolledBack
from worldmodel.lingbot.camera import CameraEmbedding
from worldmodel.lingbot.media import DeviceMedia
from worldmodel.lingbot.noise import PerChunkNoise
from worldmodel.lingbot.prompts import PromptEncoder
from worldmodel.lingbot.reducer import CameraReducer
from worldmodel.lingbot.transformer import Layer, LingBotTransformer
from worldmodel.messages import SessionId, Tick
from worldmodel.runtime import Runtime
from worldmodel.wan.vae import WanVAE
from worldmodel.wan.vae_layers import ResidualUnit

NUM_CHUNKS = 5
FAILING_CHUNKS = (0, 1, 3, 4)
"""The window is empty before chunk 0, partial before 1, full before 3, slid before 4."""

NUM_LAYERS = 3
NUM_FORWARDS = 5


class Injected(RuntimeError):
    """What the tests raise inside a tick."""


Step = tuple[Any, str, int]
"""Owner, function, and on which call in a tick it fails."""

STEPS: list[list[Step]] = [
    [
        (PromptEncoder, "encode", 1),
        (CameraReducer, "prepare", 1),
        (CrossStore, "publish", 1),
        (WanVAE, "encode", 1),
        (PerChunkNoise, "draw", 1),
        (CameraEmbedding, "tokens", 1),
    ],
    [
        *((Layer, "camera_modulation", n) for n in range(1, NUM_LAYERS + 1)),
        *((LingBotTransformer, "flow", n) for n in range(1, NUM_FORWARDS)),
    ],
    [(ChunkTransaction, "write", n) for n in range(1, NUM_LAYERS * NUM_FORWARDS + 1)],
    [
        *((ChunkTransaction, "attend", n) for n in (1, NUM_LAYERS * NUM_FORWARDS - 1)),
        (CrossStore, "attend", NUM_LAYERS * NUM_FORWARDS - 1),
        (LingBotTransformer, "store_clean", 1),
    ],
    [
        (WanVAE, "decode", 1),
        (ResidualUnit, "forward", 20),
        (DeviceMedia, "__init__", 1),
        (worldmodel.lingbot.media, "to_yuv420", 1),
        (Runtime, "_check_generated", 1),
        (ChunkTransaction, "commit", 1),
    ],
]
"""In the order of a tick; those of one list fail one after the other, with one retry after all of them."""

RECACHE_STEPS: list[list[Step]] = [
    [
        (ChunkTransaction, "rewrite_history", 1),
        (ExtentPool, "copy_history", 1),
        *((HistoryPart, "write", n) for n in range(1, NUM_LAYERS + 1)),
        (HistoryPart, "attend", 2),
    ],
    [
        (LingBotTransformer, "store_clean", 1),
        (LingBotTransformer, "flow", 1),
        (ChunkTransaction, "write", NUM_LAYERS * NUM_FORWARDS),
        (worldmodel.lingbot.adapter, "extend_history", 1),
        (ChunkTransaction, "commit", 1),
    ],
]


@contextmanager
def failing(owner: Any, name: str, on_call: int) -> Iterator[Callable[[], int]]:
    """Let a function fail the n-th time it is called; gives the number of calls so far."""
    original, calls = owner.__dict__[name], 0
    function = original.__func__ if isinstance(original, staticmethod) else original

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == on_call:
            raise Injected(f"{name} call {on_call}")
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, staticmethod(fail) if isinstance(original, staticmethod) else fail)
        yield lambda: calls


def request(index: int) -> Tick:
    """Return a tick in which everything changes: prompt, keys, and what is in sight."""
    return tick("a", index, keys(index, "wasdijkl"[index % 8]), prompt=f"prompt {index}")


@cache
def undisturbed(recache: bool) -> tuple[list[bytes], object]:
    """Return the payloads of a run without failures, and its last state."""
    runtime = load(recache)[0]
    payloads = [pixels(runtime, request(index)) for index in range(NUM_CHUNKS)]
    return payloads, frozen_copy(runtime._sessions[SessionId("a")].state)


def load(recache: bool) -> tuple[Runtime, Any]:
    adapter = tiny_adapter(recache_on_prompt=recache)
    kv = cache_of(adapter)
    runtime = Runtime(adapter, kv)
    runtime.open(open_session("a", outputs=OUTPUTS), image())
    return runtime, kv


def check(steps: list[Step], *, recache: bool) -> None:
    expected, last_state = undisturbed(recache)
    runtime, kv = load(recache)
    for index in range(NUM_CHUNKS):
        # There is no history to encode anew before chunk 0.
        if index in FAILING_CHUNKS[recache:]:
            before = snapshot(runtime, kv, "a")
            for owner, name, on_call in steps:
                with failing(owner, name, on_call) as calls, pytest.raises(TickRolledBack) as caught:
                    runtime.tick(request(index))
                assert calls() == on_call
                assert isinstance(caught.value.__cause__, Injected)
                assert snapshot(runtime, kv, "a") == before, f"chunk {index}, {name} call {on_call}"
                kv.check_integrity()
        assert pixels(runtime, request(index)) == expected[index], f"chunk {index}"
    assert frozen_copy(runtime._sessions[SessionId("a")].state) == last_state


def name_of(steps: list[Step]) -> str:
    owner, name, _ = steps[0]
    return f"{owner.__name__.rpartition('.')[2]}.{name}"


@pytest.mark.parametrize("steps", STEPS, ids=name_of)
def test_a_failure_at_each_step_leaves_all_state_as_it_was(steps: list[Step]) -> None:
    check(steps, recache=False)


@pytest.mark.parametrize("steps", RECACHE_STEPS, ids=name_of)
def test_a_failure_while_history_is_encoded_anew_leaves_all_state_as_it_was(steps: list[Step]) -> None:
    check(steps, recache=True)


def test_a_snapshot_sees_a_single_changed_bit() -> None:
    """The comparison above can fail: K/V, text and state are in it."""
    runtime, kv = load(False)
    runtime.tick(request(0))
    before = snapshot(runtime, kv, "a")
    state = runtime._sessions[SessionId("a")].state
    for tensor in (kv._pool.v_EXHD[2], kv._cross_pools["text"].k_ZLHD[0], state.decoder_cache.tensors[0]):
        with torch.inference_mode():
            tensor.view(torch.uint8)[..., 0] ^= 1
        after = snapshot(runtime, kv, "a")
        assert after != before
        before = after
