"""Which backends move whose ranks: `backend` of [daemon], [groups.NAME] and [jobs.NAME]."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from tsliced.core.model import GroupName, JobKey

#: The names of one backend, or of two of which the second moves what the first one leaves.
Way: TypeAlias = tuple[str, ...]

_NAME: Final = r"(?:[a-z][a-z0-9_-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)"
WAY_PATTERN: Final = rf"{_NAME}(?:\+{_NAME})?"
WAY_MEANING: Final = "the name of a backend, module:Class, or two of them with + between"


def parse_way(text: str) -> Way:
    """Return the way that a text which matches `WAY_PATTERN` says."""
    assert re.fullmatch(WAY_PATTERN, text), text
    return tuple(text.split("+"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """All that is configured of ways, those to be tried first in front."""

    default: tuple[Way, ...]
    groups: Mapping[GroupName, tuple[Way, ...]] = field(default_factory=dict)
    #: By what a job's id looks like, with ``*`` and ``?`` if need be; the first that fits counts.
    jobs: tuple[tuple[str, tuple[Way, ...]], ...] = ()

    def of(self, job: JobKey | None, groups: Sequence[GroupName]) -> tuple[Way, ...]:
        """Return the ways of a job's rank: what the job is to go, else its group, else the host."""
        if job is not None:
            for pattern, ways in self.jobs:
                if fnmatchcase(job.id, pattern):
                    return ways
        return next((self.groups[group] for group in groups if group in self.groups), self.default)

    def all(self) -> Iterator[Way]:
        """Yield each way once."""
        each: Iterable[Way] = (
            way
            for ways in (self.default, *self.groups.values(), *(ways for _, ways in self.jobs))
            for way in ways
        )
        yield from dict.fromkeys(each)

    def only(self) -> str | None:
        """Return the one backend that is used for all, if there is no choice."""
        first, *others = self.all()
        return first[0] if not others and len(first) == 1 else None

    def __str__(self) -> str:
        return ", ".join("+".join(way) for way in self.all())

    def names(self) -> list[str]:
        """Return the name of each backend once."""
        return list(dict.fromkeys(name for way in self.all() for name in way))
