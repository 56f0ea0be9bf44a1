"""Write every document that is made from the code: `python -m server.documents [--check]`.

    docs/schemas/TYPE.json          one JSON Schema for each message of the `world` dialect
    docs/asyncapi.json              all WebSockets
    docs/openapi.json               the HTTP interface
    clients/browser/wire.d.ts       TypeScript types

The files are checked in for people who write clients; a test fails when they are not what this command writes.
Examples in them come from docs/protocol.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.documents.asyncapi import asyncapi_document
from server.documents.openapi import openapi_document
from server.documents.typescript import typescript_document
from server.documents.wire_messages import chunk_message, client_messages, message_schema, server_messages

PROTOCOL = "docs/protocol.md"
SCHEMAS = "docs/schemas"


def generate(protocol_text: str) -> dict[str, str]:
    """Return the text of every generated file, keyed by its path below the root of the repository."""
    all_messages = (*client_messages(), *server_messages(), chunk_message())
    files = {f"docs/{message.schema_path}": _to_text(message_schema(message)) for message in all_messages}
    return files | {
        "docs/asyncapi.json": _to_text(asyncapi_document(protocol_text)),
        "docs/openapi.json": _to_text(openapi_document()),
        "clients/browser/wire.d.ts": typescript_document(),
    }


def find_drift(root: Path) -> tuple[str, ...]:
    """Return the paths below `root` that differ from what `generate` gives, are missing, or should not be there."""
    wanted = generate((root / PROTOCOL).read_text(encoding="utf-8"))
    present = {f"{SCHEMAS}/{path.name}" for path in (root / SCHEMAS).glob("*.json")}
    differing = {name for name, text in wanted.items() if not _has_text(root / name, text)}
    return tuple(sorted(differing | (present - set(wanted))))


def write(root: Path) -> None:
    """Write all files below `root` and remove schemas of messages that no longer exist."""
    wanted = generate((root / PROTOCOL).read_text(encoding="utf-8"))
    for name in find_drift(root):
        (root / name).unlink(missing_ok=True)
    for name, text in wanted.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the documents that are made from the code, or with `--check` compare them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m server.documents", description=main.__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="root of the repository (default: here)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is not up to date")
    options = parser.parse_args(arguments)
    if not (options.root / PROTOCOL).is_file():
        print(f"{options.root / PROTOCOL} is not there: expected the root of the repository", file=sys.stderr)
        return 1
    if not options.check:
        write(options.root)
        return 0
    drift = find_drift(options.root)
    if drift:
        print(f"not up to date: {', '.join(drift)}; run `python -m server.documents`", file=sys.stderr)
    return 1 if drift else 0


def _to_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _has_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
