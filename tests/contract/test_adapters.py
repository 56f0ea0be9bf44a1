"""One suite over every adapter: what the runtime, and so the server, may rely on. CPU, tiny models.

LingBot runs the embedded demo checkpoint at a small picture size, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import worldmodel
from kvcache.page_table import visible_latent_frames
from tests.support.fake_model import bad_event, image, keys, open_session, reset_session, start_fake, tick
from worldmodel.adapter import MediaArray, SessionOpening
from worldmodel.catalog import ENTRIES, ModelKind, lookup, options_parser, resolve
from worldmodel.errors import RequestRefused, TickRolledBack
from worldmodel.messages import ControlEvent, LoadStage, MediaFormat, StartWorker
from worldmodel.residency import allocate_cache
from worldmodel.runtime import Adapter, Runtime

ALL_OUTPUTS = (MediaFormat.YUV420, MediaFormat.RGB24, MediaFormat.LATENT)

LOAD_STAGES = {LoadStage.CHECKPOINT, LoadStage.TRANSFORMER, LoadStage.VAE, LoadStage.TEXT_ENCODER}


@dataclass(slots=True)
class Loaded:
    """An adapter that is loaded once for the module, and the stages it reported."""

    start: StartWorker
    stages: list[tuple[LoadStage, float]] = field(default_factory=list)
    adapter: Adapter | None = None

    def load(self) -> Adapter:
        if self.adapter is None:
            create_adapter = resolve(lookup(self.start.model).adapter)
            self.adapter = create_adapter(
                self.start, lambda stage, fraction, detail: self.stages.append((stage, fraction))
            )
        assert self.adapter is not None
        return self.adapter


def demo_start() -> StartWorker:
    folder = Path(str(worldmodel.__file__)).parent / "data" / "demo_world"
    return StartWorker(
        model="lingbot_world_v2",
        checkpoint=str(folder),
        width=64,
        height=32,
        fps=12,
        requested_sessions=2,
        model_options=options_parser("lingbot_world_v2")({}),
    )


LOADED = {"fake": Loaded(start_fake()), "lingbot_world_v2": Loaded(demo_start())}


@pytest.fixture(params=sorted(LOADED))
def loaded(request: pytest.FixtureRequest) -> Loaded:
    loaded = LOADED[request.param]
    loaded.load()
    return loaded


@pytest.fixture
def adapter(loaded: Loaded) -> Adapter:
    return loaded.load()


@pytest.fixture
def runtime(loaded: Loaded) -> Runtime:
    """A runtime without warm-up over the shared adapter."""
    adapter = loaded.load()
    return Runtime(adapter, allocate_cache(adapter.kv_spec(), loaded.start))


def arrays(runtime: Runtime, name: str, index: int, *events: ControlEvent) -> list[bytes]:
    _, parts = runtime.tick(tick(name, index, *events)).to_host()
    return [part.tobytes() for part in parts]


def test_every_world_model_of_the_catalog_is_here() -> None:
    assert set(LOADED) == {entry.name for entry in ENTRIES if entry.kind is ModelKind.WORLD}


def test_loading_reports_every_stage_up_to_its_end(loaded: Loaded) -> None:
    assert {stage for stage, _ in loaded.stages} == LOAD_STAGES
    assert all(0.0 <= fraction <= 1.0 for _, fraction in loaded.stages)
    for stage in LOAD_STAGES:
        fractions = [fraction for reported, fraction in loaded.stages if reported is stage]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


def test_the_two_specs_agree(adapter: Adapter) -> None:
    spec, kv = adapter.spec, adapter.kv_spec()
    assert spec.latent_frames_per_chunk == kv.latent_frames_per_chunk
    assert kv.model_owned_bytes > 0
    assert adapter.kv_spec() == kv


def test_media_have_the_shapes_that_their_formats_say(adapter: Adapter, runtime: Runtime) -> None:
    spec = adapter.spec
    runtime.open(open_session("a", outputs=ALL_OUTPUTS), image())
    for index, num_frames in enumerate([spec.first_chunk_media_frames, spec.chunk_media_frames]):
        chunk = runtime.tick(tick("a", index))
        assert chunk.committed.num_media_frames == num_frames
        hosted: tuple[MediaArray, ...] = chunk.media.to_host()
        assert tuple(media.format for media in hosted) == ALL_OUTPUTS
        yuv, rgb, latent = (media.array for media in hosted)
        assert [array.dtype for array in (yuv, rgb, latent)] == [np.uint8, np.uint8, np.float32]
        assert yuv.shape == (num_frames, spec.height * 3 // 2, spec.width)
        assert rgb.shape == (num_frames, spec.height, spec.width, 3)
        assert latent.shape[1] == spec.latent_frames_per_chunk


@pytest.mark.parametrize("output", ALL_OUTPUTS)
def test_a_session_gets_only_the_outputs_it_asked_for(runtime: Runtime, output: MediaFormat) -> None:
    runtime.open(open_session("one", outputs=(output,)), image())
    runtime.open(open_session("all", outputs=ALL_OUTPUTS), image())
    for index in range(2):
        one = arrays(runtime, "one", index)
        assert one == [arrays(runtime, "all", index)[ALL_OUTPUTS.index(output)]]


def test_equal_sessions_give_equal_chunks_and_seeds_differ(runtime: Runtime) -> None:
    runtime.open(open_session("a", seed=5), image())
    first = [arrays(runtime, "a", index, keys(index, "w")) for index in range(2)]
    runtime.open(open_session("b", seed=5), image())
    assert [arrays(runtime, "b", index, keys(index, "w")) for index in range(2)] == first
    runtime.reset(reset_session("b", seed=6), None)
    assert arrays(runtime, "b", 0, keys(0, "w")) != first[0]


def test_two_sessions_that_take_turns_equal_two_alone(runtime: Runtime) -> None:
    runtime.open(open_session("a", seed=1), image(1))
    runtime.open(open_session("b", seed=2, prompt="a beach"), image(2))
    together: dict[str, list[list[bytes]]] = {"a": [], "b": []}
    for index in range(3):
        for name, chunks in together.items():
            chunks.append(arrays(runtime, name, index, keys(index, "was"[index])))
    for reset in (reset_session("a", seed=1), reset_session("b", seed=2, prompt="a beach")):
        runtime.reset(reset, None)
        alone = [arrays(runtime, reset.session_id, index, keys(index, "was"[index])) for index in range(3)]
        assert alone == together[reset.session_id]


def test_a_reset_starts_the_same_world_again(runtime: Runtime) -> None:
    runtime.open(open_session("a"), image())
    first_run = [arrays(runtime, "a", index, keys(index, "l")) for index in range(3)]
    runtime.reset(reset_session("a"), None)
    assert [arrays(runtime, "a", index, keys(index, "l")) for index in range(3)] == first_run


def test_a_failed_commit_leaves_no_trace(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.open(open_session("a"), image())
    runtime.open(open_session("b"), image())
    for name in ("a", "b"):
        arrays(runtime, name, 0, keys(0, "w"))
    with monkeypatch.context() as patch:
        patch.setattr("kvcache.transaction.ChunkTransaction.commit", _fail)
        with pytest.raises(TickRolledBack):
            runtime.tick(tick("a", 1, keys(7, "j"), prompt="another world"))
    for index in range(1, 3):
        assert arrays(runtime, "a", index, keys(index, "d")) == arrays(runtime, "b", index, keys(index, "d"))


def test_a_control_that_can_not_be_read_is_refused_before_anything_changed(runtime: Runtime) -> None:
    runtime.open(open_session("a"), image())
    runtime.open(open_session("b"), image())
    with pytest.raises(RequestRefused) as caught:
        runtime.tick(tick("a", 0, bad_event(3), prompt="another world"))
    assert caught.value.field is not None
    # The good half of the tick is gone too, also when the prompt in force is that of a chunk before.
    for index in range(3):
        assert arrays(runtime, "a", index, keys(index, "w")) == arrays(runtime, "b", index, keys(index, "w"))
        with pytest.raises(RequestRefused):
            runtime.tick(tick("a", index + 1, keys(8, "d"), bad_event(9), prompt="another world"))


def test_every_event_of_a_tick_is_reported_in_its_chunk(adapter: Adapter, runtime: Runtime) -> None:
    runtime.open(open_session("a"), image())
    committed = runtime.tick(tick("a", 0, keys(3, "w"), keys(4), keys(9, "d"), prompt="a beach")).committed
    assert committed.applied_event_ids == (3, 4, 9)
    assert sorted(event.event_id for event in committed.applied) == [3, 4, 9]
    assert all(0 <= event.latent_frame < adapter.spec.latent_frames_per_chunk for event in committed.applied)


def test_held_keys_move_the_reported_pose_until_they_are_let_go(runtime: Runtime) -> None:
    runtime.open(open_session("a"), image())
    poses = [
        runtime.tick(tick("a", index, *events)).committed.pose
        for index, events in enumerate([(), (keys(1, "w"),), (), (keys(2),)])
    ]
    assert poses[0] == tuple(np.eye(4).ravel())
    assert all(pose is not None and len(pose) == 16 for pose in poses)
    assert poses[1] != poses[0]
    assert poses[2] != poses[1]
    assert poses[3] == poses[2]


def test_the_warm_up_reaches_a_slid_window_and_every_output(adapter: Adapter) -> None:
    kv = adapter.kv_spec()
    openings: tuple[tuple[SessionOpening, int], ...] = adapter.warm_up_openings()
    assert {output for opening, _ in openings for output in opening.outputs} == set(ALL_OUTPUTS)
    frames = max(num_chunks for _, num_chunks in openings) * kv.latent_frames_per_chunk
    assert len(visible_latent_frames(kv, frames)) < frames


def _fail(*_: object) -> None:
    raise RuntimeError("injected")
