"""Settings that exclude each other, one by one, and the table of the documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offload.errors import IllegalCombination
from offload.host_plan import HostKind
from offload.legality import RULES, Combination, check_combination, find_conflicts, legality_table
from offload.streamed_model import Transfer

LEGAL = Combination(host=HostKind.ORDINARY, transfer=Transfer.REGISTERED)
MAPPED = replace(LEGAL, host=HostKind.CHECKPOINT_MMAP)

ILLEGAL = {
    "page-locking without": replace(LEGAL, is_cuda=False),
    "mapped checkpoint with float8": replace(MAPPED, quantizes=True),
    "mapped checkpoint with tensor": replace(MAPPED, tensor_parallel=2),
    "all-gather with tensor": replace(LEGAL, gather_ranks=2, sequence_parallel=2, tensor_parallel=2),
    "all-gather among some": replace(LEGAL, gather_ranks=2, sequence_parallel=4),
}


@pytest.mark.parametrize("settings", ILLEGAL)
def test_every_rule_refuses_what_it_is_about(settings: str) -> None:
    with pytest.raises(IllegalCombination, match=f"this combination can't be used: {settings}"):
        check_combination(ILLEGAL[settings])


def test_every_rule_has_its_case() -> None:
    assert len(ILLEGAL) == len(RULES)
    assert all(len(find_conflicts(wish)) == 1 for wish in ILLEGAL.values())


@pytest.mark.parametrize("host", HostKind)
@pytest.mark.parametrize("transfer", Transfer)
def test_everything_else_is_legal(host: HostKind, transfer: Transfer) -> None:
    check_combination(Combination(host=host, transfer=transfer))
    check_combination(Combination(host=host, transfer=transfer, gather_ranks=4, sequence_parallel=4))


def test_layers_that_stay_make_nothing_legal_or_illegal() -> None:
    for wish in (LEGAL, MAPPED, *ILLEGAL.values()):
        assert find_conflicts(replace(wish, keeps_residents=not wish.keeps_residents)) == find_conflicts(wish)


def test_the_document_has_the_table_of_the_code() -> None:
    document = Path(__file__).resolve().parents[3] / "docs" / "offload.md"
    text = document.read_text(encoding="utf-8")
    assert legality_table() in text
    assert all(f"| {rule.settings} | {rule.reason} |" in text for rule in RULES)
