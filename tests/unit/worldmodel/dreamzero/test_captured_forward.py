"""Captured forwards against the plain ones: robots in turns, resets, other prompts, failures; on a stand-in for graphs.

The tape repeats the operations of its recording and nothing else, so that whatever a forward took from the session,
start frame or step that it was recorded with shows in the answers of the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
import torch

from kvcache.attention_indexed import GatheredAttention
from tests.support.dreamzero_made import random_pictures, write_tiny
from tests.support.dreamzero_sessions import Answer, call, open_robot, reset_robot, runtime_of
from tests.support.graph_tape import TapeRecorder, address
from worldmodel.dreamzero.adapter import DreamZeroAdapter, create_adapter
from worldmodel.dreamzero.captured_forward import CapturedForward
from worldmodel.dreamzero.config import parse_options
from worldmodel.errors import LoadFailed, TickRolledBack
from worldmodel.kernels.names import GraphChoice
from worldmodel.messages import StartWorker
from worldmodel.runtime import Runtime
from worldmodel.wan.captured import CapturedForwards

NAMES = ("a", "b")
NUM_CALLS = 10
PROMPTS = ("Close the drawer.", "Pick up the red block")
NUM_FORMS = 3
"""A commit of one frame, one of a whole chunk, and a draft."""

Built = tuple[Runtime, DreamZeroAdapter]


def build(start: StartWorker, recorder: TapeRecorder | None) -> Built:
    """Return a worker after its warm-up, captured if there is a recorder."""
    adapter = create_adapter(start, lambda *_: None)
    if recorder is not None:
        kv = adapter.kv_spec()
        graphs = CapturedForwards(GraphChoice.AUTO, kv, GatheredAttention(), recorder)
        adapter._graphs = CapturedForward(adapter._acceleration.forward, graphs, kv)
        adapter._sampler._forward = adapter._graphs
    runtime = runtime_of(adapter, start)
    runtime.warm_up(lambda *_: None)
    return runtime, adapter


def act(built: Built, name: str, index: int, seed: int, prompt: str) -> Answer:
    runtime, adapter = built
    return call(runtime, name, index, random_pictures(adapter._model.robot, 0 if index == 0 else seed), prompt)


def assert_near(got: Answer, want: Answer) -> None:
    """Compare up to the order of sums: rows past the end are hidden in one attention and absent in the other."""
    np.testing.assert_allclose(got.actions, want.actions, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got.latents, want.latents, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StartWorker]:
    def write(structure: str, **options: str) -> StartWorker:
        start = write_tiny(tmp_path_factory.mktemp(structure), structure, **options)
        return replace(start, requested_sessions=len(NAMES))

    return {"14b": write("14b"), "5b": write("5b", layer_operations="plain")}


@pytest.mark.parametrize("structure", [pytest.param("14b", marks=pytest.mark.slow), "5b"])
def test_robots_in_turns_act_as_with_plain_forwards(starts: dict[str, StartWorker], structure: str) -> None:
    """Both workers are asked the same, in a random order, with a reset and other prompts. 5b is fused."""
    recorder = TapeRecorder()
    captured, plain = build(starts[structure], recorder), build(starts[structure], None)
    for runtime, _ in (captured, plain):
        for name in NAMES:
            open_robot(runtime, name)
    rng = np.random.default_rng(7)
    counts, prompts = [0, 0], [0, 1]
    for turn in range(NUM_CALLS):
        robot = int(rng.integers(len(NAMES)))
        if turn == NUM_CALLS // 2:
            for runtime, _ in (captured, plain):
                reset_robot(runtime, NAMES[robot])
            counts[robot] = 0
        prompts[robot] ^= int(rng.random() < 0.2)
        asked = (NAMES[robot], counts[robot], turn + 1, PROMPTS[prompts[robot]])
        assert_near(act(captured, *asked), act(plain, *asked))
        counts[robot] += 1
    assert len(recorder.tapes) == NUM_FORMS, "something was captured after the warm-up"
    assert_reads_only_what_stays(recorder, captured)


def assert_reads_only_what_stays(recorder: TapeRecorder, built: Built) -> None:
    """Look for tensors on a tape that are neither weights nor K/V storage nor places of the graphs themselves."""
    runtime, adapter = built
    assert isinstance(adapter._graphs, CapturedForward)
    pools = [runtime._cache._pool, *runtime._cache._cross_pools.values()]
    stays = [*adapter._transformer.parameters(), *adapter._transformer.buffers()]
    stays += [tensor for pool in pools for group in vars(pool).values() for tensor in tensors_in(group)]
    for form in adapter._graphs._graphs._captured.values():
        assert form is not None
        stays += [form._arguments._memory, form._constants._memory, form._kv._numbers._numbers]
        stays += form._kv._rows.values()
    known = {address(tensor) for tensor in stays}
    for tape in recorder.tapes:
        strangers = [tuple(tensor.shape) for place, tensor in tape.from_outside.items() if place not in known]
        assert not strangers


def tensors_in(group: object) -> list[torch.Tensor]:
    return [each for each in group if isinstance(each, torch.Tensor)] if isinstance(group, tuple) else []


def test_a_failed_call_leaves_nothing_to_the_next_ones(
    starts: dict[str, StartWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two robots see the same; a call of one of them fails in between."""
    captured = build(starts["5b"], TapeRecorder())
    for name in NAMES:
        open_robot(captured[0], name)
    want = [act(captured, "b", index, index, PROMPTS[0]) for index in range(4)]
    got = [act(captured, "a", index, index, PROMPTS[0]) for index in range(2)]

    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("as ordered")

    with monkeypatch.context() as patch:
        patch.setattr(CapturedForward, "velocity", fail)
        with pytest.raises(TickRolledBack):
            act(captured, "a", 2, 5, PROMPTS[1])
    got += [act(captured, "a", index, index, PROMPTS[0]) for index in (2, 3)]
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours.actions, theirs.actions)


def test_what_is_captured_is_planned_for_and_shown(starts: dict[str, StartWorker]) -> None:
    _, adapter = build(starts["5b"], TapeRecorder(10.0, 1.0, 10.0, 9.9))
    plain = create_adapter(starts["5b"], lambda *_: None)
    shown = adapter.spec.attention_backend.removeprefix(plain.spec.attention_backend)
    assert shown == (
        "; graphs commit of 1 latent frames (10.00 ms plain, 1.00 ms in a graph), "
        "not draft of 2 latent frames (10.00 ms plain, 9.90 ms in a graph), "
        "commit of 2 latent frames (10.00 ms plain, 1.00 ms in a graph)"
    )
    adapter._acceleration = replace(adapter._acceleration, graph_attention="triton")
    assert adapter.spec.attention_backend.endswith("1.00 ms in a graph), which attend with triton")
    assert isinstance(adapter._graphs, CapturedForward)
    assert adapter._graphs._graphs._is_sealed, "the end of the warm-up was not told"
    planned_bytes = adapter.kv_spec().worker_owned_bytes - plain.kv_spec().worker_owned_bytes
    assert 0 < adapter._graphs.num_bytes <= planned_bytes


def test_graphs_that_can_not_be_had_stop_the_start_if_asked_for(starts: dict[str, StartWorker]) -> None:
    start = replace(starts["5b"], model_options=parse_options({"graphs": "on"}))
    with pytest.raises(LoadFailed, match="graphs 'on' can't be had: they need a CUDA device") as failed:
        create_adapter(start, lambda *_: None)
    assert failed.value.field == "graphs"
