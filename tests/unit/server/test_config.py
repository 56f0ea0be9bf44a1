"""The configuration is read in one place, with one precedence, and bad values name their key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.config_reading import load_config, settable_keys
from server.config_values import ConfigError
from server.errors import BadInput
from server.limits import parse_json_object
from server.package_files import bundled_config, resolve_checkpoint

MINIMAL = """
[model]
name = "fake"
checkpoint = "nowhere"
width = 160
height = 96
"""


@pytest.fixture
def write(tmp_path: Path):
    def _write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("idle_s = 0", "robot.idle_s: expected seconds above 0, got 0.0"),
        ("rest_idle_s = -1.0", "robot.rest_idle_s: expected seconds above 0, got -1.0"),
        ("max_message_bytes = 0", "robot.max_message_bytes: expected a number from 1, got 0"),
        ("max_sessions_per_connection = 0", "robot.max_sessions_per_connection: expected a number from 1, got 0"),
        ('same_session = "share"', "robot.same_session: expected one of refuse, take_over, got 'share'"),
    ],
)
def test_a_wrong_value_for_robots_is_named(write, line: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load_config(write(MINIMAL + f"[robot]\n{line}\n"), environment={})


def test_robots_may_be_silent_for_30_s_and_send_64_mib(write):
    robot = load_config(write(MINIMAL), environment={}).robot
    assert (robot.idle_s, robot.max_message_bytes, robot.same_session) == (30.0, 64 * 1024 * 1024, "refuse")


def test_json_is_not_read_deeper_than_the_stack_allows(write):
    with pytest.raises(ConfigError, match=r"limits\.max_json_depth: expected 1 to 200, got 201"):
        load_config(write(MINIMAL + "[limits]\nmax_json_depth = 201\n"), environment={})
    deepest = load_config(write(MINIMAL + "[limits]\nmax_json_depth = 200\n"), environment={}).limits
    text = '{"a":' + "[" * 199 + "NaN" + "]" * 199 + "}"
    with pytest.raises(BadInput, match="NaN is not a JSON number"):
        parse_json_object(text, max_depth=deepest.max_json_depth, max_parts=deepest.max_json_parts)


def test_flag_wins_over_environment_wins_over_file(write):
    path = write(MINIMAL + "[session]\nlead_chunks = 2\n[server]\nport = 1\n[media]\ncrf = 30\n")
    config = load_config(
        path,
        environment={"WORLDSERVE_SESSION_LEAD_CHUNKS": "3", "WORLDSERVE_SERVER_PORT": "2"},
        flags={"server.port": "5"},
    )
    assert (config.session.lead_chunks, config.server.port, config.media.crf) == (3, 5, 30)


@pytest.mark.parametrize("text", ['["t1","t2"]', "[t1,t2]", "'t1'", '"t1"', "t1 t2", "t1;t2", "tökén", "{t1}", "t1\\"])
def test_tokens_that_no_client_could_send_are_refused_unseen(write, text: str):
    with pytest.raises(ConfigError, match=r"^WORLDSERVE_SERVER_TOKENS: expected tokens .* commas between them: t1,t2$"):
        load_config(write(MINIMAL), environment={"WORLDSERVE_SERVER_TOKENS": text})
    with pytest.raises(ConfigError, match=r"config\.toml: server\.tokens: expected tokens ") as caught:
        load_config(write(MINIMAL + f"[server]\ntokens = [{text!r}]\n"), environment={})
    assert text not in str(caught.value)


def test_tokens_of_base64_are_taken(write):
    config = load_config(write(MINIMAL), environment={"WORLDSERVE_SERVER_TOKENS": "aB+/9==, a-b_c.d~e"})
    assert config.server.tokens == ("aB+/9==", "a-b_c.d~e")


def test_text_forms_of_lists_none_and_bool(write):
    config = load_config(
        write(MINIMAL),
        environment={"WORLDSERVE_SERVER_TOKENS": "a, b", "WORLDSERVE_SESSION_ALLOW_LATENTS": "true"},
        flags={"session.idle_s": "none", "worker.cpu_threads": "2"},
    )
    assert config.server.tokens == ("a", "b")
    assert config.session.allow_latents is True
    assert config.session.idle_s is None
    assert config.cpu_threads == 2


@pytest.mark.parametrize(("num_cores", "num_threads"), [(None, 1), (1, 1), (2, 1), (6, 5), (9, 8), (64, 8)])
def test_one_core_stays_free_and_eight_threads_are_enough(write, monkeypatch, num_cores, num_threads):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    assert load_config(write(MINIMAL), environment={}, flags={}).cpu_threads == num_threads


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "[sesion]\nx = 1\n", r"unknown section \[sesion\] \(did you mean 'session'\?\)"),
        (MINIMAL + "[session]\nlead_chunk = 1\n", r"unknown key session.lead_chunk \(did you mean 'lead_chunks'\?\)"),
        (MINIMAL + '[session]\nlead_chunks = "1"\n', r"\[session\].*Expected `int`, got `str`.*lead_chunks"),
        (MINIMAL + "[session]\nlead_chunks = true\n", r"Expected `int`, got `bool`"),
        (MINIMAL + "[server]\nport = 70000\n", r"server.port: expected 0 to 65535, got 70000"),
        (MINIMAL + "[media]\npreset = 'warp'\n", r"media.preset: expected one of ultrafast"),
        (MINIMAL + 'begin_image = "x"\n', r"model.begin_image: expected one of no start images, got 'x'"),
        ("[server]\nport = 1\n", r"expected a \[model\] or a \[demo\] section"),
        (MINIMAL + "[demo]\nfps = 1\n", r"\[model\] cannot stand beside it"),
        ("not toml", r"not valid TOML"),
    ],
)
def test_bad_file_names_the_key(write, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(write(text), environment={})


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        ({"WORLDSERVE_SERVER_PRT": "1"}, {}, r"WORLDSERVE_SERVER_PRT \(did you mean 'WORLDSERVE_SERVER_PORT'\?\)"),
        ({"WORLDSERVE_SERVER_PORT": "x"}, {}, r"WORLDSERVE_SERVER_PORT: expected int, got 'x'"),
        ({}, {"session.resume_s": "soon"}, r"--session.resume-s: expected float, got 'soon'"),
        ({}, {"server.port": "70000"}, r"^--server.port: expected 0 to 65535, got 70000"),
        ({"WORLDSERVE_MEDIA_CRF": "99"}, {}, r"^WORLDSERVE_MEDIA_CRF: expected 1 to 51, got 99"),
        ({}, {"session.allow_latents": "1"}, r"--session.allow-latents: expected true or false, got '1'"),
        ({}, {"server.port": "9" * 5000}, r"^--server.port: expected int, got '9{80}'$"),
        ({}, {"session.allow_latents": "1" * 500}, r"^--session.allow-latents: .* got '1{80}'$"),
    ],
)
def test_bad_override_names_where_it_came_from(write, environment, flags, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(write(MINIMAL), environment=environment, flags=flags)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e300", "9" * 30])
@pytest.mark.parametrize("key", ["server.shutdown_s", "session.stall_timeout_s", "session.idle_s", "robot.idle_s"])
def test_a_number_without_bounds_is_refused_wherever_it_comes_from(write, key: str, number: str):
    section, name = key.split(".")
    variable = f"WORLDSERVE_{section.upper()}_{name.upper()}"
    complaint = r"expected a finite number of at most 9223372036854775807, got "
    with pytest.raises(ConfigError, match=rf"^--{section}\.{name.replace('_', '-')}: {complaint}"):
        load_config(write(MINIMAL), environment={}, flags={key: number})
    with pytest.raises(ConfigError, match=f"^{variable}: {complaint}"):
        load_config(write(MINIMAL), environment={variable: number})
    path = write(MINIMAL + f"[{section}]\n{name} = {number}\n")
    with pytest.raises(ConfigError, match=rf"config\.toml: {key}: {complaint}"):
        load_config(path, environment={})


def test_a_huge_integer_is_not_repeated(write):
    with pytest.raises(ConfigError, match=r"^--limits\.max-uploads: expected a finite.* got a number of 133 bits$"):
        load_config(write(MINIMAL), environment={}, flags={"limits.max_uploads": "1" + "0" * 40})


def test_a_number_inside_an_option_is_named(write):
    text = MINIMAL + "[model.options]\nreference_intrinsics = { fx = [1.0, inf] }\n"
    with pytest.raises(ConfigError, match=r"model\.options\.reference_intrinsics\.fx\[1\]: expected a finite number"):
        load_config(write(text), environment={})


def test_none_is_no_limit_in_a_file_too(write):
    text = MINIMAL + '[robot]\nidle_s = "none"\n[recording]\nmax_bytes = "none"\n'
    config = load_config(write(text), environment={})
    assert (config.robot.idle_s, config.recording.max_bytes) == (None, None)
    with pytest.raises(ConfigError, match=r"Expected `float`, got `str`.*resume_s"):
        load_config(write(MINIMAL + '[session]\nresume_s = "none"\n'), environment={})


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("model.fps", "100000000", "model.fps: expected 1 to 1000, got 100000000"),
        ("model.width", "100000", "model.width: expected 1 to 16384, got 100000"),
        ("worker.cpu_threads", "1000000", "worker.cpu-threads: expected 1 to 4096, got 1000000"),
        ("worker.device", "cudaa", "worker.device: expected cpu, cuda or cuda:N, got 'cudaa'"),
        ("worker.device", "cuda:x", "worker.device: expected cpu, cuda or cuda:N, got 'cuda:x'"),
    ],
)
def test_a_value_that_no_worker_could_use_is_refused(write, key: str, value: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load_config(write(MINIMAL), environment={}, flags={key: value})


def test_missing_file_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent.toml: No such file"):
        load_config(tmp_path / "absent.toml", environment={})


def test_demo_section_becomes_the_model():
    config = load_config(bundled_config("demo"), environment={})
    assert config.model.name == "lingbot_world_v2"
    assert config.model.fps == 12
    assert config.model.begin_image == "day"
    assert set(config.model.options) == {"reference_intrinsics", "camera_scale"}
    names = [image.name for image in config.model.start_images]
    assert names == ["day", "night", "snow", "desert", "sunset", "autumn"]
    for image in config.model.start_images:
        assert (config.checkpoint_path / image.file).is_file()


def test_unknown_package_of_a_checkpoint_is_named():
    with pytest.raises(ConfigError, match="no package 'no_such_package'"):
        resolve_checkpoint("package:no_such_package/x")


def test_tables_cannot_be_set_by_text():
    assert "session.lead_chunks" in settable_keys()
    assert not {"model.options", "model.start_images"} & set(settable_keys())


def test_a_random_model_has_no_folder_and_stays_as_it_is():
    assert str(resolve_checkpoint("random:lingbot-world-v2:3")) == "random:lingbot-world-v2:3"
