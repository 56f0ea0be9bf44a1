"""Which settings can be combined. What is refused here is wrong for every checkpoint and every host.

What depends on a checkpoint (types, tied tensors) is `host_plan.py`; on a host (drivers, limits), the attempt itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.errors import IllegalCombination
from offload.host_plan import HostKind
from offload.streamed_model import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """All that has to fit together.

    `gather_ranks`: ranks that share weights out, 1 for none. `keeps_residents`: some layers stay on the device, which
    no rule is about: a worker need not say it, the table shows it.
    """

    host: HostKind
    transfer: Transfer
    is_cuda: bool = True
    gather_ranks: int = 1
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    quantizes: bool = False
    keeps_residents: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One reason to refuse. `applies` to the combinations that `settings` describes for people."""

    settings: str
    reason: str
    applies: Callable[[Combination], bool]


RULES: tuple[Rule, ...] = (
    Rule(
        settings="page-locking without a CUDA device",
        reason="nothing copies from locked memory there",
        applies=lambda wish: wish.transfer is Transfer.REGISTERED and not wish.is_cuda,
    ),
    Rule(
        settings="mapped checkpoint with float8 linears",
        reason="the bytes are made at load and are in no file of the checkpoint",
        applies=lambda wish: wish.host is HostKind.CHECKPOINT_MMAP and wish.quantizes,
    ),
    Rule(
        settings="mapped checkpoint with tensor parallelism",
        reason="a rank's columns are not contiguous in the checkpoint's files",
        applies=lambda wish: wish.host is HostKind.CHECKPOINT_MMAP and wish.tensor_parallel > 1,
    ),
    Rule(
        settings="all-gather with tensor parallelism",
        reason="shares can be exchanged only among ranks whose weights are equal",
        applies=lambda wish: wish.gather_ranks > 1 and wish.tensor_parallel > 1,
    ),
    Rule(
        settings="all-gather among some ranks of a sequence-parallel group",
        reason="the ranks of a group run in step, so that all of them must take part",
        applies=lambda wish: wish.gather_ranks > 1 and wish.gather_ranks != wish.sequence_parallel,
    ),
)


def find_conflicts(wish: Combination) -> tuple[str, ...]:
    """Return a sentence for everything that can't be combined."""
    return tuple(f"{rule.settings}: {rule.reason}" for rule in RULES if rule.applies(wish))


def check_combination(wish: Combination) -> None:
    """Raise `IllegalCombination` with all conflicts."""
    conflicts = find_conflicts(wish)
    if conflicts:
        raise IllegalCombination("this combination", *conflicts)


def legality_table() -> str:
    """Return the table of the documents: rows of host memory and transfer, columns of everything else."""
    columns: dict[str, Callable[[Combination], Combination]] = {
        "alone": lambda wish: wish,
        "no layer resident": lambda wish: replace(wish, keeps_residents=False),
        "float8 linears": lambda wish: replace(wish, quantizes=True),
        "tensor parallel": lambda wish: replace(wish, tensor_parallel=2),
        "sequence parallel": lambda wish: replace(wish, sequence_parallel=2),
        "all-gather, sequence parallel": lambda wish: replace(wish, gather_ranks=2, sequence_parallel=2),
        "all-gather, tensor parallel": lambda wish: replace(wish, gather_ranks=2, tensor_parallel=2),
        "on a CPU": lambda wish: replace(wish, is_cuda=False),
    }
    lines = [
        "| `host`, `transfer` | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for host in HostKind:
        for transfer in Transfer:
            wish = Combination(host=host, transfer=transfer)
            cells = ["no" if find_conflicts(change(wish)) else "yes" for change in columns.values()]
            lines.append(f"| `{host}`, `{transfer}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)
