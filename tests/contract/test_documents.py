"""The checked-in documents are what the code says, and say it in valid JSON Schema, AsyncAPI and OpenAPI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import schemathesis
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from server import rest, robot_rest
from server.documents import __main__ as command
from server.documents import wire_messages
from server.documents.typescript import CONTROLS_OF, control_type_name, typescript_document
from server.documents.wire_messages import WireMessage, references
from server.wire import messages
from server.wire.robot_arrays import unpack_message
from server.wire.robot_messages import (
    RobotConfig,
    RobotForm,
    StepAnswer,
    config_map,
    error_reply,
    pack_actions,
    pack_step_answer,
    reset_reply,
    unsupported_reply,
)
from server.wire.robot_msgpack import unpack
from worldmodel import catalog

ROOT = Path(__file__).resolve().parents[2]
WORLD = (*wire_messages.client_messages(), *wire_messages.server_messages(), wire_messages.chunk_message())
ASYNCAPI: dict[str, Any] = json.loads((ROOT / "docs/asyncapi.json").read_text(encoding="utf-8"))
OPENAPI: dict[str, Any] = json.loads((ROOT / "docs/openapi.json").read_text(encoding="utf-8"))


def test_checked_in_files_are_up_to_date() -> None:
    assert command.find_drift(ROOT) == (), "run `python -m server.documents`"


def test_check_reports_changed_missing_and_stale_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--root", str(tmp_path)]
    assert command.main(arguments) == 1
    assert "expected the root of the repository" in capsys.readouterr().err
    (tmp_path / "docs").mkdir()
    (tmp_path / command.PROTOCOL).write_bytes((ROOT / command.PROTOCOL).read_bytes())
    assert command.main([*arguments, "--check"]) == 1
    assert command.main(arguments) == 0
    assert command.main([*arguments, "--check"]) == 0
    (tmp_path / "docs/schemas/ping.json").write_text("{}", encoding="utf-8")
    (tmp_path / "docs/schemas/pong.json").unlink()
    (tmp_path / "docs/schemas/gone.json").write_text("{}", encoding="utf-8")
    capsys.readouterr()
    assert command.main([*arguments, "--check"]) == 1
    wanted = "docs/schemas/gone.json, docs/schemas/ping.json, docs/schemas/pong.json"
    assert wanted in capsys.readouterr().err
    assert command.main(arguments) == 0
    assert command.find_drift(tmp_path) == ()


# ---------------------------------------------------------------- JSON Schemas


def test_every_message_has_a_file_of_its_own() -> None:
    models = {*get_args(messages.ClientMessage), *get_args(messages.ServerMessage), messages.ChunkHeader}
    assert {message.model for message in WORLD} == models
    assert len({message.name for message in WORLD}) == len(models)


@pytest.mark.parametrize("message", WORLD, ids=lambda message: message.name)
def test_schemas_are_closed_and_ask_for_the_type(message: WireMessage) -> None:
    schema = json.loads((ROOT / "docs" / message.schema_path).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    assert "type" in schema["required"]
    assert not Draft202012Validator(schema).is_valid({})


def test_what_the_server_sends_fits_what_the_schemas_require() -> None:
    """The server leaves out what is null in chunk headers only."""
    header = messages.ChunkHeader(kind="init", session_id="s", epoch=1, run=0, timescale=1)
    said = messages.ErrorMessage(code="bad_json", message="no JSON")
    by_model = {message.model: wire_messages.message_schema(message) for message in WORLD}
    Draft202012Validator(by_model[messages.ErrorMessage]).validate(json.loads(said.model_dump_json()))
    sent = json.loads(header.model_dump_json(exclude_none=True))
    Draft202012Validator(by_model[messages.ChunkHeader]).validate(sent)
    del sent["applied"]
    assert not Draft202012Validator(by_model[messages.ChunkHeader]).is_valid(sent)


# ---------------------------------------------------------------- AsyncAPI and OpenAPI


def pointed_at(document: dict[str, Any], reference: str) -> Any:
    """Return what a reference inside a document points at."""
    assert reference.startswith("#/"), f"{reference} leaves the document"
    found: Any = document
    for step in reference[2:].split("/"):
        found = found[step.replace("~1", "/").replace("~0", "~")]
    return found


@pytest.mark.parametrize("document", [ASYNCAPI, OPENAPI], ids=["asyncapi", "openapi"])
def test_references_have_a_target_and_components_are_used(document: dict[str, Any]) -> None:
    used = {reference["$ref"] for reference in references(document)}
    for reference in used:
        pointed_at(document, reference)
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert f"#/components/schemas/{name}" in used, f"nothing refers to {name}"


def validator(document: dict[str, Any], name: str) -> Draft202012Validator:
    """Return a validator of one schema among a document's components."""
    registry: Registry[Any] = Registry().with_resource(
        "urn:document", Resource(contents=document, specification=DRAFT202012)
    )
    return Draft202012Validator({"$ref": f"urn:document#/components/schemas/{name}"}, registry=registry)


def test_asyncapi_names_every_message_of_every_socket() -> None:
    assert ASYNCAPI["asyncapi"] == "3.0.0"
    addresses = {channel["address"] for channel in ASYNCAPI["channels"].values()}
    assert addresses == {"/v1/world", "/v1/realtime/video", "/v1/robot", "/v1/realtime/robot/openpi"}
    for dialect, received, sent in (
        ("world", wire_messages.client_messages(), (*wire_messages.server_messages(), wire_messages.chunk_message())),
        ("omni", wire_messages.omni_client_messages(), wire_messages.omni_server_messages()),
    ):
        for operation, listed in (("fromClient", received), ("toClient", sent)):
            named = {
                it["$ref"].rpartition("/")[2] for it in ASYNCAPI["operations"][f"{dialect}.{operation}"]["messages"]
            }
            assert named - {"omni.video.chunk"} == {f"{dialect}.{message.name}" for message in listed}


def asyncapi_examples() -> Iterator[tuple[str, str, Any]]:
    for key, message in ASYNCAPI["components"]["messages"].items():
        for example in message.get("examples", []):
            for part, value in example.items():
                yield key, message[part]["$ref"].rpartition("/")[2], value


def test_examples_in_asyncapi_fit_their_schemas() -> None:
    shown = set()
    for key, schema, example in asyncapi_examples():
        validator(ASYNCAPI, schema).validate(example)
        shown.add(key)
    json_messages = {key for key in ASYNCAPI["components"]["messages"] if key.startswith(("world.", "omni."))}
    assert json_messages - shown == {"omni.video.chunk"}


def robot_messages() -> Iterator[tuple[str, Any]]:
    """Yield what a robot really gets, decoded, with the name of its schema. Arrays come as openpi's maps of them."""
    config = RobotConfig(
        image_height=180,
        image_width=320,
        needs_wrist_camera=True,
        num_external_cameras=2,
        needs_stereo_camera=False,
        action_space="joint_position",
    )
    array = {"__ndarray__": True, "data": "", "dtype": "<f4", "shape": [24, 8]}
    answer = StepAnswer(
        session_id="a", run=1, step_id=2, actions=np.zeros((1, 8), np.float32), server_timing={"t": 1.0}
    )
    yield "RobotConfig", config_map(config)
    yield "RobotActions", array
    step = unpack_message(pack_step_answer(answer))
    assert isinstance(step, dict)
    yield "RobotStepAnswer", {**step, "actions": array}
    yield "RobotResetText", reset_reply(RobotForm.OFFICIAL)
    yield "RobotResetMap", unpacked(reset_reply(RobotForm.OPENPI))
    for code in ("capacity", "internal"):
        yield "RobotErrorText", error_reply(RobotForm.OFFICIAL, code, "no place")
        yield "RobotErrorMap", unpacked(error_reply(RobotForm.OPENPI, code, "no place"))
    yield "RobotUnsupported", json.loads(unsupported_reply("no robots here"))
    yield "RobotReset", {"endpoint": "reset", "session_id": None}
    yield "RobotInfer", {"prompt": "go", "step_id": 0, "observation/joint_position": [0.0], "observation/image": array}


def unpacked(message: str | bytes) -> Any:
    assert isinstance(message, bytes)
    return unpack_message(message)


def test_robot_schemas_are_those_of_the_real_messages() -> None:
    seen = set()
    for schema, message in robot_messages():
        validator(ASYNCAPI, schema).validate(message)
        seen.add(schema)
    assert seen | {"RobotArray"} == {name for name in ASYNCAPI["components"]["schemas"] if name.startswith("Robot")}
    assert not validator(ASYNCAPI, "RobotInfer").is_valid({"endpoint": "reset"})
    raw = unpack(pack_actions(np.zeros((2, 8), np.float32)))
    assert isinstance(raw, dict)
    keys = {key.decode() if isinstance(key, bytes) else key for key in raw}
    assert keys == set(ASYNCAPI["components"]["schemas"]["RobotArray"]["required"])


def test_openapi_has_every_route_and_one_shape_of_error() -> None:
    routes = {
        (route.path_format, method.lower())
        for router in (rest.router, robot_rest.router)
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    operations = {(path, method): it for path, methods in OPENAPI["paths"].items() for method, it in methods.items()}
    assert operations.keys() == routes
    assert len({operation["operationId"] for operation in operations.values()}) == len(operations)
    tags = {tag["name"] for tag in OPENAPI["tags"]}
    for operation in operations.values():
        assert set(operation["tags"]) <= tags
        (content,) = operation["responses"]["default"]["content"].values()
        assert content["schema"] == {"$ref": "#/components/schemas/RestError"}
        assert "422" not in operation["responses"]


def test_openapi_says_in_a_sentence_what_each_route_does() -> None:
    operations = [each for path in OPENAPI["paths"].values() for each in path.values()]
    for operation in operations:
        made_up = operation["operationId"].replace("_", " ").title()
        assert operation["summary"] not in (made_up, ""), operation["operationId"]
        assert len(operation["summary"]) < 120, operation["operationId"]


def test_openapi_is_valid_by_its_own_rules() -> None:
    assert OPENAPI["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(OPENAPI).validate()


# ---------------------------------------------------------------- TypeScript


def test_every_message_and_control_has_a_type() -> None:
    text = typescript_document()
    for message in WORLD:
        assert f"export interface {message.model.__name__} {{" in text
        for field in message.model.model_json_schema()["properties"]:
            assert f"\n  {field}: " in text or f"\n  {field}?: " in text
    for schema in catalog.control_schemas(CONTROLS_OF):
        assert f'"{schema}": {control_type_name(schema)};' in text


def test_every_type_that_is_named_is_declared_once() -> None:
    text = re.sub(r"/\*\*.*?\*/|//[^\n]*|\"[^\"]*\"", "", typescript_document(), flags=re.DOTALL)
    declared = re.findall(r"export (?:interface|type) (\w+)", text)
    assert len(declared) == len(set(declared))
    built_in = {"Record"}
    assert set(re.findall(r"\b[A-Z]\w+", text)) - set(declared) - built_in == set()
