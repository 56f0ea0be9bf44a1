"""Fill a torch module with stored tensors, or say everything that does not fit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from worldmodel.checkpoint.errors import CheckpointError, log_whole
from worldmodel.checkpoint.problems import Problem, listed
from worldmodel.checkpoint.safetensors_header import TensorInfo
from worldmodel.checkpoint.tensor_stream import TORCH_DTYPES, stream_tensors

DTypeChoice = torch.dtype | Callable[[str], torch.dtype]
"""The type of all floating tensors, or a function from a tensor's name to its type."""

NameChoice = Callable[[str], bool]
"""Says of a tensor's name whether the tensor is meant."""

Progress = Callable[[float, str], None]
"""Called with (fraction 0..1, detail)."""

KeyOf = Callable[[str], str]
"""Says by which key a file would hold the tensor of a module's name."""

_FLOATING = ("F64", "F32", "F16", "BF16")


def read_tensor(info: TensorInfo, *, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    """Read one tensor into memory of its own."""
    [(_, tensor)] = stream_tensors([info], lambda _: dtype, device)
    return tensor


def load_tensors(
    stored: Mapping[str, TensorInfo],
    module: nn.Module,
    subject: str,
    *,
    dtype: DTypeChoice,
    device: torch.device | str,
    progress: Progress | None,
    only: NameChoice | None = None,
    key_of: KeyOf | None = None,
) -> None:
    """Do what `Component.load_into` says; `subject` opens the error text, `key_of` is that of `find_misfits`."""
    wanted = everything = names_by_tensor(module)
    if only is not None:
        stored = {name: info for name, info in stored.items() if only(name)}
        wanted = choose_names(wanted, only)
    plan, problems = _plan(stored, wanted, key_of, frozenset())
    if problems:
        log_whole(problems)
        raise CheckpointError(subject, *problems)
    check_other_buffers(module, everything)

    def chosen(info: TensorInfo) -> torch.dtype | None:
        if info.dtype not in _FLOATING:
            return None
        return dtype if isinstance(dtype, torch.dtype) else dtype(plan[info][0])

    read = ((plan[info], tensor, info.num_bytes) for info, tensor in stream_tensors(plan, chosen, device))
    total_bytes = sum(info.num_bytes for info in plan)
    fill_module(module, read, device=device, total_bytes=total_bytes, progress=progress)


def find_misfits(
    stored: Mapping[str, TensorInfo],
    module: nn.Module,
    *,
    key_of: KeyOf | None = None,
    unread: frozenset[str] = frozenset(),
) -> tuple[Problem, ...]:
    """Say what of the stored tensors does not fit a module: missing, extra, misshaped and wrongly typed ones.

    Tensors are named by their keys in the file, with the module's name where that is another; `key_of` gives the key
    of one that is missing. The names in `unread` may be in a file that could not be read, and are not missing.
    """
    return _plan(stored, names_by_tensor(module), key_of, unread)[1]


def fill_module(
    module: nn.Module,
    tensors: Iterable[tuple[list[str], Tensor, int]],
    *,
    device: torch.device | str,
    total_bytes: int,
    progress: Progress | None,
) -> None:
    """Put tensors into a module as they come, each under all its names, and move its other buffers to `device`.

    Every tensor comes with the number of bytes by which it advances `progress` towards `total_bytes`.
    """
    done_bytes, started_s = 0, time.monotonic()
    for names, tensor, num_bytes in tensors:
        _replace(module, names, tensor)
        done_bytes += num_bytes
        if progress is not None:
            rate = done_bytes / max(time.monotonic() - started_s, 1e-9)
            detail = f"{done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB, {rate / 1e6:.0f} MB/s"
            progress(done_bytes / max(1, total_bytes), detail)
    _move_other_buffers(module, device)


def names_by_tensor(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """List the module's parameters and persistent buffers, each with all names that share it."""
    names: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names[id(tensor)].append(name)
        tensors[id(tensor)] = tensor
    return [(tensor, names[key]) for key, tensor in tensors.items()]


def choose_names(wanted: list[tuple[Tensor, list[str]]], only: NameChoice) -> list[tuple[Tensor, list[str]]]:
    """Return the tensors that have an accepted name, with all their names."""
    return [(tensor, names) for tensor, names in wanted if any(only(name) for name in names)]


def _plan(
    stored: Mapping[str, TensorInfo],
    wanted: list[tuple[Tensor, list[str]]],
    key_of: KeyOf | None,
    unread: frozenset[str],
) -> tuple[dict[TensorInfo, list[str]], tuple[Problem, ...]]:
    """Match stored tensors with the module's; return the match and all findings."""
    missing: list[str] = []
    misshaped: list[str] = []
    mistyped: list[str] = []
    plan: dict[TensorInfo, list[str]] = {}
    for tensor, names in wanted:
        present = [name for name in names if name in stored]
        if not present and unread.isdisjoint(names):
            missing.append(_label(names[0], key_of(names[0]) if key_of else names[0]))
        for name in present:
            info = stored[name]
            if info.shape != tuple(tensor.shape):
                misshaped.append(f"{_label(name, info.name)} {list(info.shape)} instead of {list(tensor.shape)}")
            elif not _fits(info, tensor.dtype):
                mistyped.append(f"{_label(name, info.name)} {info.dtype} for {tensor.dtype}")
        if present:
            plan[stored[present[0]]] = names
    known = {name for _, names in wanted for name in names}
    extra = [_label(name, stored[name].name) for name in sorted(set(stored) - known)]
    findings = (
        ("missing tensors", missing),
        ("extra tensors", extra),
        ("wrong shapes", misshaped),
        ("wrong types", mistyped),
    )
    return plan, listed(findings)


def _label(name: str, key: str) -> str:
    """Name a tensor by its key in the file, and by the module's name if that is another."""
    return name if key == name else f"{key} (here {name})"


def _fits(info: TensorInfo, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point:
        return info.dtype in _FLOATING
    return TORCH_DTYPES.get(info.dtype) == dtype


def _replace(module: nn.Module, names: list[str], tensor: Tensor) -> None:
    """Put one tensor under all its names; a parameter stays one parameter."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    for name in names:
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        is_parameter = leaf in dict(owner.named_parameters(recurse=False))
        setattr(owner, leaf, parameter if is_parameter else tensor)


def _other_buffers(module: nn.Module, persistent: set[str]) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module.named_buffers():
        if name not in persistent:
            yield name, buffer


def check_other_buffers(module: nn.Module, wanted: list[tuple[Tensor, list[str]]]) -> None:
    """Refuse a module whose derived buffers hold no values yet. Raises ValueError."""
    persistent = {name for _, names in wanted for name in names}
    stuck = [name for name, buffer in _other_buffers(module, persistent) if buffer.is_meta]
    if stuck:
        raise ValueError(f"buffers on the meta device that no checkpoint stores: {', '.join(stuck)}")


def _move_other_buffers(module: nn.Module, device: torch.device | str) -> None:
    for name, buffer in list(_other_buffers(module, set(module.state_dict()))):
        _replace(module, [name], buffer.to(device))
