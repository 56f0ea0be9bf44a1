"""The messages of the WebSocket dialects by name, and the JSON Schema of each: what all documents are made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from server.wire import messages, omni_messages
from server.wire.messages import WireModel

JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

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

    @property
    def is_binary(self) -> bool:
        """True for the header of a binary frame."""
        return self.model is messages.ChunkHeader


def client_messages() -> tuple[WireMessage, ...]:
    return _named(messages.ClientMessage)


def server_messages() -> tuple[WireMessage, ...]:
    return _named(messages.ServerMessage)


def chunk_message() -> WireMessage:
    """The header of a binary frame."""
    return _wire_message(messages.ChunkHeader)


def omni_client_messages() -> tuple[WireMessage, ...]:
    return _named(omni_messages.OmniClientMessage)


def omni_server_messages() -> tuple[WireMessage, ...]:
    return _named(omni_messages.OmniServerMessage)


def message_schema(message: WireMessage) -> dict[str, Any]:
    """JSON Schema of one message. What a message always has is required, though our own models fill it in."""
    schema = message.model.model_json_schema(by_alias=True)
    required = {"type", *schema.get("required", []), *_always_sent(message)}
    schema["required"] = [name for name in schema["properties"] if name in required]
    return {"$schema": JSON_SCHEMA_DIALECT, **schema}


def _always_sent(message: WireMessage) -> set[str]:
    """Name the fields that the server never leaves out; in a chunk's header, those that are null are left out."""
    fields = message.model.model_fields
    if message.model in get_args(messages.ServerMessage):
        return set(fields)
    return {name for name, field in fields.items() if field.default is not None} if message.is_binary else set()


def references(node: object) -> Iterator[dict[str, Any]]:
    """Yield every object of a schema or document that is a reference."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def _named(union: object) -> tuple[WireMessage, ...]:
    return tuple(_wire_message(model) for model in get_args(union))


def _wire_message(model: type[WireModel]) -> WireMessage:
    if model is messages.SessionResume:
        return WireMessage(name=RESUME_NAME, model=model)
    (name,) = get_args(model.model_fields["type"].annotation)
    return WireMessage(name=name, model=model)
