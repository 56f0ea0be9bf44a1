"""What is wrong with a checkpoint, one finding at a time: short for people, whole for programs and logs. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

MAX_NAMES = 20
"""Names of a finding in a sentence for people."""

_PLURALS = re.compile(r"\b(tensor|shape|type)s\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding. `text` is a sentence, or a plural if there are `names` of all that it is about.

    `part` says what it is a finding about, for example a component. As text the names are cut; `whole` has them all.
    """

    text: str
    names: tuple[str, ...] = ()
    part: str = ""

    def __str__(self) -> str:
        return self._sentence(MAX_NAMES)

    @property
    def whole(self) -> str:
        """The sentence with all names."""
        return self._sentence(len(self.names))

    @property
    def is_cut(self) -> bool:
        """Whether the text leaves names out."""
        return len(self.names) > MAX_NAMES

    def of(self, part: str) -> Problem:
        """Return the finding as one about a part."""
        return replace(self, part=f"{part}: {self.part}" if self.part else part)

    def _sentence(self, num_names: int) -> str:
        prefix = f"{self.part}: " if self.part else ""
        if not self.names:
            return prefix + self.text
        title = _PLURALS.sub(r"\1", self.text, count=1) if len(self.names) == 1 else self.text
        rest = f" and {len(self.names) - num_names} more" if len(self.names) > num_names else ""
        return f"{prefix}{len(self.names)} {title} ({', '.join(self.names[:num_names])}{rest})"


def listed(findings: Iterable[tuple[str, Iterable[str]]]) -> tuple[Problem, ...]:
    """Make a problem of each plural that has names."""
    problems = (Problem(text=title, names=tuple(names)) for title, names in findings)
    return tuple(problem for problem in problems if problem.names)
