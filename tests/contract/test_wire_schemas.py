"""The checked-in schemas and AsyncAPI document are what the message models say, and say it in valid JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from jsonschema import Draft202012Validator

from server.wire import export, messages

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALL_MESSAGES = (*export.client_messages(), *export.server_messages(), export.chunk_message())


def test_checked_in_files_are_up_to_date() -> None:
    assert export.find_drift(DOCS) == (), "run `python -m server.wire.export`"


def test_every_message_has_a_file_of_its_own() -> None:
    models = {*get_args(messages.ClientMessage), *get_args(messages.ServerMessage), messages.ChunkHeader}
    assert {message.model for message in ALL_MESSAGES} == models
    assert len({message.name for message in ALL_MESSAGES}) == len(models)


@pytest.mark.parametrize("message", ALL_MESSAGES, ids=lambda message: message.name)
def test_schemas_are_closed_and_ask_for_the_type(message: export.WireMessage) -> None:
    schema = json.loads((DOCS / message.schema_path).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    assert schema["additionalProperties"] is False
    assert "type" in schema["required"]
    assert not Draft202012Validator(schema).is_valid({})


def test_asyncapi_refers_to_every_schema_once_and_to_nothing_else() -> None:
    document = json.loads((DOCS / "asyncapi.json").read_text(encoding="utf-8"))
    references = [
        message.get("payload", {}).get("$ref") or message["headers"]["$ref"]
        for message in document["components"]["messages"].values()
    ]
    assert sorted(references) == sorted(message.schema_path for message in ALL_MESSAGES)
    operations = document["operations"]
    for action, expected in (("receive", export.client_messages()), ("send", export.server_messages())):
        (operation,) = [entry for entry in operations.values() if entry["action"] == action]
        named = {entry["$ref"].rpartition("/")[2] for entry in operation["messages"]}
        assert {message.name for message in expected} == named - {"chunk"}


def test_check_reports_changed_missing_and_stale_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--docs", str(tmp_path)]
    assert export.main([*arguments, "--check"]) == 1
    assert export.main(arguments) == 0
    assert export.main([*arguments, "--check"]) == 0
    (tmp_path / "schemas/ping.json").write_text("{}", encoding="utf-8")
    (tmp_path / "schemas/pong.json").unlink()
    (tmp_path / "schemas/gone.json").write_text("{}", encoding="utf-8")
    capsys.readouterr()
    assert export.main([*arguments, "--check"]) == 1
    assert "schemas/gone.json, schemas/ping.json, schemas/pong.json" in capsys.readouterr().err
    assert export.main(arguments) == 0
    assert export.find_drift(tmp_path) == ()
