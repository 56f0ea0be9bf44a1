"""The free list and the owner of every page of one pool. Plain Python over ints; knows no frames and no tensors."""

from __future__ import annotations

from collections import Counter
from typing import NewType

from kvcache.errors import IntegrityError

PageId = NewType("PageId", int)


class PageLedger:
    """Pages `first_page .. first_page + num_pages - 1`, each free or owned by one session.

    Callers size the pool so that it can't run dry; an impossible request is our own bug and raises IntegrityError.
    """

    def __init__(self, num_pages: int, *, first_page: int = 0) -> None:
        self.total_pages = num_pages
        # Dictionaries keep insertion order: the page that was free longest is taken first.
        self._free: dict[PageId, None] = {PageId(first_page + i): None for i in range(num_pages)}
        self._owner: dict[PageId, str] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def owner_of(self, page: PageId) -> str | None:
        return self._owner.get(page)

    def take(self, owner: str) -> PageId:
        """Give the page that was free longest to `owner`."""
        if not self._free:
            raise IntegrityError(f"no free page for {owner!r}: all {self.total_pages} are owned")
        return self.take_exact(next(iter(self._free)), owner)

    def take_exact(self, page: PageId, owner: str) -> PageId:
        """Give this free page to `owner`."""
        if page not in self._free:
            raise IntegrityError(f"page {page} asked for by {owner!r} is owned by {self._owner.get(page)!r}")
        del self._free[page]
        self._owner[page] = owner
        return page

    def give_back(self, page: PageId, owner: str) -> None:
        """Free a page of `owner`."""
        if self._owner.get(page) != owner:
            raise IntegrityError(f"page {page} given back by {owner!r} is owned by {self._owner.get(page)!r}")
        del self._owner[page]
        self._free[page] = None

    def check(self, held: dict[str, list[PageId]]) -> None:
        """Compare with the pages that each owner says it holds. Raises IntegrityError with what disagrees."""
        if len(self._free) + len(self._owner) != self.total_pages:
            raise IntegrityError(
                f"free {len(self._free)} + owned {len(self._owner)} pages != total {self.total_pages} pages"
            )
        both = self._free.keys() & self._owner.keys()
        if both:
            raise IntegrityError(f"pages {sorted(both)} are free and owned")
        counts = Counter(page for pages in held.values() for page in pages)
        twice = sorted(page for page, count in counts.items() if count > 1)
        if twice:
            raise IntegrityError(f"pages {twice} are held more than once")
        for owner, pages in held.items():
            wrong = {page: self._owner.get(page) for page in pages if self._owner.get(page) != owner}
            if wrong:
                raise IntegrityError(f"pages held by {owner!r} have other owners: {wrong}")
        leaked = self._owner.keys() - counts.keys()
        if leaked:
            raise IntegrityError(f"owned {len(self._owner)} pages, held {len(counts)}: nobody holds {sorted(leaked)}")
