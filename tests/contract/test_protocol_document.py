"""docs/protocol.md says what the code does: its examples parse, and it names every message, field and code."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator
from websockets.asyncio.server import ServerConnection, serve

from clients.conformance.client_check import RETURN_S
from clients.conformance.client_judge import CUT_AFTER_CHUNK
from server import config, errors, robot_rest, robot_routes
from server.documents import examples, wire_messages
from server.media.formats import create_stream_encoder
from server.wire import rest
from server.wire.binary import pack_chunk, unpack_chunk
from server.wire.messages import ChunkHeader, Limits, Pacing, SessionState, StreamFormat
from server.wire.robot_messages import RobotConfig, StepAnswer, config_map
from server.wire.robot_rest import RobotStep, read_step_arrays
from tests.support.media_chunks import part_of, yuv_chunk
from worldmodel.lingbot import control_schemas, controls, poses
from worldmodel.messages import MediaFormat

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/protocol.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
ALL_MESSAGES = (*wire_messages.client_messages(), *wire_messages.server_messages(), wire_messages.chunk_message())


def section(heading: str) -> str:
    return examples.section(TEXT, heading)


def message_examples(message: wire_messages.WireMessage) -> list[str]:
    return examples.fenced(section(f"`{message.name}`"), "json")


@pytest.mark.parametrize("message", ALL_MESSAGES, ids=lambda message: message.name)
def test_examples_of_a_message_parse_and_fit_its_schema(message: wire_messages.WireMessage) -> None:
    shown = message_examples(message)
    assert shown, f"no example of {message.name}"
    validator = Draft202012Validator(wire_messages.message_schema(message))
    for example in shown:
        message.model.model_validate_json(example)
        validator.validate(json.loads(example))


@pytest.mark.parametrize("message", ALL_MESSAGES, ids=lambda message: message.name)
def test_every_field_of_a_message_is_named_in_its_section(message: wire_messages.WireMessage) -> None:
    prose = examples.prose(section(f"`{message.name}`"))
    in_examples: set[str] = set()
    for example in message_examples(message):
        in_examples |= json.loads(example).keys()
    fields = {field.alias or name for name, field in message.model.model_fields.items()} - {"type"}
    unnamed = {field for field in fields if f"`{field}`" not in prose and field not in in_examples}
    assert not unnamed


@pytest.mark.parametrize("message", wire_messages.client_messages(), ids=lambda message: message.name)
def test_the_table_of_a_message_says_which_fields_are_required(message: wire_messages.WireMessage) -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) ?\| .* \|$", section(f"`{message.name}`"), re.MULTILINE)
    required = {name for cells, mark in rows if mark == "yes" for name in re.findall(r"`(\w+)`", cells)}
    properties = wire_messages.message_schema(message)
    assert required == set(properties["required"]) - {"type"}
    defaults = {name: message.model.model_fields[name].default for name in properties["properties"]}
    told = {cells.strip("`"): mark.removeprefix("default ") for cells, mark in rows if mark.startswith("default ")}
    assert {name: default.strip("`") for name, default in told.items()} == {
        name: str(default)
        for name, default in defaults.items()
        if default is not None and name not in required | {"type"}
    }
    nullable = {name for name, field in properties["properties"].items() if {"type": "null"} in field.get("anyOf", [])}
    assert nullable == properties["properties"].keys() - required - told.keys() - {"type"}


def test_examples_together_show_every_field_that_is_not_about_one_format() -> None:
    (media,) = message_examples(wire_messages.chunk_message())
    assert ChunkHeader.model_fields.keys() - json.loads(media).keys() == {"codec", "shape", "sizes"}


def test_the_hex_dump_is_a_frame() -> None:
    (dump,) = examples.fenced(section("`chunk`"), "hexdump")
    rows = [(line[:4], line[6:53], line[55:]) for line in dump.splitlines()]
    frame = b"".join(bytes.fromhex(row[1]) for row in rows)
    assert [int(row[0], 16) for row in rows] == list(range(0, len(frame), 16))
    shown = "".join(row[2] for row in rows)
    assert shown == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in frame)
    header, payload = unpack_chunk(frame)
    assert header == ChunkHeader(kind="init", session_id="s-71c2", epoch=1, run=0, timescale=12000, codec="avc1.64000a")
    assert bytes(payload[4:]) == b"ftyp"
    assert pack_chunk(header, payload) == frame
    length = int.from_bytes(frame[:4], "big")
    assert f"has {length} bytes (`{frame[:4].hex(' ')}`)" in TEXT


@pytest.mark.parametrize("schema", sorted(control_schemas.control_schemas()))
def test_control_examples_are_accepted(schema: str) -> None:
    shown = examples.fenced(section(f"`{schema}`"), f"json control={schema}")
    assert shown
    validator = Draft202012Validator(control_schemas.control_schemas()[schema])
    (track,) = [track for track, schemas in controls.SCHEMAS.items() if schema in schemas]
    for example in shown:
        controls.parse_control(track, schema, json.loads(example))
        validator.validate(json.loads(example))


def test_controls_inside_the_event_examples_are_accepted() -> None:
    (event,) = [message for message in ALL_MESSAGES if message.name == "session.event"]
    steering = [control for example in message_examples(event) for control in json.loads(example).get("controls", [])]
    assert steering
    for control in steering:
        controls.parse_control(control["track"], control["schema"], control["data"])


def test_error_codes_are_those_of_the_server() -> None:
    documented = {}
    for line in section("Error codes").splitlines():
        if line.startswith("| `"):
            code, retry, close, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            assert meaning
            documented[code.strip("`")] = (retry == "yes", int(close) if close else None)
    assert documented == {str(code): (kind.retryable, kind.close_code) for code, kind in errors.KINDS.items()}


def test_fatal_means_closed() -> None:
    assert all(kind.fatal == (kind.close_code is not None) for kind in errors.KINDS.values())


def test_close_codes_are_those_of_the_server() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d{4}) \|", section("Close codes"), re.MULTILINE)}
    used = {value for name, value in vars(errors.CloseCode).items() if name.isupper()}
    assert documented == used


@pytest.mark.parametrize(
    ("heading", "values"),
    [("Formats", StreamFormat), ("Pacing", Pacing), ("`session.state`", SessionState)],
    ids=["formats", "pacing", "states"],
)
def test_every_word_of_a_choice_is_explained(
    heading: str, values: type[StreamFormat] | type[Pacing] | type[SessionState]
) -> None:
    tables = [part for part in section(heading).split("\n\n") if not part.startswith("| field |")]
    first_cells = " ".join(re.findall(r"^\| (.*?) \|", "\n".join(tables), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == {str(value) for value in values}


def test_links_inside_the_page_have_a_target() -> None:
    headings = re.findall(r"^#+ (.*)$", examples.prose(TEXT), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


# ---------------------------------------------------------------- robots


def test_the_step_of_a_robot_is_accepted() -> None:
    (example,) = examples.fenced(section("REST for reinforcement learning"), "json robot=step")
    step = RobotStep.model_validate_json(example)
    assert json.loads(example).keys() == RobotStep.model_fields.keys()
    assert read_step_arrays(step)["observation/wrist_image_left"].shape == (1, 2, 3)


def test_robot_addresses_and_requests_are_those_of_the_server() -> None:
    text = section("Robots")
    assert set(re.findall(r"`ws://HOST:PORT(/[\w/]*)`", text)) == set(robot_routes.ADDRESSES)
    routes = {
        f"{method} {route.path_format}"
        for route in robot_rest.router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    documented = re.findall(r"`((?:GET|POST|DELETE) [^`]+)`", section("REST for reinforcement learning"))
    assert {request.replace("{id}", "{session_id}") for request in documented} == routes


def test_the_config_map_and_the_answer_of_a_robot_are_whole() -> None:
    text = section("Frames")
    robot = RobotConfig(
        image_height=1,
        image_width=1,
        needs_wrist_camera=True,
        num_external_cameras=1,
        needs_stereo_camera=False,
        action_space="x",
    )
    answer = {field.name for field in fields(StepAnswer)}
    assert {name for name in config_map(robot) if f"`{name}`" not in text} == set()
    assert {name for name in answer if f"`{name}`" not in text} == set()


# ---------------------------------------------------------------- the client in one page


class ScriptedServer:
    """Plays a server that sends chunk k + 1 once chunk k is reported as shown, and checks every message it gets."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self._models = {message.name: message.model for message in wire_messages.client_messages()}

    async def __call__(self, socket: ServerConnection) -> None:
        async for text in socket:
            assert isinstance(text, str)
            message = json.loads(text)
            self._models[message["type"]].model_validate_json(text)
            self.received.append(message)
            match message["type"]:
                case "session.start":
                    header = ChunkHeader(kind="init", session_id="s", epoch=1, run=0, timescale=12000)
                    await socket.send(pack_chunk(header, b"[init]"))
                    await self._send_chunk(socket, 0)
                case "session.event":
                    await socket.send(json.dumps({"type": "event.queued", "event_id": message["event_id"]}))
                case "playback":
                    await self._send_chunk(socket, message["chunk_index"] + 1)
                case "session.close":
                    return

    async def _send_chunk(self, socket: ServerConnection, chunk_index: int) -> None:
        header = ChunkHeader(
            kind="media", session_id="s", epoch=1, run=0, chunk_index=chunk_index, num_frames=12, timescale=12000
        )
        await socket.send(pack_chunk(header, f"[{chunk_index}]".encode()))


async def test_the_client_in_one_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = examples.fenced(section("A client in one page"), "python")
    body, _, call = source.rpartition("asyncio.run(main())")
    assert not call.strip()
    scripted = ScriptedServer()
    async with serve(scripted, "127.0.0.1", 0) as server:
        host, port = next(iter(server.sockets)).getsockname()[:2]
        namespace: dict[str, Any] = {}
        exec(compile(body, str(DOCUMENT), "exec"), namespace)
        namespace["URL"] = f"ws://{host}:{port}/v1/world"
        monkeypatch.chdir(tmp_path)
        await namespace["main"]()
    assert (tmp_path / "walk.mp4").read_bytes() == b"[init][0][1][2][3][4]"
    types = [message["type"] for message in scripted.received]
    assert types == ["session.start", "session.event", *["playback"] * 4, "session.close"]
    (control,) = scripted.received[1]["controls"]
    controls.parse_control(control["track"], control["schema"], control["data"])


# ---------------------------------------------------------------- facts told in passing


def test_examples_of_the_http_interface_fit_their_models() -> None:
    found = re.findall(r"^```json http=(\w+)\n(.*?)^```$", section("HTTP interface"), re.MULTILINE | re.DOTALL)
    assert {name for name, _ in found} == {"ServerInfo", "UploadCreated", "SessionCreated", "RestError"}
    for name, example in found:
        model = vars(rest)[name]
        model.model_validate_json(example)
        optional = {"field"} if name == "RestError" else set()
        assert set(model.model_fields) - set(json.loads(example)) <= optional


def test_http_statuses_are_those_of_the_server() -> None:
    rows = re.findall(r"^\| ((?:\d{3}(?:, )?)+) \| (`.*) \|$", section("HTTP interface"), re.MULTILINE)
    assert rows
    for statuses, codes in rows:
        for code in re.findall(r"`(\w+)`", codes):
            assert str(errors.KINDS[errors.ErrorCode(code)].http_status) in statuses.split(", "), code


def test_defaults_in_the_table_of_times_are_those_of_the_configuration() -> None:
    text = section("Times and limits")
    session, limits = config.SessionSection(), config.LimitsSection()
    wanted = {
        "start_timeout_s": f"{session.start_timeout_s:g} s",
        "stall_timeout_s": f"{session.stall_timeout_s:g} s",
        "resume_s": f"{session.resume_s:g} s",
        "idle_s": "no limit",
        "max_session_s": "no limit",
        "tick_timeout_s": f"{session.tick_timeout_s:g} s",
        "lead_chunks": f"{session.lead_chunks}",
        "max_pending_events": f"{session.max_pending_events}",
        "max_prompt_chars": f"{limits.max_prompt_chars} characters",
        "max_image_bytes": f"{limits.max_image_bytes // 2**20} MiB",
        "max_image_pixels": f"{limits.max_image_pixels // 10**6} million",
        "max_events_per_second": f"{limits.max_events_per_second:g} a second",
        "max_messages_per_second": f"{limits.max_messages_per_second:g} a second",
        "max_fragments": f"{limits.max_fragments}",
        "max_control_frames_per_second": f"{limits.max_control_frames_per_second:g} a second",
        "max_connections": f"{limits.max_connections}",
        "max_connections_per_token": "no limit",
        "max_message_bytes": f"{limits.max_message_bytes // 2**20} MiB",
        "max_json_depth": f"{limits.max_json_depth}",
        "max_json_parts": f"{limits.max_json_parts}",
        "body_timeout_s": f"{limits.body_timeout_s:g} s",
        "max_bodies_bytes": f"{limits.max_bodies_bytes // 2**20} MiB",
    }
    assert session.idle_s is None
    assert session.max_session_s is None
    assert limits.max_connections_per_token is None
    starred = set(re.findall(r"`limits\.(\w+)`\)\*", text))
    assert starred == set(Limits.model_fields)
    assert starred <= wanted.keys()
    for name, value in wanted.items():
        (row,) = [line for line in text.splitlines() if f"{name}`)" in line]
        assert row.split("|")[2].strip().startswith(value), row


def test_the_judge_of_clients_does_what_is_said() -> None:
    text = " ".join(section("Check what you wrote").split())
    assert f"cuts its link once, behind chunk {CUT_AFTER_CHUNK}." in text
    assert f"come back within {RETURN_S:g} seconds" in text


def test_one_key_moves_as_far_as_is_said() -> None:
    text = section("`lingbot.camera_actions.v1`")
    steps = (poses.YAW_STEP_RAD, poses.PITCH_STEP_RAD, poses.MAX_PITCH_RAD)
    yaw, pitch, most = (round(math.degrees(step)) for step in steps)
    assert f"by {poses.STEP:g}, turns it by {yaw} degrees, or tilts it by {pitch} degrees (up to {most})" in text


def test_the_payload_of_h264_begins_as_is_shown() -> None:
    """The rows of the dump are the bytes of a chunk of 64x48 made by the server's own encoder."""
    encoder = create_stream_encoder(StreamFormat.H264, width=64, height=48, fps=12, media=config.MediaSection())
    parts, payload = part_of(yuv_chunk(width=64, height=48, num_frames=4, first_frame=0), MediaFormat.YUV420)
    samples = encoder.encode(parts, payload, 4).samples
    encoder.close()
    shown = re.findall(r"(?<=  )((?:[0-9a-f]{2} )+)", section("Formats"))
    first = [bytes.fromhex(row) for row in shown]
    assert all(row in samples[0] for row in first[:3])
    assert samples[0].startswith(first[0])
    assert samples[1].startswith(first[3])
    assert f'"sizes": {[len(sample) for sample in samples]}' in section("Formats")
