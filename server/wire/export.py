"""Writes the JSON Schemas and the AsyncAPI document of the `world` dialect: `python -m server.wire.export [--check]`.

    docs/schemas/TYPE.json      one per message, from the models in `messages.py`
    docs/asyncapi.json          both directions of the socket; refers to the schemas

The files are checked in for people who write clients; a test fails when they are not what this module writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from server.wire import messages
from server.wire.messages import PROTOCOL_VERSION, WireModel

JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
ASYNCAPI_VERSION = "3.0.0"
CHANNEL = "world"
ADDRESS = "/v1/world"

RESUME_NAME = "session.start.resume"
"""`session.start` has two forms; the one with a resume token gets a name of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireMessage:
    """One message as documents name it. `name` is its type, except for the second form of `session.start`."""

    name: str
    model: type[WireModel]

    @property
    def schema_path(self) -> str:
        return f"schemas/{self.name}.json"

    @property
    def summary(self) -> str:
        """First paragraph of the model's docstring; empty if it has none of its own."""
        return " ".join((self.model.__doc__ or "").split("\n\n")[0].split())


def client_messages() -> tuple[WireMessage, ...]:
    return tuple(_wire_message(model) for model in get_args(messages.ClientMessage))


def server_messages() -> tuple[WireMessage, ...]:
    return tuple(_wire_message(model) for model in get_args(messages.ServerMessage))


def chunk_message() -> WireMessage:
    """The header of a binary frame."""
    return _wire_message(messages.ChunkHeader)


def message_schema(message: WireMessage) -> dict[str, Any]:
    """JSON Schema of one message. `type` is always required, though our own models fill it in."""
    schema = message.model.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    schema["required"] = required if "type" in required else ["type", *required]
    return {"$schema": JSON_SCHEMA_DIALECT, **schema}


def asyncapi_document() -> dict[str, Any]:
    """AsyncAPI document, from the server's point of view: `receive` is what clients send."""
    received, sent = client_messages(), (*server_messages(), chunk_message())
    names = [message.name for message in (*received, *sent)]
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "worldserve, dialect `world`",
            "version": str(PROTOCOL_VERSION),
            "description": "Realtime interactive worlds over one WebSocket. Read protocol.md first.",
        },
        "defaultContentType": "application/json",
        "channels": {
            CHANNEL: {
                "address": ADDRESS,
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
                "bindings": {"ws": {"method": "GET"}},
            }
        },
        "operations": {
            "fromClient": _operation("receive", received),
            "toClient": _operation("send", sent),
        },
        "components": {
            "messages": {message.name: _message_object(message) for message in (*received, *sent)},
        },
    }


def generate() -> dict[str, str]:
    """Return the text of every generated file, keyed by its path below the docs folder."""
    all_messages = (*client_messages(), *server_messages(), chunk_message())
    files = {message.schema_path: _to_text(message_schema(message)) for message in all_messages}
    return files | {"asyncapi.json": _to_text(asyncapi_document())}


def find_drift(docs: Path) -> tuple[str, ...]:
    """Return the paths below `docs` that differ from what `generate` gives, are missing, or should not be there."""
    wanted = generate()
    present = {f"schemas/{path.name}" for path in (docs / "schemas").glob("*.json")}
    differing = {name for name, text in wanted.items() if not _has_text(docs / name, text)}
    return tuple(sorted(differing | (present - set(wanted))))


def write(docs: Path) -> None:
    """Write all files below `docs` and remove schemas of messages that no longer exist."""
    (docs / "schemas").mkdir(parents=True, exist_ok=True)
    for name in find_drift(docs):
        (docs / name).unlink(missing_ok=True)
    for name, text in generate().items():
        (docs / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or with `--check` compare them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m server.wire.export", description=main.__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the files (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not up to date")
    options = parser.parse_args(arguments)
    if not options.check:
        write(options.docs)
        return 0
    drift = find_drift(options.docs)
    if drift:
        print(f"not up to date in {options.docs}: {', '.join(drift)}", file=sys.stderr)
    return 1 if drift else 0


def _wire_message(model: type[WireModel]) -> WireMessage:
    if model is messages.SessionResume:
        return WireMessage(name=RESUME_NAME, model=model)
    (name,) = get_args(model.model_fields["type"].annotation)
    return WireMessage(name=name, model=model)


def _operation(action: str, listed: Sequence[WireMessage]) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{CHANNEL}"},
        "messages": [{"$ref": f"#/channels/{CHANNEL}/messages/{message.name}"} for message in listed],
    }


def _message_object(message: WireMessage) -> dict[str, Any]:
    described = {"summary": message.summary} if message.summary else {}
    schema = {"$ref": message.schema_path}
    if message.model is messages.ChunkHeader:
        binary = {"contentType": "application/octet-stream", "payload": {"type": "string", "format": "binary"}}
        return {"name": message.name, **described, **binary, "headers": schema}
    return {"name": message.name, **described, "payload": schema}


def _to_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _has_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
