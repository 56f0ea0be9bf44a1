"""Files of a run: tensors, and several files and folders of one folder that are replaced as one.

New ones are written into `unfinished/`. Once all are there the folder becomes `finished/`, and from then on they count:
whatever ends the process while they move to their places, `located` finds the new ones, and the next writer moves what
is left.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from worldmodel.checkpoint.diffusers import weight_files
from worldmodel.checkpoint.json_file import read_json_object

_UNFINISHED, _FINISHED = "unfinished", "finished"


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write into; what lies in it afterwards replaces what `folder` has of the same names.

    One writer at a time. If the body raises, nothing is replaced.
    """
    settle(folder)
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.rename(folder / _FINISHED)
    settle(folder)


def settle(folder: Path) -> None:
    """Move what a writer had finished, and perhaps did not live to move, to its place. Only for a writer."""
    finished = folder / _FINISHED
    if not finished.exists():
        return
    for path in sorted(finished.iterdir()):
        _move(path, folder / path.name)
    finished.rmdir()


def _move(path: Path, place: Path) -> None:
    if path.is_dir() and place.exists():
        shutil.rmtree(place)
    path.replace(place)


def located(folder: Path, name: str) -> Path:
    """Return where a file or folder is to be read; changes nothing."""
    finished = folder / _FINISHED / name
    return finished if finished.exists() else folder / name


def expect_whole(part: Path) -> None:
    """Raise `CheckpointError` if a trained part's config.json is no object, or its weights are not all there."""
    read_json_object(part / "config.json")
    weight_files(part)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors of a CPU, readable for whom any new file is, where safetensors' own has mode 0600."""
    path.write_bytes(save(dict(tensors), metadata={"format": "pt"}))
