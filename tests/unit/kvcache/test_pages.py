"""The page ledger: who owns what, and what it refuses."""

from __future__ import annotations

import pytest

from kvcache.errors import IntegrityError
from kvcache.pages import PageId, PageLedger


def test_pages_are_handed_out_longest_free_first_and_once() -> None:
    ledger = PageLedger(3)
    assert [ledger.take("a"), ledger.take("b")] == [0, 1]
    ledger.give_back(PageId(0), "a")
    assert [ledger.take("b"), ledger.take("b")] == [2, 0]
    assert ledger.free_pages == 0
    assert ledger.owner_of(PageId(2)) == "b"
    assert [ledger.owner_of(PageId(page)) for page in (0, 1)] == ["b", "b"]


def test_an_empty_free_list_is_our_bug() -> None:
    ledger = PageLedger(1)
    ledger.take("a")
    with pytest.raises(IntegrityError, match="no free page for 'b': all 1 are owned"):
        ledger.take("b")


def test_only_the_owner_gives_a_page_back() -> None:
    ledger = PageLedger(2)
    page = ledger.take("a")
    with pytest.raises(IntegrityError, match="given back by 'b' is owned by 'a'"):
        ledger.give_back(page, "b")
    ledger.give_back(page, "a")
    with pytest.raises(IntegrityError, match="given back by 'a' is owned by None"):
        ledger.give_back(page, "a")


def test_a_page_is_not_taken_twice() -> None:
    ledger = PageLedger(2)
    ledger.take_exact(PageId(1), "a")
    with pytest.raises(IntegrityError, match="page 1 asked for by 'b' is owned by 'a'"):
        ledger.take_exact(PageId(1), "b")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"a": [0]}, r"owned 2 pages, held 1: nobody holds \[1\]"),
        ({"a": [0, 1, 1]}, r"pages \[1\] are held more than once"),
        ({"a": [0, 1, 2]}, "pages held by 'a' have other owners: {2: None}"),
        ({"a": [0], "b": [1]}, "pages held by 'b' have other owners: {1: 'a'}"),
    ],
)
def test_check_names_what_disagrees(held: dict[str, list[PageId]], message: str) -> None:
    ledger = PageLedger(4)
    ledger.take("a")
    ledger.take("a")
    ledger.check({"a": [PageId(0), PageId(1)]})
    with pytest.raises(IntegrityError, match=message):
        ledger.check(held)
