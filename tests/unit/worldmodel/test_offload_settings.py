"""The section [offload]: what it accepts, and who refuses what it can't mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.config import ConfigError, load_config
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
        ({"host": "runtime_cache"}, r"offload\.cache_folder: expected an absolute path"),
        ({"host": "runtime_cache", "cache_folder": "here"}, r"offload\.cache_folder: .*got 'here'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        OffloadSettings(**settings)  # type: ignore[arg-type]


def test_a_file_a_variable_and_a_flag_set_it(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(MODEL + '[offload]\nweights = "streamed"\nresident_bytes = 5\ndevice_bytes = "none"\n')

    found = load_config(
        file, environment={"WORLDSERVE_OFFLOAD_TRANSFER": "staged"}, flags={"offload.resident_bytes": "7"}
    ).offload

    assert found == OffloadSettings(weights="streamed", transfer="staged", resident_bytes=7)


def test_a_wrong_word_in_a_file_is_an_error_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(MODEL + '[offload]\nweights = "half"\n')
    with pytest.raises(ConfigError, match=r"config\.toml: section \[offload\]: offload\.weights: expected one of"):
        load_config(file, environment={})


def test_a_model_that_cannot_stream_does_not_start() -> None:
    start = StartWorker(
        model="fake", checkpoint="", width=64, height=64, fps=8, offload=OffloadSettings(weights="streamed")
    )
    with pytest.raises(LoadFailed, match=r"offload\.weights: expected 'resident' for fake") as failed:
        Runtime.load(start, lambda *_: None)
    assert failed.value.field == "offload"
