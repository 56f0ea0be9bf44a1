"""History encoded anew under another prompt, against a naive run that commits the same latents under it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvcache.cache import KVCache
from kvcache.spec import Storage
from tests.support.fake_model import image, keys
from tests.support.lingbot_golden import assert_close
from tests.support.lingbot_tiny import cache_of, history_kv, text_kv, tiny_adapter
from worldmodel.adapter import SessionOpening
from worldmodel.lingbot.adapter import LingBotAdapter
from worldmodel.lingbot.memory import plan_kv
from worldmodel.lingbot.recache import CleanFrame, split_into_parts
from worldmodel.lingbot.state import LingBotState
from worldmodel.lingbot.transformer import LingBotTransformer
from worldmodel.messages import MediaFormat, RequestId, SessionId, Tick
from worldmodel.wan.flow_scheduler import COMMIT_TIMESTEP

OLD, NEW = "a town, day", "the town in night"
TOLERANCE = 2e-5

KV = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


class Session:
    """Ticks of one session, keys changing, K/V of the switch looked at before its commit."""

    def __init__(self, adapter: LingBotAdapter, *, prompt: str = OLD) -> None:
        self.adapter, self.cache, self.index = adapter, cache_of(adapter), 0
        self.cache.open("s")
        opening = SessionOpening(prompt=prompt, seed=3, image=image(), outputs=(MediaFormat.LATENT,))
        self.state: LingBotState = adapter.open_state(opening)

    def tick(self, prompt: str | None = None, *, keep: bool = True) -> tuple[np.ndarray, KV]:
        """Run a chunk; return its latents, and the history that it saw."""
        tick = Tick(
            request_id=RequestId("r"),
            session_id=SessionId("s"),
            chunk_index=self.index,
            prompt=prompt,
            events=(keys(self.index, "wasdijkl"[self.index % 8]),),
        )
        with self.cache.lease("s") as lease:
            chunk = lease.begin_chunk()
            result = self.adapter.generate(tick, self.state, chunk)
            seen = {
                (layer, frame): tuple(x.clone() for x in chunk._bound.read_frames(layer, 0, (frame,)))
                for layer in range(self.cache.spec.num_layers)
                for frame in chunk.staged.history
            }
            if keep:
                chunk.commit()
                self.state, self.index = result.state, self.index + 1
        (latents,) = (media.array for media in result.media.to_host())
        return np.asarray(latents), seen  # type: ignore[return-value]


def naive_kv(adapter: LingBotAdapter, frames: Sequence[CleanFrame], visible: Sequence[int], prompt: str) -> KV:
    """Commit the visible frames' clean latents under a prompt, in order, in a fresh cache without a window.

    Nothing of `recache.py` is used but the cut into parts; rays take the exact route.
    """
    model: LingBotTransformer = adapter._transformer
    with torch.inference_mode():
        spec = plan_kv(model.config, adapter._vae, model.plan, width=48, height=32)
        unlimited = spec.__class__(
            **{name: getattr(spec, name) for name in spec.__dataclass_fields__}
            | {"sink_latent_frames": 0, "window_latent_frames": None, "storage": Storage.PAGES}
        )
        cache = KVCache(unlimited, capacity=1, device="cpu", dtype=torch.float32)
        cache.open("naive")
        by_frame = {frame.latent_frame: frame for frame in frames}
        result: KV = {}
        time = model.time_constants(COMMIT_TIMESTEP)
        for part in split_into_parts(visible, 3):
            run = [by_frame[frame] for frame in part]
            poses = np.stack([frame.relative_44 for frame in run])
            intrinsics = np.stack([frame.intrinsics_4 for frame in run])
            rays = adapter._camera._exact(torch.from_numpy(poses).float(), intrinsics)
            condition = torch.stack([frame.condition_CYX for frame in run], dim=1)
            inputs = model.chunk_inputs(condition, rays, part.start)
            with cache.lease("naive") as lease:
                chunk = lease.begin_chunk(len(part))
                if not chunk.cross_store("text").is_filled:
                    model.publish_text(adapter._prompts.encode(prompt).rows_LC, chunk, merge_padding=False)
                model.flow(torch.stack([frame.latent_CYX for frame in run], dim=1), time, inputs, chunk)
                for layer in range(spec.num_layers):
                    k, v = chunk._bound.read_frames(layer, 0, tuple(chunk.staged.latent_frames))
                    tokens = spec.tokens_per_latent_frame
                    pieces = zip(part, k.split(tokens), v.split(tokens), strict=True)
                    result |= {(layer, frame): (k.clone(), v.clone()) for frame, k, v in pieces}
                chunk.commit()
        return result


def assert_same_kv(got: KV, want: KV, tolerance: float) -> None:
    assert got.keys() == want.keys()
    for place, pair in got.items():
        for x, y in zip(pair, want[place], strict=True):
            assert_close(x, y, tolerance, f"layer, frame {place}")


@pytest.mark.parametrize(("sink", "visible"), [(3, 9), (2, 8), (0, 9), (1, 6)])
def test_each_chunk_sees_what_a_run_under_its_new_prompt_would_have(sink: int, visible: int) -> None:
    """Every chunk changes the prompt: behind one chunk, while the window fills, when it is full, when it has slid."""
    session = Session(tiny_adapter(sink=sink, visible=visible, recache_on_prompt=True))
    session.tick()
    for prompt in (NEW, OLD, NEW, OLD, NEW):
        frames, old = session.state.history, history_kv(session.cache, "s")
        _, seen = session.tick(prompt)
        wanted = sorted({frame for _, frame in seen})
        assert_same_kv(seen, naive_kv(session.adapter, frames, wanted, prompt), TOLERANCE)
        # Behind the first layer the prompt shows; a test in which both prompts gave the same would prove nothing.
        changes = (float((seen[place][0] - old[place][0]).abs().max()) for place in seen if place[0] > 0)
        assert max(changes) > 100 * TOLERANCE
        after = history_kv(session.cache, "s")
        kept = [place for place in after if place in seen]
        assert kept
        assert all(torch.equal(after[place][0], seen[place][0]) for place in kept)


def test_encoding_anew_under_the_same_text_gives_the_history_that_was_there() -> None:
    """Before the window slides nothing is approximated: the old prompt gives the old K/V back."""
    adapter = tiny_adapter(recache_on_prompt=True)
    session = Session(adapter)
    for _ in range(2):
        session.tick()
    before = history_kv(session.cache, "s")
    with session.cache.lease("s") as lease, torch.inference_mode():
        chunk = lease.begin_chunk()
        assert adapter._history is not None
        adapter._history.encode(session.state.history, chunk)
        after = {
            place: tuple(x.clone() for x in chunk._bound.read_frames(place[0], 0, (place[1],))) for place in before
        }
    assert_same_kv(after, before, TOLERANCE)  # type: ignore[arg-type]


def test_without_a_change_of_prompt_the_option_changes_nothing() -> None:
    plain, recaching = Session(tiny_adapter()), Session(tiny_adapter(recache_on_prompt=True))
    for index in range(6):
        prompt = OLD if index == 3 else None
        (latents, seen), (expected, old) = recaching.tick(prompt), plain.tick(prompt)
        assert np.array_equal(latents, expected)
        assert all(torch.equal(seen[place][0], old[place][0]) for place in old)
    assert plain.state.history == ()


def test_without_the_option_a_new_prompt_keeps_every_byte_of_history() -> None:
    session = Session(tiny_adapter())
    for _ in range(4):
        session.tick()
    before, text = history_kv(session.cache, "s"), text_kv(session.cache, "s")
    _, seen = session.tick(NEW)
    assert seen.keys() == before.keys()
    assert all(torch.equal(*pair) for place in seen for pair in zip(seen[place], before[place], strict=True))
    fresh = Session(tiny_adapter(), prompt=NEW)
    fresh.tick()
    assert [x.shape for x in text_kv(session.cache, "s")] == [x.shape for x in text_kv(fresh.cache, "s")]
    assert all(torch.equal(*pair) for pair in zip(text_kv(session.cache, "s"), text_kv(fresh.cache, "s"), strict=True))
    assert not torch.equal(text[0], text_kv(session.cache, "s")[0])


def test_a_switch_that_is_dropped_leaves_history_and_frames_as_they_were() -> None:
    session = Session(tiny_adapter(recache_on_prompt=True))
    for _ in range(4):
        session.tick()
    before, frames = history_kv(session.cache, "s"), session.state.history
    first, _ = session.tick(NEW, keep=False)
    after = history_kv(session.cache, "s")
    assert all(torch.equal(*pair) for place in before for pair in zip(after[place], before[place], strict=True))
    assert session.state.history is frames
    again, _ = session.tick(NEW)
    assert np.array_equal(first, again)


@pytest.mark.parametrize(("sink", "visible"), [(3, 9), (2, 8), (0, 9)])
def test_what_is_kept_stays_small_and_is_declared(sink: int, visible: int) -> None:
    adapter = tiny_adapter(sink=sink, visible=visible, recache_on_prompt=True)
    plain = tiny_adapter(sink=sink, visible=visible)
    session = Session(adapter)
    declared = adapter.kv_spec().model_owned_bytes - plain.kv_spec().model_owned_bytes
    for index in range(5):
        before = session.state.history
        session.tick()
        frames = {id(frame): frame for frame in (*before, *session.state.history)}.values()
        # Storage, not elements: a view would keep a whole chunk.
        storages = {
            storage.data_ptr(): storage.nbytes()
            for frame in frames
            for storage in (frame.latent_CYX.untyped_storage(), frame.condition_CYX.untyped_storage())
        }
        assert sum(storages.values()) <= declared
        held = [frame.latent_frame for frame in session.state.history]
        assert held == sorted(held)
        assert len(held) == min(3 * (index + 1), visible)
    assert sum(storages.values()) > declared // 2


@pytest.mark.parametrize(
    ("frames", "parts"),
    [
        ((), []),
        ((0, 1, 2, 3, 4, 5), [range(0, 3), range(3, 6)]),
        ((0, 1, 16, 17, 18, 19, 20), [range(0, 2), range(16, 18), range(18, 21)]),
        ((0, 2, 3), [range(0, 1), range(2, 3), range(3, 4)]),
        ((0, 1, 2, 3, 15, 16), [range(0, 3), range(3, 4), range(15, 17)]),
    ],
)
def test_parts_are_runs_of_one_chunk(frames: tuple[int, ...], parts: list[range]) -> None:
    assert split_into_parts(frames, 3) == parts
