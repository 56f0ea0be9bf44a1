"""The adapter at its smallest useful size, through a real K/V cache.

Facts, loading and text come from the demo checkpoint; what any weights show is shown with the golden ones, which are
faster.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import worldmodel
from kvcache.cache import KVCache
from tests.support.lingbot_tiny import tiny_adapter
from worldmodel.adapter import GeneratedChunk, SessionOpening
from worldmodel.errors import LoadFailed, RequestRefused
from worldmodel.lingbot.adapter import LingBotAdapter, create_adapter
from worldmodel.lingbot.config import parse_options
from worldmodel.lingbot.state import LingBotState
from worldmodel.lingbot.transformer import TEXT_STORE
from worldmodel.messages import (
    AppliedEvent,
    Control,
    ControlEvent,
    LoadStage,
    MediaFormat,
    RequestId,
    SessionId,
    StartWorker,
    Tick,
)

DEMO = Path(worldmodel.__file__).parent / "data" / "demo_world"
WIDTH, HEIGHT = 48, 32
FRAMES = 3
SEED = 11
PROMPT = "a small town, day"
OTHER_PROMPT = "the town in night"
ALL_OUTPUTS = (MediaFormat.LATENT, MediaFormat.YUV420, MediaFormat.RGB24)


def start_worker(**changes: Any) -> StartWorker:
    config = StartWorker(
        model="lingbot_world_v2",
        checkpoint=str(DEMO),
        width=WIDTH,
        height=HEIGHT,
        fps=12,
        requested_sessions=2,
    )
    return replace(config, **changes)


def no_progress(stage: LoadStage, fraction: float, detail: str) -> None:
    assert 0.0 <= fraction <= 1.0, (stage, detail)


@pytest.fixture(scope="module")
def adapter() -> LingBotAdapter:
    return create_adapter(start_worker(), no_progress)


@pytest.fixture(scope="module")
def tiny() -> LingBotAdapter:
    return tiny_adapter()


def image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def held(event_id: int, *keys: str) -> ControlEvent:
    data = json.dumps({"mode": "state", "held": list(keys)}).encode()
    return ControlEvent(
        event_id=event_id, controls=(Control(track="camera", schema="lingbot.camera_actions.v1", data=data),)
    )


class Session:
    """What the runtime does with one session: lease, generate, then commit and replace the state, or roll back."""

    def __init__(
        self,
        adapter: LingBotAdapter,
        cache: KVCache | None = None,
        name: str = "s",
        *,
        seed: int = SEED,
        prompt: str = PROMPT,
        outputs: tuple[MediaFormat, ...] = (MediaFormat.LATENT,),
    ) -> None:
        self.adapter = adapter
        self.cache = cache or new_cache(adapter)
        self.name = name
        self.cache.open(name)
        self.index = 0
        self.state = adapter.open_state(SessionOpening(prompt=prompt, seed=seed, image=image(), outputs=outputs))

    def tick(
        self, events: Sequence[ControlEvent] = (), *, prompt: str | None = None, commit: bool = True
    ) -> GeneratedChunk[LingBotState]:
        tick = Tick(
            request_id=RequestId(f"r{self.index}"),
            session_id=SessionId(self.name),
            chunk_index=self.index,
            prompt=prompt,
            events=tuple(events),
        )
        with self.cache.lease(self.name) as lease:
            chunk = lease.begin_chunk()
            result = self.adapter.generate(tick, self.state, chunk)
            if commit:
                chunk.commit()
                self.state = result.state
                self.index += 1
        return result

    def latents(self, events: Sequence[ControlEvent] = (), *, prompt: str | None = None) -> np.ndarray:
        return latents_of(self.tick(events, prompt=prompt))

    def text_keys(self) -> torch.Tensor | None:
        """Return the committed text keys [rows, heads, head size] of the first layer."""
        with self.cache.lease(self.name) as lease:
            store = lease.begin_chunk().cross_store(TEXT_STORE)
            return store.read(0)[0].clone() if store.is_filled else None


def new_cache(adapter: LingBotAdapter, capacity: int = 2) -> KVCache:
    return KVCache(adapter.kv_spec(), capacity=capacity, device="cpu", dtype=torch.float32)


def latents_of(result: GeneratedChunk[LingBotState]) -> np.ndarray:
    by_format = {part.format: part.array for part in result.media.to_host()}
    return np.asarray(by_format[MediaFormat.LATENT])


# ---------------------------------------------------------------- facts


def test_the_spec_comes_from_the_checkpoint(adapter: LingBotAdapter) -> None:
    config = json.loads((DEMO / "transformer" / "config.json").read_text())
    spec, kv_spec = adapter.spec, adapter.kv_spec()
    assert (spec.width, spec.height, spec.fps) == (WIDTH, HEIGHT, 12)
    assert (spec.latent_frames_per_chunk, spec.first_chunk_media_frames, spec.chunk_media_frames) == (FRAMES, 9, 12)
    assert (spec.sampler, spec.noise_layout, spec.precision) == ("nominal", "per_chunk", "fp32")
    assert spec.parameters > 13_000_000
    assert kv_spec.num_layers == config["num_layers"]
    assert kv_spec.sink_latent_frames == config["sink_size"]
    assert kv_spec.window_latent_frames == config["sliding_window_num_frames"] - config["sink_size"]
    assert kv_spec.tokens_per_latent_frame == (WIDTH // 16) * (HEIGHT // 16)
    assert kv_spec.requested_sessions == 2


def test_the_declared_bytes_cover_the_committed_state_and_the_one_in_flight(adapter: LingBotAdapter) -> None:
    session = Session(adapter, outputs=ALL_OUTPUTS)
    for _ in range(2):
        session.tick()
        assert session.state.decoder_cache is not None
        cached_bytes = session.state.decoder_cache.num_bytes + session.state.condition.num_bytes
        assert adapter.kv_spec().model_owned_bytes >= cached_bytes
        assert adapter.kv_spec().worker_owned_bytes >= cached_bytes


def test_loading_is_reported_stage_by_stage() -> None:
    seen: list[tuple[LoadStage, float]] = []
    create_adapter(start_worker(), lambda stage, fraction, detail: seen.append((stage, fraction)))
    stages = list(dict.fromkeys(stage for stage, _ in seen))
    assert stages == [LoadStage.CHECKPOINT, LoadStage.TRANSFORMER, LoadStage.VAE, LoadStage.TEXT_ENCODER]
    for stage in stages:
        fractions = [fraction for seen_stage, fraction in seen if seen_stage is stage]
        assert fractions == sorted(fractions)
        assert fractions[-1] == pytest.approx(1.0)


# ---------------------------------------------------------------- media


def test_a_chunk_has_9_frames_first_and_12_later_in_every_format(adapter: LingBotAdapter) -> None:
    session = Session(adapter, outputs=ALL_OUTPUTS)
    for num_media_frames in (9, 12):
        result = session.tick()
        parts = result.media.to_host()
        assert result.num_media_frames == num_media_frames
        assert tuple(part.format for part in parts) == ALL_OUTPUTS
        latent, yuv, rgb = (part.array for part in parts)
        assert (latent.dtype, latent.shape) == (np.float32, (16, FRAMES, HEIGHT // 8, WIDTH // 8))
        assert (yuv.dtype, yuv.shape) == (np.uint8, (num_media_frames, HEIGHT * 3 // 2, WIDTH))
        assert (rgb.dtype, rgb.shape) == (np.uint8, (num_media_frames, HEIGHT, WIDTH, 3))


def test_latents_alone_are_not_decoded(tiny: LingBotAdapter) -> None:
    session = Session(tiny)
    assert session.tick().num_media_frames == 9
    assert session.state.decoder_cache is None


def test_outputs_do_not_change_the_latents(tiny: LingBotAdapter) -> None:
    plain, full = Session(tiny), Session(tiny, outputs=ALL_OUTPUTS)
    for _ in range(2):
        assert np.array_equal(plain.latents(), full.latents())


# ---------------------------------------------------------------- reproducibility and transactions


def test_the_same_seed_and_events_give_the_same_latents_whatever_other_sessions_do(tiny: LingBotAdapter) -> None:
    events = [[held(1, "w")], [], [held(2, "j"), held(3)]]
    alone = Session(tiny)
    expected = [alone.latents(now) for now in events]
    cache = new_cache(tiny)
    other = Session(tiny, cache, "other", seed=99, prompt=OTHER_PROMPT)
    same = Session(tiny, cache, "same")
    for now, want in zip(events, expected, strict=True):
        other.tick([held(1, "s")])
        assert np.array_equal(same.latents(now), want)


def test_another_seed_gives_other_latents(tiny: LingBotAdapter) -> None:
    assert not np.array_equal(Session(tiny).latents(), Session(tiny, seed=SEED + 1).latents())


def test_a_tick_that_is_dropped_leaves_nothing_behind(tiny: LingBotAdapter) -> None:
    """Also with a slid window, where the dropped chunk wrote over frames that were being evicted."""
    straight, interrupted = Session(tiny), Session(tiny)
    for index in range(6):
        events = [held(index, "w")] if index == 1 else []
        interrupted.tick([held(50, "a", "k")], prompt=OTHER_PROMPT, commit=False)
        assert np.array_equal(interrupted.latents(events), straight.latents(events)), f"chunk {index}"


def test_events_steer_and_are_reported_with_the_pose(adapter: LingBotAdapter) -> None:
    still, walking = Session(adapter), Session(adapter)
    resting = still.tick()
    result = walking.tick([held(7, "w")])
    assert result.applied == (AppliedEvent(event_id=7, latent_frame=0),)
    assert result.pose is not None
    assert resting.pose is not None
    assert np.reshape(result.pose, (4, 4))[2, 3] == pytest.approx(0.15, abs=1e-6)
    assert np.array_equal(np.reshape(resting.pose, (4, 4)), np.eye(4))
    assert not np.array_equal(latents_of(result), latents_of(resting))


def test_a_bad_control_is_refused_before_anything_is_staged(tiny: LingBotAdapter) -> None:
    session = Session(tiny)
    bad = Control(track="camera", schema="lingbot.camera_actions.v1", data=b'{"mode":"fly"}')
    with pytest.raises(RequestRefused):
        session.tick([ControlEvent(event_id=1, controls=(bad,))], prompt=OTHER_PROMPT)
    assert session.text_keys() is None
    assert np.array_equal(session.latents(), Session(tiny).latents())


# ---------------------------------------------------------------- prompts


def test_a_prompt_switch_replaces_the_text_and_keeps_history(adapter: LingBotAdapter) -> None:
    session, unchanged, fresh = Session(adapter), Session(adapter), Session(adapter, prompt=OTHER_PROMPT)
    for each in (session, unchanged, fresh):
        each.tick()
    old_keys, new_keys = session.text_keys(), fresh.text_keys()
    assert old_keys is not None
    assert new_keys is not None
    assert not torch.equal(old_keys, new_keys)
    switched = session.latents(prompt=OTHER_PROMPT)
    keys = session.text_keys()
    assert keys is not None
    assert torch.equal(keys, new_keys)
    assert session.state.text.prompt.text == OTHER_PROMPT
    assert not np.array_equal(switched, unchanged.latents())
    # The third session had the prompt from the start: same text, other history.
    assert not np.array_equal(switched, fresh.latents())


def test_repeating_the_prompt_changes_nothing(tiny: LingBotAdapter) -> None:
    session, unchanged = Session(tiny), Session(tiny)
    for _ in range(2):
        assert np.array_equal(session.latents(prompt=PROMPT), unchanged.latents())


def test_all_text_rows_and_one_weighted_row_agree(adapter: LingBotAdapter) -> None:
    options = parse_options({"pad_text_exact": True})
    padded = Session(create_adapter(start_worker(model_options=options), no_progress))
    merged = Session(adapter)
    for _ in range(2):
        np.testing.assert_allclose(padded.latents(), merged.latents(), atol=1e-4)
    padded_keys, merged_keys = padded.text_keys(), merged.text_keys()
    assert padded_keys is not None
    assert merged_keys is not None
    assert len(padded_keys) == 512
    # A byte is a token; then the end token and the padding row.
    assert len(merged_keys) == len(PROMPT) + 2


# ---------------------------------------------------------------- reset, image


def test_a_reset_starts_over_with_the_old_image(tiny: LingBotAdapter) -> None:
    session = Session(tiny, outputs=ALL_OUTPUTS)
    first = [session.latents([held(1, "w")]), session.latents()]
    session.cache.reset(session.name)
    session.state = tiny.reset_state(session.state, prompt=PROMPT, seed=SEED, image=None)
    session.index = 0
    again = [session.latents([held(1, "w")]), session.latents()]
    assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
    assert session.state.outputs == ALL_OUTPUTS


def test_a_reset_can_bring_another_image(tiny: LingBotAdapter) -> None:
    state = Session(tiny).state
    kept = tiny.reset_state(state, prompt=PROMPT, seed=SEED, image=None)
    changed = tiny.reset_state(state, prompt=PROMPT, seed=SEED, image=image(1))
    assert torch.equal(kept.image_3HW, state.image_3HW)
    assert not torch.equal(changed.image_3HW, state.image_3HW)


def test_an_image_of_another_shape_is_refused(tiny: LingBotAdapter) -> None:
    grey = np.zeros((4, 4), dtype=np.uint8)
    with pytest.raises(RequestRefused, match="image") as caught:
        tiny.open_state(SessionOpening(prompt="", seed=0, image=grey, outputs=ALL_OUTPUTS))
    assert (caught.value.code, caught.value.field) == ("bad_image", "image")


# ---------------------------------------------------------------- warm-up


def test_warm_up_slides_the_window_and_makes_every_format(tiny: LingBotAdapter) -> None:
    cache = new_cache(tiny)
    outputs: set[MediaFormat] = set()
    slid = False
    for opening, num_chunks in tiny.warm_up_openings():
        session = Session(tiny, cache, outputs=opening.outputs, prompt=opening.prompt)
        outputs.update(opening.outputs)
        for _ in range(num_chunks):
            session.tick()
        slid |= len(cache.resident_latent_frames(session.name)) < cache.num_latent_frames(session.name)
        cache.close(session.name)
    assert slid
    assert outputs == set(ALL_OUTPUTS)
    assert cache.free_pages == cache.total_pages


# ---------------------------------------------------------------- options and refusals at load


def test_overrides_reach_the_window_and_the_sampler() -> None:
    options = {
        "sampler": "official",
        "flow_shift": 10.0,
        "sink_latent_frames": 2,
        "visible_latent_frames": 8,
        "latent_frames_per_chunk": 4,
    }
    adapter = create_adapter(start_worker(model_options=parse_options(options)), no_progress)
    kv_spec = adapter.kv_spec()
    assert (kv_spec.sink_latent_frames, kv_spec.window_latent_frames, kv_spec.latent_frames_per_chunk) == (2, 6, 4)
    assert adapter.spec.sampler == "official"
    assert adapter.spec.chunk_media_frames == 16
    session = Session(adapter)
    assert [session.tick().num_media_frames for _ in range(2)] == [13, 16]
    assert session.latents().shape[1] == 4


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(832, 480), (832, 464), (480, 832), (1280, 704)])
def test_published_picture_sizes_give_chunks_of_that_size(width: int, height: int) -> None:
    session = Session(tiny_adapter(width=width, height=height), outputs=ALL_OUTPUTS)
    for num_frames in (9, 12):
        latents, yuv, rgb = (part.array for part in session.tick([held(session.index, "w")]).media.to_host())
        assert latents.shape == (16, FRAMES, height // 8, width // 8)
        assert np.isfinite(latents).all()
        assert yuv.shape == (num_frames, height * 3 // 2, width)
        assert rgb.shape == (num_frames, height, width, 3)


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"width": 40}, "width", "multiple of 16.*40"),
        ({"height": 0}, "height", "multiple of 16.*0"),
        ({"device": "gpu"}, "device", "gpu"),
        ({"precision": "fp64"}, "precision", "fp64.*fp32, bf16, official"),
        ({"model_options": b'{"noise_layout": "official_whole_clip"}'}, "noise_clip_latent_frames", "whole clip"),
        ({"model_options": b'{"sampler": "fast"}'}, "sampler", "fast"),
        ({"model_options": b'{"sink_latent_frames": 17}'}, "sink_latent_frames", "must hold the sink and one chunk"),
        ({"checkpoint": "no/such/folder"}, None, "no/such/folder"),
    ],
)
def test_what_does_not_fit_stops_the_start_with_its_name(
    changes: dict[str, object], field: str | None, text: str
) -> None:
    with pytest.raises(LoadFailed, match=text) as caught:
        create_adapter(start_worker(**changes), no_progress)
    assert caught.value.field == field


@pytest.mark.parametrize("options", [b'{"attention": "flash3"}', b'{"layer_operations": "triton"}'])
def test_a_kernel_that_cannot_be_had_stops_the_start_before_any_weights(options: bytes) -> None:
    stages: set[LoadStage] = set()
    with pytest.raises(LoadFailed, match="CUDA device"):
        create_adapter(start_worker(model_options=options), lambda stage, fraction, detail: stages.add(stage))
    assert stages == {LoadStage.CHECKPOINT}


@pytest.mark.parametrize(
    ("component", "key", "value", "text"),
    [
        ("transformer", "num_attention_heads", 3, "wrong shapes"),
        ("transformer", "num_layers", 40, "missing tensors"),
        ("transformer", "qk_norm", "none", "qk_norm"),
        ("transformer", "sink_size", "9", "sink_size"),
        ("transformer", "in_channels", 16, "in_channels"),
        ("transformer", "text_dim", 65, "text_dim of the transformer is 65"),
        ("vae", "z_dim", 8, "latents_mean"),
        ("scheduler", "flow_shift", None, "flow_shift"),
        ("scheduler", "flow_shift", math.inf, "flow_shift must be a finite number from 0.01 to 100, got inf"),
        ("scheduler", "flow_shift", 10**400, "flow_shift must be a finite number"),
    ],
)
def test_a_checkpoint_at_odds_with_itself_is_refused(
    tmp_path: Path, component: str, key: str, value: object, text: str
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO, folder, symlinks=True)
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    file = folder / component / name
    file.chmod(0o644)
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(LoadFailed, match=text):
        create_adapter(start_worker(checkpoint=str(folder)), no_progress)


@pytest.mark.parametrize("precision", ["bf16", "official"])
def test_the_other_precision_plans_stay_near_float32(adapter: LingBotAdapter, precision: str) -> None:
    rounded = create_adapter(start_worker(precision=precision), no_progress)
    cache = KVCache(rounded.kv_spec(), capacity=1, device="cpu", dtype=torch.bfloat16)
    exact = Session(adapter).latents()
    got = Session(rounded, cache, outputs=ALL_OUTPUTS).latents()
    relative_rms = float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))
    assert 0.0 < relative_rms < 0.05
