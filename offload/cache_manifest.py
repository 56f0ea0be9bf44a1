"""What an entry of the weight cache is: its request, its files, and the address that follows from its content.

The address is the SHA-256 of the manifest, which holds the SHA-256 of every file: names, metadata and final bytes
decide it, and a flipped bit anywhere, in the manifest too, is at odds with the name of the entry's folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from offload.errors import CacheDamaged, CacheForeign
from offload.host_plan import StoredTensor
from offload.layout import TensorSpec
from offload.tensor_file import WORDS, FileDigest, file_sha256, read_header, stored_tensors

FORMAT = "worldserve-weights-1"
"""Raised when files or keys change their meaning: entries of other formats are never found."""

MANIFEST = "manifest.json"
NUM_HASHERS = 4


class Validation(StrEnum):
    """How an entry is checked before it is used.

    FAST: manifest, sizes, headers; finds what was cut off or replaced. FULL: every byte.
    """

    FAST = "fast"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """Which weights are wanted, known before they are made.

    `source` identifies the checkpoint's content, `metadata` everything else that changes the bytes: precision, fused
    form, loader version, tensor-parallel coordinate, and what a sequence-parallel layout depends on. What does not
    change them (data-parallel rank, device, budget) must not be in it. `files` are the tensors of each file by name.
    """

    source: str
    metadata: Mapping[str, str]
    files: Mapping[str, Sequence[TensorSpec]]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for specs in self.files.values() for spec in specs)

    @property
    def key(self) -> str:
        """Return the request as 64 hex digits; entries are looked up by it."""
        content = {
            "format": FORMAT,
            "source": self.source,
            "metadata": dict(sorted(self.metadata.items())),
            "files": {
                name: [[spec.name, WORDS[spec.dtype], list(spec.shape)] for spec in specs]
                for name, specs in sorted(self.files.items())
            },
        }
        return _sha256(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of an entry; `files` have their digests by name."""

    metadata: Mapping[str, str]
    files: Mapping[str, FileDigest]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    @property
    def address(self) -> str:
        """Return the entry's address, 64 hex digits."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        files = {name: asdict(digest) for name, digest in sorted(self.files.items())}
        content = {"format": FORMAT, "metadata": dict(sorted(self.metadata.items())), "files": files}
        return json.dumps(content, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an entry and compare it with the folder's name. Raises `CacheDamaged`, `CacheForeign`."""
    entry = folder.name
    try:
        if (folder / MANIFEST).exists() and not (folder / MANIFEST).is_file():
            raise CacheDamaged(entry, "the manifest is no regular file")
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CacheDamaged(entry, f"the manifest cannot be read ({error.strerror})") from error
    if hashlib.sha256(text).hexdigest() != folder.name:
        raise CacheDamaged(entry, "the manifest is not the one that was published")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise CacheForeign(entry, found if isinstance(found, str) else "unknown")
    try:
        files = {name: FileDigest(**each) for name, each in content["files"].items()}
        return Manifest(metadata=dict(content["metadata"]), files=files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CacheForeign(entry, f"{FORMAT} with other keys") from error


def check_entry(folder: Path, validation: Validation) -> Manifest:
    """Return the manifest of an entry that passes. Raises `CacheDamaged` naming the first file that does not."""
    manifest = read_manifest(folder)
    for problem in _problems(folder, manifest, validation):
        raise CacheDamaged(folder.name, problem)
    return manifest


def read_tensors(folder: Path, manifest: Manifest) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors of an entry that was checked, by file and name. Raises OSError, `CacheDamaged`."""
    return {name: stored_tensors(folder / name, read_header(folder / name)) for name in manifest.files}


def find_mismatch(
    request: CacheRequest, manifest: Manifest, stored: Mapping[str, Mapping[str, StoredTensor]]
) -> str | None:
    """Say what of an entry, with what `read_tensors` found in it, is not what a request is for, None if all is.

    Whatever led to the entry may be another request's. Where the tensors come from is no part of an entry.
    """
    for name in sorted({*manifest.metadata, *request.metadata}):
        has, wanted = manifest.metadata.get(name), request.metadata.get(name)
        if has != wanted:
            return f"{name} is {has!r}, asked for was {wanted!r}"
    if manifest.files.keys() != request.files.keys():
        return f"its files are {', '.join(sorted(manifest.files))}, asked for were {', '.join(sorted(request.files))}"
    for name, specs in request.files.items():
        tensors = stored[name].items()
        found = [TensorSpec(name=key, dtype=each.dtype, shape=each.shape) for key, each in tensors if each.dtype]
        if found != list(specs):
            return f"{name} has other tensors than were asked for"
    return None


def _problems(folder: Path, manifest: Manifest, validation: Validation) -> Iterator[str]:
    for name, digest in manifest.files.items():
        try:
            yield from _header_problems(folder / name, digest)
        except CacheDamaged as error:
            yield error.problem
        except OSError as error:
            yield f"{name} cannot be read ({error.strerror})"
    if validation is Validation.FULL:
        files = [folder / name for name in manifest.files]
        with ThreadPoolExecutor(NUM_HASHERS, thread_name_prefix="weight hash") as hashers:
            for file, hashed in [(file, hashers.submit(file_sha256, file)) for file in files]:
                try:
                    if hashed.result() != manifest.files[file.name].sha256:
                        yield f"{file.name} is not what was published"
                except OSError as error:
                    yield f"{file.name} cannot be read ({error.strerror})"


def _header_problems(file: Path, digest: FileDigest) -> Iterator[str]:
    if file.is_symlink() or not file.is_file():
        yield f"{file.name} is no regular file"
    elif file.stat().st_size != digest.num_bytes:
        yield f"{file.name} has {file.stat().st_size} bytes, {digest.num_bytes} were published"
    elif hashlib.sha256(read_header(file)).hexdigest() != digest.header_sha256:
        yield f"{file.name} has another header than was published"


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
