"""Errors of this package. Bad argument values (shapes, dtypes, counts) are plain `ValueError`s.

OffloadError
├── PlanRefused              what was wished for does not apply here; nothing was changed: choose something else
│   ├── IllegalCombination   two settings exclude each other, whatever the weights are
│   └── BudgetTooSmall       the weights do not fit the budget: the numbers say by how much
├── CacheError               the folder of the weight cache can't be used
│   ├── CacheRootRefused     its file system keeps no files for this machine, or none at all
│   ├── CacheBusy            another process holds the entry for longer than we may wait
│   ├── CacheDamaged         an entry is not what was published: it must be built again
│   └── CacheForeign         an entry is whole, but of another format than ours: it is left alone
├── RegistrationFailed       host memory was not page-locked; nothing of the attempt is left
├── RollbackFailed           memory is locked and can't be unlocked: the worker must stop
├── CopyFailed               weights did not reach the device: the tick fails
└── RanksDisagree            ranks are not at the same place of the same pass: the tick fails on all of them
"""

from __future__ import annotations


class OffloadError(Exception):
    """Base of all errors of this package."""


class PlanRefused(OffloadError):
    """Report that a wished-for kind of memory or copy does not apply. `reasons` has one sentence each."""

    def __init__(self, wish: str, *reasons: str) -> None:
        super().__init__(f"{wish} can't be used: {'; '.join(reasons)}")
        self.wish = wish
        self.reasons = reasons


class IllegalCombination(PlanRefused):
    """Report settings that exclude each other."""


class BudgetTooSmall(PlanRefused):
    """Report that streamed weights do not fit a budget of device memory."""

    def __init__(self, *, required_bytes: int, budget_bytes: int, detail: str) -> None:
        super().__init__(
            f"a budget of {budget_bytes} bytes ({budget_bytes / 2**30:.2f} GiB)",
            f"{required_bytes} bytes ({required_bytes / 2**30:.2f} GiB) are needed at least ({detail})",
        )
        self.required_bytes = required_bytes
        self.budget_bytes = budget_bytes


class CacheError(OffloadError):
    """Report that the weight cache can't be used."""


class CacheRootRefused(CacheError):
    """Refuse a folder for what its file system is."""


class CacheBusy(CacheError):
    """Report that a lock was not had in time."""

    def __init__(self, lock: str, *, holder: str, waited_s: float) -> None:
        super().__init__(f"{lock} is {holder} for more than {waited_s:.4g} s")
        self.waited_s = waited_s


class CacheDamaged(CacheError):
    """Report an entry whose bytes or names are not those that were published."""

    def __init__(self, entry: str, problem: str) -> None:
        super().__init__(f"{entry}: {problem}")
        self.entry = entry
        self.problem = problem


class CacheForeign(CacheError):
    """Report an entry that another version of this program may have made. `format` is what it says that it is."""

    def __init__(self, entry: str, format_name: str) -> None:
        super().__init__(f"{entry}: is of format {format_name}")
        self.format_name = format_name


class RegistrationFailed(OffloadError):
    """Report that page-locking host memory was refused or took too long. What had been locked is unlocked again."""


class RollbackFailed(OffloadError):
    """Report memory that stays locked although it must not be: its addresses can't be given back safely."""


class CopyFailed(OffloadError):
    """Report that the weights of a layer could not be brought to the device."""


class RanksDisagree(OffloadError):
    """Report ranks that would take part in different copies."""
