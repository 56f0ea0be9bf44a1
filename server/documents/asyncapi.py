"""The AsyncAPI document: every WebSocket of the server in one file that refers to nothing outside of it.

It is written from the server's point of view: `receive` is what clients send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.documents import examples
from server.documents.robot_schemas import robot_schemas
from server.documents.wire_messages import (
    WireMessage,
    chunk_message,
    client_messages,
    message_schema,
    omni_client_messages,
    omni_server_messages,
    references,
    server_messages,
)
from server.wire.messages import PROTOCOL_VERSION
from server.wire.robot_messages import RobotForm

ASYNCAPI_VERSION = "3.0.0"

BINARY = {"type": "string", "format": "binary"}
JSON_TYPE, BINARY_TYPE, MSGPACK_TYPE = "application/json", "application/octet-stream", "application/msgpack"
TEXT_TYPE = "text/plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One message of one channel. `key` names it among the components; `schema` is the name of its payload's."""

    key: str
    name: str
    schema: str | None
    content_type: str = JSON_TYPE
    summary: str = ""
    headers: str | None = None
    examples: tuple[dict[str, Any], ...] = ()

    def message_object(self) -> dict[str, Any]:
        payload = BINARY if self.schema is None else _schema_ref(self.schema)
        message: dict[str, Any] = {"name": self.name}
        if self.summary:
            message["summary"] = self.summary
        message["contentType"] = self.content_type
        if self.headers is not None:
            message["headers"] = _schema_ref(self.headers)
        message["payload"] = payload
        if self.examples:
            part = "payload" if self.headers is None else "headers"
            message["examples"] = [{part: example} for example in self.examples]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One address and what goes over it in each direction."""

    key: str
    address: str
    description: str
    received: tuple[Entry, ...]
    sent: tuple[Entry, ...]


def asyncapi_document(protocol_text: str) -> dict[str, Any]:
    """Return the document; examples are those of `protocol_text`, docs/protocol.md."""
    channels = (_world(protocol_text), _omni(protocol_text), *_robots())
    entries = {entry.key: entry for channel in channels for entry in (*channel.received, *channel.sent)}
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "worldserve",
            "version": str(PROTOCOL_VERSION),
            "description": "Realtime interactive worlds and robot policies over WebSockets. Read protocol.md first.",
        },
        "defaultContentType": JSON_TYPE,
        "servers": {
            "local": {
                "host": "127.0.0.1:8000",
                "protocol": "ws",
                "description": "A server on this machine; `wss` behind a proxy that ends TLS.",
                "security": [{"$ref": "#/components/securitySchemes/bearer"}],
            }
        },
        "channels": {channel.key: _channel_object(channel) for channel in channels},
        "operations": {
            f"{channel.key}.{name}": _operation(channel, action, listed)
            for channel in channels
            for name, action, listed in (
                ("fromClient", "receive", channel.received),
                ("toClient", "send", channel.sent),
            )
        },
        "components": {
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Only where the server has tokens. Browsers offer the subprotocols worldserve.v1 "
                    "and worldserve.token.TOKEN instead; robots may send `Api-Key TOKEN`.",
                }
            },
            "messages": {key: entry.message_object() for key, entry in entries.items()},
            "schemas": _schemas(),
        },
    }


# ---------------------------------------------------------------- channels


def _world(text: str) -> Channel:
    def entry(message: WireMessage) -> Entry:
        shown = tuple(examples.world_examples(text, message.name))
        key = f"world.{message.name}"
        if message.is_binary:
            return Entry(
                key=key,
                name=message.name,
                schema=None,
                headers=key,
                content_type=BINARY_TYPE,
                summary="A binary frame: header length (4 bytes, big endian), header (UTF-8 JSON), payload.",
                examples=shown,
            )
        return Entry(key=key, name=message.name, schema=key, summary=message.summary, examples=shown)

    return Channel(
        key="world",
        address="/v1/world",
        description="One session with a world: JSON text both ways, and binary chunks of video to the client.",
        received=tuple(map(entry, client_messages())),
        sent=tuple(map(entry, (*server_messages(), chunk_message()))),
    )


def _omni(text: str) -> Channel:
    def entry(message: WireMessage) -> Entry:
        key = f"omni.{message.name}"
        shown = tuple(examples.omni_examples(text, message.name))
        return Entry(key=key, name=message.name, schema=key, summary=message.summary, examples=shown)

    chunk = Entry(
        key="omni.video.chunk",
        name="video.chunk",
        schema=None,
        content_type=BINARY_TYPE,
        summary="Fragmented MP4, right behind its video.chunk_metadata.",
    )
    return Channel(
        key="omni",
        address="/v1/realtime/video",
        description="One video, in the messages of vLLM-Omni's realtime video interface.",
        received=tuple(map(entry, omni_client_messages())),
        sent=(*map(entry, omni_server_messages()), chunk),
    )


def _robots() -> tuple[Channel, ...]:
    addresses = (
        ("robot", "/v1/robot", RobotForm.OFFICIAL, "A robot; errors and answers to resets are texts. Also at `/`."),
        ("openpi", "/v1/realtime/robot/openpi", RobotForm.OPENPI, "A robot; everything is binary."),
    )
    return tuple(_robot(*address) for address in addresses)


def _robot(key: str, address: str, form: RobotForm, description: str) -> Channel:
    def entry(name: str, schema: str, summary: str, content_type: str = MSGPACK_TYPE) -> Entry:
        return Entry(key=f"robot.{name}", name=name, schema=schema, content_type=content_type, summary=summary)

    if form is RobotForm.OFFICIAL:
        replies = (
            entry("reset.text", "RobotResetText", "The answer to a reset.", TEXT_TYPE),
            entry("error.text", "RobotErrorText", "An error: its code, a colon, and text for people.", TEXT_TYPE),
        )
    else:
        replies = (
            entry("reset.map", "RobotResetMap", "The answer to a reset."),
            entry("error.map", "RobotErrorMap", "An error; the message begins with its code."),
        )
    return Channel(
        key=key,
        address=address,
        description=description,
        received=(
            entry("infer", "RobotInfer", "Ask for the actions that follow an observation."),
            entry("reset", "RobotReset", "Begin a new episode."),
        ),
        sent=(
            entry("config", "RobotConfig", "The first message, once the model is loaded."),
            entry("actions", "RobotActions", "The answer to a request without a step_id: the bare array."),
            entry("step", "RobotStepAnswer", "The answer to a request with a step_id."),
            *replies,
            entry("unsupported", "RobotUnsupported", "The only message where no robot model is served.", JSON_TYPE),
        ),
    )


# ---------------------------------------------------------------- parts of the document


def _channel_object(channel: Channel) -> dict[str, Any]:
    entries = (*channel.received, *channel.sent)
    return {
        "address": channel.address,
        "description": channel.description,
        "messages": {entry.key: {"$ref": f"#/components/messages/{entry.key}"} for entry in entries},
        "bindings": {"ws": {"method": "GET"}},
    }


def _operation(channel: Channel, action: str, entries: Sequence[Entry]) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel.key}"},
        "messages": [{"$ref": f"#/channels/{channel.key}/messages/{entry.key}"} for entry in entries],
    }


def _schemas() -> dict[str, Any]:
    """Return the schemas of all messages, and beside them what those share."""
    schemas: dict[str, Any] = {}
    worlds = (*client_messages(), *server_messages(), chunk_message())
    omnis = (*omni_client_messages(), *omni_server_messages())
    for dialect, listed in (("world", worlds), ("omni", omnis)):
        for message in listed:
            schema = message_schema(message)
            del schema["$schema"]
            _hoist(schema, schemas)
            schemas[f"{dialect}.{message.name}"] = schema
    return schemas | robot_schemas()


def _hoist(schema: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Move the definitions inside a schema to `schemas`. Raises `ValueError` if two of one name differ."""
    definitions = schema.pop("$defs", {})
    for reference in references([schema, definitions]):
        reference["$ref"] = reference["$ref"].replace("#/$defs/", "#/components/schemas/")
    for name, definition in definitions.items():
        if schemas.setdefault(name, definition) != definition:
            raise ValueError(f"two definitions are called {name!r}")


def _schema_ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
