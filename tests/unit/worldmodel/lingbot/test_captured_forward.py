"""Captured forwards against the plain ones: sessions in turns, resets, prompts, failures; on a stand-in for graphs.

The tape repeats the operations of its recording and nothing else, so that whatever a forward took from the session,
chunk, prompt or step that it was recorded with shows in the chunks of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from kvcache.attention_indexed import GatheredAttention
from kvcache.spec import KVSpec
from tests.support.fake_model import close_session, image, keys, open_session, reset_session, tick
from tests.support.graph_tape import TapeRecorder, address
from tests.support.lingbot_tiny import cache_of, history_kv, tiny_adapter
from worldmodel.errors import LoadFailed, TickRolledBack
from worldmodel.kernels.names import GraphChoice, LayerOperations
from worldmodel.lingbot.acceleration import capture, check_choices
from worldmodel.lingbot.adapter import LingBotAdapter
from worldmodel.lingbot.captured_forward import CapturedForward
from worldmodel.lingbot.config import LingBotOptions
from worldmodel.lingbot.controls import TRANSITION_SCHEMA, parse_control
from worldmodel.messages import Control, ControlEvent, MediaFormat, SessionId
from worldmodel.runtime import Runtime
from worldmodel.wan.captured import CapturedForwards
from worldmodel.wan.fixed_value import tensors_of

NAMES = ("a", "b")
NUM_CHUNKS = 14
"""Of both sessions together: each slides its window of nine frames, which three chunks fill."""

PROMPTS = ("a street", "a town by the sea", "night")
SWITCH = ((0, None), (1, PROMPTS[1]), (2, None))
"""Chunks of one session, and the prompt that comes with one of them."""

NUM_FORMS = 2
"""A step and the clean history."""

KEYS = ("w", "a", "s", "d", "i", "j", "k", "l")
CASES = [
    pytest.param({"layer_operations": LayerOperations.UNFUSED}, id="unfused", marks=pytest.mark.slow),
    pytest.param({"layer_operations": LayerOperations.PLAIN}, id="fused"),
    pytest.param(
        {"layer_operations": LayerOperations.PLAIN, "recache_on_prompt": True}, id="recache", marks=pytest.mark.slow
    ),
    pytest.param({"precision": "fp8_kv"}, id="float8", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Several threads lose more than they gain on operations this small, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Worker:
    """A tiny worker after a warm-up of one chunk without pictures, captured if there is a recorder."""

    def __init__(self, recorder: TapeRecorder | None, **options: Any) -> None:
        self.adapter = tiny_adapter(**options)
        if recorder is not None:
            self.adapter.serve_with(captured_forward(self.adapter, recorder))
        self.cache = cache_of(self.adapter)
        self.runtime = Runtime(self.adapter, self.cache)
        self.open("warm-up", 0)
        self.chunk("warm-up", 0)
        self.runtime.close(close_session("warm-up"))
        self.adapter.end_warm_up()

    def open(self, name: str, seed: int) -> None:
        self.runtime.open(open_session(name, seed=seed, outputs=(MediaFormat.LATENT,)), image(seed))

    def chunk(self, name: str, index: int, *events: ControlEvent, prompt: str | None = None) -> np.ndarray:
        _, parts = self.runtime.tick(tick(name, index, *events, prompt=prompt)).to_host()
        return np.concatenate([np.asarray(part).view(np.float32).reshape(-1) for part in parts])


def captured_forward(adapter: LingBotAdapter, recorder: TapeRecorder) -> CapturedForward:
    graphs = CapturedForwards(GraphChoice.AUTO, adapter.kv_spec(), GatheredAttention(), recorder)
    return CapturedForward(
        adapter._acceleration.forward, graphs, adapter._transformer, merges_padding=adapter._merge_padding
    )


@pytest.fixture(scope="module")
def adapter() -> LingBotAdapter:
    """Return an adapter that no test changes."""
    return tiny_adapter()


def over_two_chunks(event_id: int) -> ControlEvent:
    data = parse_control("prompt", TRANSITION_SCHEMA, {"chunks": 2})
    return ControlEvent(event_id=event_id, controls=(Control(track="prompt", schema=TRANSITION_SCHEMA, data=data),))


@pytest.mark.parametrize("options", CASES)
def test_sessions_in_turns_see_the_worlds_of_plain_forwards(options: dict[str, Any]) -> None:
    """Both workers are asked the same, in a random order, with keys, a reset, a close, and prompts on their way."""
    recorder = TapeRecorder()
    captured, plain = Worker(recorder, **options), Worker(None, **options)
    for number, name in enumerate(NAMES):
        captured.open(name, number)
        plain.open(name, number)
    rng = np.random.default_rng(11)
    counts = dict.fromkeys(NAMES, 0)
    for turn in range(NUM_CHUNKS):
        name = NAMES[int(rng.integers(2))]
        if turn == NUM_CHUNKS // 2:
            for worker in (captured, plain):
                worker.runtime.reset(reset_session(name, seed=5), None)
            counts[name] = 0
        if turn == NUM_CHUNKS - 4:
            for worker in (captured, plain):
                worker.runtime.close(close_session(name))
                worker.open(name, 7)
            counts[name] = 0
        events = [keys(2 * turn, *rng.choice(KEYS, 2, replace=False).tolist())]
        prompt = PROMPTS[int(rng.integers(3))] if rng.random() < 0.4 else None
        if prompt is not None and rng.random() < 0.5:
            events.append(over_two_chunks(2 * turn + 1))
        got, want = (worker.chunk(name, counts[name], *events, prompt=prompt) for worker in (captured, plain))
        near = 0.05 if options.get("precision") else 1e-3
        np.testing.assert_allclose(got, want, atol=near, rtol=near)
        counts[name] += 1
    assert len(recorder.tapes) == NUM_FORMS, "something was captured after the warm-up"
    assert_reads_only_what_stays(recorder, captured)


def assert_reads_only_what_stays(recorder: TapeRecorder, worker: Worker) -> None:
    """Look for tensors on a tape that are neither weights nor K/V storage nor places of the graphs themselves."""
    adapter, cache = worker.adapter, worker.cache
    assert isinstance(adapter._graphs, CapturedForward)
    stays = [*adapter._transformer.parameters(), *adapter._transformer.buffers()]
    for fused in getattr(adapter._acceleration.forward, "_layers", ()):
        linears = (getattr(fused, name) for name in fused.__slots__)
        stays += [tensor for linear in linears for tensor in vars(linear).values() if isinstance(tensor, torch.Tensor)]
    pools = [cache._pool, *cache._cross_pools.values()]
    stays += [each for pool in pools for group in vars(pool).values() if isinstance(group, tuple) for each in group]
    stays += tensors_of(adapter._graphs._inputs)
    for form in adapter._graphs._graphs._captured.values():
        assert form is not None
        stays += [form._arguments._memory, form._constants._memory, form._kv._numbers._numbers]
        stays += [*form._kv._rows.values(), *(store._bias_X for store in form._kv._stores.values())]
    known = {address(tensor) for tensor in stays if isinstance(tensor, torch.Tensor)}
    for tape in recorder.tapes:
        strangers = [tuple(tensor.shape) for place, tensor in tape.from_outside.items() if place not in known]
        assert not strangers


def test_a_failed_chunk_leaves_nothing_to_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions see the same; a chunk of one of them fails in between."""
    worker = Worker(TapeRecorder())
    for name in NAMES:
        worker.open(name, 3)
    want = [worker.chunk("b", index, keys(index, "w")) for index in range(4)]
    got = [worker.chunk("a", index, keys(index, "w")) for index in range(2)]

    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("as ordered")

    with monkeypatch.context() as patch:
        patch.setattr(CapturedForward, "store_clean", fail)
        with pytest.raises(TickRolledBack):
            worker.chunk("a", 2, keys(2, "d"), prompt=PROMPTS[1])
    got += [worker.chunk("a", index, keys(index, "w")) for index in (2, 3)]
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_history_is_encoded_anew_beside_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs have the inputs and K/V of a whole chunk at fixed places: history is written past them, and they go on.

    The second chunk brings a new prompt; the third sees what that one left. Without the option it is another world.
    """
    recorder = TapeRecorder()
    captured, plain = Worker(recorder, recache_on_prompt=True), Worker(None, recache_on_prompt=True)

    def play(worker: Worker, name: str) -> list[np.ndarray]:
        worker.open(name, 3)
        return [worker.chunk(name, index, keys(index, "wd"[index % 2]), prompt=prompt) for index, prompt in SWITCH]

    got, want = play(captured, "a"), play(plain, "a")
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-3)
    seen, expected = history_kv(captured.cache, "a"), history_kv(plain.cache, "a")
    assert seen.keys() == expected.keys()
    for place, pair in seen.items():
        torch.testing.assert_close(pair, expected[place], atol=1e-3, rtol=1e-3)
    assert len(recorder.tapes) == NUM_FORMS
    monkeypatch.setattr(plain.adapter, "_history", None)
    kept = play(plain, "b")
    np.testing.assert_array_equal(kept[0], want[0])
    assert all(float(np.abs(ours - theirs).max()) > 0.01 for ours, theirs in zip(kept[1:], want[1:], strict=True))


def test_what_is_captured_is_planned_for_and_shown(adapter: LingBotAdapter) -> None:
    worker = Worker(TapeRecorder(10.0, 1.0, 10.0, 9.9))
    shown = worker.adapter.spec.attention_backend.removeprefix(adapter.spec.attention_backend)
    assert shown == (
        "; graphs a step (10.00 ms plain, 1.00 ms in a graph), not clean history (10.00 ms plain, 9.90 ms in a graph)"
    )
    worker.adapter._acceleration = replace(worker.adapter._acceleration, graph_attention="triton")
    assert worker.adapter.spec.attention_backend.endswith("9.90 ms in a graph), which attend with triton")
    forward = worker.adapter._graphs
    assert isinstance(forward, CapturedForward)
    planned_bytes = worker.adapter.kv_spec().worker_owned_bytes - adapter.kv_spec().worker_owned_bytes
    inputs_bytes = sum(tensor.nbytes for tensor in tensors_of(forward._inputs))
    assert inputs_bytes < forward.num_bytes <= planned_bytes


def test_graphs_that_gain_nothing_hold_nothing() -> None:
    worker = Worker(TapeRecorder(10.0, 10.0))
    forward = worker.adapter._graphs
    assert isinstance(forward, CapturedForward)
    assert (forward.num_bytes, forward._inputs) == (0, None)
    worker.open("a", 1)
    got = worker.chunk("a", 0)
    worker.runtime.reset(reset_session("a"), None)
    worker.adapter.serve_with("off")
    np.testing.assert_array_equal(got, worker.chunk("a", 0))
    worker.adapter.serve_with(forward)
    assert worker.adapter.spec.attention_backend.count("not ") == NUM_FORMS


def test_inputs_of_another_chunk_are_refused(adapter: LingBotAdapter) -> None:
    forward = captured_forward(adapter, TapeRecorder())
    cache = cache_of(adapter)
    cache.open("a")
    config = adapter._transformer.config
    condition = torch.zeros(config.in_channels - config.out_channels, 3, 4, 6)
    rays = torch.zeros(18, config.width)
    with torch.inference_mode(), cache.lease(SessionId("a")) as lease:
        inputs = forward.chunk_inputs(condition, rays, 0)
        assert forward.chunk_inputs(condition, rays, 3) is inputs
        strange = adapter._transformer.chunk_inputs(condition, rays, 0)
        time = adapter._sampler._commit_time
        with pytest.raises(ValueError, match="expected the inputs that chunk_inputs gave for this chunk"):
            forward.flow(torch.zeros(config.out_channels, 3, 4, 6), time, strange, lease.begin_chunk())
        with pytest.raises(ValueError, match=r"condition_features: expected \(18, \d+\), got \(12, \d+\)"):
            forward.chunk_inputs(condition[:, :2], rays, 0)


@pytest.mark.parametrize("keeps_camera", [True, False])
def test_inputs_written_to_a_place_are_those_that_are_made_new(
    adapter: LingBotAdapter, keeps_camera: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapter._transformer
    monkeypatch.setattr(model, "keeps_camera", keeps_camera)
    forward = captured_forward(adapter, TapeRecorder())
    config = model.config
    rng = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for first in (0, 3, 30):
            condition = torch.randn(config.in_channels - config.out_channels, 3, 4, 6, generator=rng)
            rays = torch.randn(18, config.width, generator=rng)
            got, want = forward.chunk_inputs(condition, rays, first), model.chunk_inputs(condition, rays, first)
            assert len(got.camera) == (config.num_layers if keeps_camera else 0)
            for ours, theirs in zip(tensors_of(got), tensors_of(want), strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)


def test_graphs_that_can_not_be_had_are_said_or_stop_the_start(
    adapter: LingBotAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv: KVSpec = adapter.kv_spec()

    def ask(choice: GraphChoice) -> CapturedForward | str:
        options = LingBotOptions(graphs=choice)
        return capture(adapter._acceleration, adapter._transformer, options, kv, merges_padding=True)

    assert ask(GraphChoice.OFF) == "off"
    assert ask(GraphChoice.AUTO) == "they need a CUDA device, the model is on 'cpu'"
    with pytest.raises(LoadFailed, match="graphs 'on' can't be had: they need a CUDA device") as failed:
        ask(GraphChoice.ON)
    assert failed.value.field == "graphs"
    given = (adapter._transformer.config, LingBotOptions(graphs=GraphChoice.ON), adapter._transformer.plan)
    with pytest.raises(LoadFailed, match="can't be had: they need a CUDA device"):
        check_choices(*given, torch.device("cpu"), kv)
    with pytest.raises(LoadFailed, match="can't be had: weights that are streamed"):
        check_choices(*given, torch.device("cpu"), kv, streams=True)
    monkeypatch.setattr("worldmodel.lingbot.acceleration.is_streamed", lambda _: True)
    assert ask(GraphChoice.AUTO) == "weights that are streamed come between the layers of a forward"
