"""Options of LingBot-World v2: defaults, round trip, refusals that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worldmodel.errors import RequestRefused
from worldmodel.lingbot.config import (
    MIN_FOCAL_PX,
    CameraScale,
    EventTiming,
    LingBotOptions,
    NoiseLayout,
    Preset,
    ReferenceIntrinsics,
    Sampler,
    parse_options,
)
from worldmodel.wan.precision_names import VaePrecision

INTRINSICS = {"width": 832, "height": 480, "fx": 500.0, "fy": 500.0, "cx": 416.0, "cy": 240.0}


def test_empty_table_gives_the_defaults() -> None:
    assert LingBotOptions.from_json(parse_options({})) == LingBotOptions()
    assert LingBotOptions.from_json(b"{}") == LingBotOptions()


def test_a_camera_root_that_is_no_folder_stops_the_load(tmp_path: Path) -> None:
    assert LingBotOptions(camera_root=str(tmp_path)).for_worker().camera_root == str(tmp_path)
    (tmp_path / "file").touch()
    for name in ("nope", "file"):
        with pytest.raises(RequestRefused, match=rf"there is no folder {tmp_path / name}") as caught:
            LingBotOptions(camera_root=str(tmp_path / name)).for_worker()
        assert caught.value.field == "camera_root"


def test_every_option_survives_the_round_trip() -> None:
    table: dict[str, object] = {
        "preset": "command",
        "sampler": "official",
        "flow_shift": 10,
        "camera_scale": "chunk_max",
        "reference_intrinsics": INTRINSICS,
        "event_timing": "within_chunk",
        "camera_root": "/srv/cameras",
        "noise_layout": "official_whole_clip",
        "noise_clip_latent_frames": 21,
        "sink_latent_frames": 6,
        "visible_latent_frames": 18,
        "latent_frames_per_chunk": 4,
        "text_cleaning": "official",
        "text_encoder": "streamed",
        "pad_text_exact": True,
        "max_trajectory_poses": 12,
        "recache_on_prompt": True,
        "attention": "torch_sdpa",
        "layer_operations": "plain",
        "graphs": "auto",
        "vae_precision": "bfloat16",
    }
    data = parse_options(table)
    options = LingBotOptions.from_json(data)
    assert set(table) == set(LingBotOptions.__dataclass_fields__)
    assert options.sampler is Sampler.OFFICIAL
    assert options.flow_shift == 10.0
    assert options.camera_scale is CameraScale.CHUNK_MAX
    assert options.recache_on_prompt
    assert options.vae_precision is VaePrecision.BFLOAT16
    assert options.noise_layout is NoiseLayout.OFFICIAL_WHOLE_CLIP
    assert options.event_timing is EventTiming.WITHIN_CHUNK
    assert (options.preset, options.noise_clip_latent_frames) == (Preset.COMMAND, 21)
    assert options.reference_intrinsics == ReferenceIntrinsics(width=832, height=480, fx=500, fy=500, cx=416, cy=240)
    assert (options.sink_latent_frames, options.visible_latent_frames, options.latent_frames_per_chunk) == (6, 18, 4)
    assert parse_options(json.loads(data)) == data


@pytest.mark.parametrize(
    ("preset", "chunk", "sink", "visible", "shift"), [("checkpoint", 3, 9, 18, 5.0), ("command", 4, 6, 18, 10.0)]
)
def test_presets_are_the_published_settings(preset: str, chunk: int, sink: int, visible: int, shift: float) -> None:
    data = parse_options({"preset": preset})
    options = LingBotOptions.from_json(data)
    frames = (options.latent_frames_per_chunk, options.sink_latent_frames, options.visible_latent_frames)
    assert (*frames, options.flow_shift) == (chunk, sink, visible, shift)
    assert parse_options(json.loads(data)) == data


def test_an_override_wins_over_the_preset() -> None:
    options = LingBotOptions.from_json(parse_options({"preset": "command", "sink_latent_frames": 3, "flow_shift": 5}))
    assert (options.sink_latent_frames, options.flow_shift, options.latent_frames_per_chunk) == (3, 5.0, 4)


@pytest.mark.parametrize(
    ("table", "field", "text"),
    [
        ({"samplr": "official"}, "samplr", "did you mean 'sampler'"),
        ({"sampler": "offical"}, "sampler", "did you mean 'official'"),
        ({"sampler": 3}, "sampler", "got 3"),
        ({"flow_shift": "5"}, "flow_shift", "got '5'"),
        ({"flow_shift": True}, "flow_shift", "got true"),
        ({"flow_shift": float("nan")}, "flow_shift", "got nan"),
        ({"flow_shift": 0}, "flow_shift", "0.01 to 100"),
        ({"camera_scale": "chunkmax"}, "camera_scale", "chunk_max"),
        ({"sink_latent_frames": 1.5}, "sink_latent_frames", "an integer"),
        ({"pad_text_exact": 1}, "pad_text_exact", "true or false"),
        ({"max_trajectory_poses": 0}, "max_trajectory_poses", "from 1"),
        ({"reference_intrinsics": [1, 2]}, "reference_intrinsics", "an object"),
        ({"reference_intrinsics": {"width": 832}}, "reference_intrinsics.height", "missing"),
        ({"reference_intrinsics": INTRINSICS | {"fx": 0}}, "reference_intrinsics.fx", "got 0"),
        (
            {"reference_intrinsics": INTRINSICS | {"fy": 0.99 * MIN_FOCAL_PX}},
            "reference_intrinsics.fy",
            "from 0.001 to 65536",
        ),
        ({"reference_intrinsics": INTRINSICS | {"f": 1}}, "reference_intrinsics.f", "unknown key"),
        ({"preset": "offical"}, "preset", "one of checkpoint, command"),
        ({"preset": "checkpoint", "visible_latent_frames": 11}, "visible_latent_frames", "at least 12"),
        ({"noise_layout": "official"}, "noise_layout", "per_chunk, official_whole_clip"),
        ({"noise_clip_latent_frames": 21}, "noise_clip_latent_frames", "together with noise_layout"),
        ({"event_timing": "late"}, "event_timing", "chunk_start"),
        ({"camera_root": "cameras"}, "camera_root", "an absolute path"),
        ({"sink_latent_frames": 9, "visible_latent_frames": 9}, "visible_latent_frames", "at least 10"),
    ],
)
def test_bad_options_are_refused_by_name(table: dict[str, object], field: str, text: str) -> None:
    with pytest.raises(RequestRefused, match=text) as caught:
        parse_options(table)
    assert caught.value.field == field
    assert caught.value.code == "bad_options"


def test_from_json_refuses_what_is_not_json() -> None:
    with pytest.raises(RequestRefused, match="expected JSON"):
        LingBotOptions.from_json(b"\xff")


def test_default_intrinsics_are_500_px_at_the_target_size_or_the_scaled_reference() -> None:
    assert LingBotOptions().default_intrinsics(160, 96) == (500.0, 500.0, 80.0, 48.0)
    reference = ReferenceIntrinsics(width=832, height=480, fx=500, fy=500, cx=416, cy=240)
    fx, fy, cx, cy = LingBotOptions(reference_intrinsics=reference).default_intrinsics(160, 96)
    assert (fx, fy, cx, cy) == pytest.approx((96.153846, 100.0, 80.0, 48.0))
