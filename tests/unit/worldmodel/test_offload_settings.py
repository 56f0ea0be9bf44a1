"""The section [offload]: what it accepts, and who refuses what it can't mean."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest

from server.config import ConfigError, WorkerSection
from server.config_reading import load_config
from worldmodel.errors import LoadFailed
from worldmodel.messages import StartWorker
from worldmodel.offload_settings import OffloadSettings
from worldmodel.runtime import Runtime

MODEL = '[model]\nname = "lingbot_world_v2"\ncheckpoint = "/c"\nwidth = 64\nheight = 64\n'


def test_weights_are_resident_by_default() -> None:
    assert not OffloadSettings().streams


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"weights": "half"}, r"offload\.weights: expected one of resident, streamed, got 'half'"),
        ({"host": "disk"}, r"offload\.host: expected one of"),
        ({"on_unavailable": "guess"}, r"offload\.on_unavailable: expected one of stop, ordinary"),
        ({"resident_bytes": -1}, r"offload\.resident_bytes: expected bytes from 0, got -1"),
        ({"registration_timeout_s": 0.0}, r"offload\.registration_timeout_s: expected seconds above 0"),
        ({"registration_timeout_s": math.nan}, r"offload\.registration_timeout_s: expected seconds above 0, got nan"),
        ({"cache_lock_timeout_s": math.inf}, r"offload\.cache_lock_timeout_s: expected seconds above 0, got inf"),
        ({"host": "runtime_cache"}, r"offload\.cache_folder: expected an absolute path"),
        ({"host": "runtime_cache", "cache_folder": "here"}, r"offload\.cache_folder: .*got 'here'"),
        (
            {"host": "runtime_cache", "cache_folder": "/a\0b"},
            r"offload\.cache_folder: expected an absolute .*'/a\\x00b'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        OffloadSettings(**settings)  # type: ignore[arg-type]


OTHER_VALUES: dict[str, object] = {
    "host": "checkpoint_mmap",
    "transfer": "staged",
    "on_unavailable": "ordinary",
    "resident_bytes": 5,
    "device_bytes": 5,
    "registered_bytes": 0,
    "registration_timeout_s": 1.0,
    "cache_folder": "/cache",
    "cache_max_bytes": 0,
    "cache_validation": "full",
    "cache_lock_timeout_s": 1.0,
    "vae": "parked",
    "camera_modulation": "per_layer",
    "decode": "per_latent_frame",
}
"""Of each setting a value that is not the default."""

FOR_ANY_WEIGHTS = ("vae", "camera_modulation", "decode")


def test_every_setting_has_another_value_here() -> None:
    assert [each.name for each in fields(OffloadSettings)] == ["weights", *OTHER_VALUES]


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_what_would_have_no_effect_is_refused_by_name(name: str) -> None:
    value = {name: OTHER_VALUES[name]}
    streamed = {"weights": "streamed", **value}
    if name in FOR_ANY_WEIGHTS:
        assert OffloadSettings(**value) != OffloadSettings(**streamed)  # type: ignore[arg-type]
    else:
        with pytest.raises(
            ValueError, match=rf"^offload\.{name}: has no effect without weights 'streamed'; expected to be left out"
        ):
            OffloadSettings(**value)  # type: ignore[arg-type]
    if name.startswith("regist"):
        OffloadSettings(**streamed)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"^offload\.{name}: has no effect without transfer 'registered'"):
            OffloadSettings(**streamed, transfer="staged")  # type: ignore[arg-type]
    if name.startswith("cache_"):
        with pytest.raises(ValueError, match=rf"^offload\.{name}: has no effect without host 'runtime_cache'"):
            OffloadSettings(**streamed)  # type: ignore[arg-type]
        OffloadSettings(**{"host": "runtime_cache", "cache_folder": "/c", **streamed})  # type: ignore[arg-type]


def test_what_another_model_does_not_know_is_refused_with_the_configuration_and_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(MODEL.replace("lingbot_world_v2", "fake") + '[offload]\nvae = "parked"\n')
    expected = r"offload\.vae: has no effect on fake; expected to be left out there, got 'parked'"

    with pytest.raises(ConfigError, match=rf"config\.toml: {expected}"):
        load_config(file, environment={})
    with pytest.raises(ConfigError, match=r"^--offload\.decode: has no effect on fake"):
        load_config(file, environment={}, flags={"offload.vae": "resident", "offload.decode": "per_latent_frame"})
    with pytest.raises(ConfigError, match=r"offload\.weights: expected 'resident' for fake, only lingbot_world_v2"):
        load_config(file, environment={}, flags={"offload.weights": "streamed"})
    start = StartWorker(model="fake", checkpoint="", width=64, height=64, fps=8, offload=OffloadSettings(vae="parked"))
    with pytest.raises(LoadFailed, match=expected):
        Runtime.load(start, lambda *_: None)


def test_nobody_is_waited_for_longer_than_a_start_may_take(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    cache = 'weights = "streamed"\nhost = "runtime_cache"\ncache_folder = "/c"\n'
    file.write_text(MODEL + f"[worker]\nstart_timeout_s = 600\n[offload]\n{cache}")
    expected = r"expected less than worker\.start_timeout_s, 600, .*got 600\.0"

    with pytest.raises(ConfigError, match=rf"config\.toml: offload\.cache_lock_timeout_s: {expected}"):
        load_config(file, environment={})
    driver = {"offload.cache_lock_timeout_s": "599", "offload.registration_timeout_s": "600"}
    with pytest.raises(ConfigError, match=rf"^--offload\.registration-timeout-s: {expected}"):
        load_config(file, environment={}, flags=driver)
    found = load_config(file, environment={}, flags={"offload.cache_lock_timeout_s": "599"})
    assert found.offload.cache_lock_timeout_s == 599
    assert OffloadSettings().cache_lock_timeout_s < WorkerSection().start_timeout_s
    file.write_text(MODEL + '[worker]\nstart_timeout_s = 60\n[offload]\nweights = "streamed"\ntransfer = "staged"\n')
    assert load_config(file, environment={}).offload.registration_timeout_s > 60


def test_a_file_a_variable_and_a_flag_set_it(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(MODEL + '[offload]\nweights = "streamed"\nresident_bytes = 5\ndevice_bytes = "none"\n')

    found = load_config(
        file, environment={"WORLDSERVE_OFFLOAD_TRANSFER": "staged"}, flags={"offload.resident_bytes": "7"}
    ).offload

    assert found == OffloadSettings(weights="streamed", transfer="staged", resident_bytes=7)


def test_a_wrong_value_is_an_error_of_where_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(MODEL + '[offload]\nweights = "half"\n')
    expected = "expected one of resident, streamed, got 'half'"
    with pytest.raises(ConfigError, match=rf"config\.toml: offload\.weights: {expected}") as found:
        load_config(file, environment={})
    assert found.value.key == "offload.weights"
    file.write_text(MODEL)
    with pytest.raises(ConfigError, match=rf"^--offload\.weights: {expected}"):
        load_config(file, environment={}, flags={"offload.weights": "half"})
    with pytest.raises(ConfigError, match=rf"^WORLDSERVE_OFFLOAD_WEIGHTS: {expected}"):
        load_config(file, environment={"WORLDSERVE_OFFLOAD_WEIGHTS": "half"})
    file.write_text(MODEL + "[offload]\nweights = 1\n")
    with pytest.raises(ConfigError, match=r"config\.toml: section \[offload\]: Expected `str`, got `int`"):
        load_config(file, environment={})


def test_a_model_that_cannot_stream_does_not_start() -> None:
    start = StartWorker(
        model="fake", checkpoint="", width=64, height=64, fps=8, offload=OffloadSettings(weights="streamed")
    )
    with pytest.raises(LoadFailed, match=r"offload\.weights: expected 'resident' for fake") as failed:
        Runtime.load(start, lambda *_: None)
    assert failed.value.field == "offload"
