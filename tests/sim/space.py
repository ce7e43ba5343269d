"""The states of a search, in little memory: there are millions of them.

What a state consists of comes again and again in others: each queue, and all besides hosts and
queues. These get numbers, and a state is kept as the bytes of its numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar, cast

from wires import Queues

#: Unsigned, and of four bytes: enough for all that memory has room for.
_NUMBER = "I"

V = TypeVar("V", bound=Hashable)


class Budget(NamedTuple):
    """What may still go wrong, by kind."""

    #: Operations that fail.
    failures: int = 0
    #: Daemons that are killed.
    kills: int = 0
    #: Machines that lose their power.
    reboots: int = 0
    #: Links that are cut.
    cuts: int = 0
    #: Clocks that strike, in whatever order, however much time they had left.
    clocks: int = 0
    #: Things that clients or their processes do.
    acts: int = 0

    def less(self, kind: str) -> Budget | None:
        """Return what is left after one of a kind; None: there is none."""
        left = getattr(self, kind)
        return self._replace(**{kind: left - 1}) if left else None

    def __str__(self) -> str:
        given = [f"{count} {kind}" for kind, count in self._asdict().items() if count]
        return ", ".join(given) or "nothing wrong"


class State(NamedTuple):
    """Where all hosts are, and what is under way between them."""

    #: By host: the number of its state.
    hosts: tuple[int, ...]
    queues: Queues
    #: Directions of links that are cut.
    cut: frozenset[int]
    #: By host: how often its machine has booted anew.
    boots: tuple[int, ...]
    budget: Budget


@dataclass(slots=True)
class Numbered(Generic[V]):
    """Values by number, and their numbers."""

    all: list[V] = field(default_factory=list)
    _numbers: dict[V, int] = field(default_factory=dict)

    def of(self, value: V) -> int:
        """Return the number of a value."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.all)
            self.all.append(value)
        return number


@dataclass(slots=True)
class Space:
    """States of so many hosts by number, in the order in which they were found."""

    hosts: int
    _keys: list[bytes] = field(default_factory=list)
    _numbers: dict[bytes, int] = field(default_factory=dict)
    _queues: Numbered[tuple[int, ...]] = field(default_factory=Numbered)
    _rests: Numbered[tuple[Hashable, ...]] = field(default_factory=Numbered)

    def key(self, state: State, *rest: Hashable) -> bytes:
        """Return bytes for a state; `rest` instead of its budget, if there is any."""
        queue = self._queues.of
        last = (state.cut, state.boots, *(rest or (state.budget,)))
        numbers = [*state.hosts, *map(queue, state.queues), self._rests.of(last)]
        return array(_NUMBER, numbers).tobytes()

    def number_of(self, key: bytes) -> int | None:
        """Return the number of a state that is known."""
        return self._numbers.get(key)

    def add(self, key: bytes) -> int:
        """Take a state in, and return its number."""
        number = self._numbers[key] = len(self._keys)
        self._keys.append(key)
        return number

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, number: int) -> State:
        numbers = array(_NUMBER, self._keys[number])
        queues = tuple([self._queues.all[queue] for queue in numbers[self.hosts : -1]])
        cut, boots, budget = self._rests.all[numbers[-1]]
        assert isinstance(budget, Budget), "only what `_restful` has is of something else"
        hosts = tuple(numbers[: self.hosts])
        return State(hosts, queues, cast(frozenset[int], cut), cast(tuple[int, ...], boots), budget)

    def __iter__(self) -> Iterator[State]:
        return map(self.__getitem__, range(len(self._keys)))


@dataclass(slots=True)
class Edges:
    """Which state leads to which, from each in the order of their numbers."""

    _targets: array[int] = field(default_factory=lambda: array(_NUMBER))
    #: By state: where its targets end.
    _ends: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, target: int) -> None:
        """Lead from the state that is looked at to another one."""
        self._targets.append(target)

    def close(self) -> None:
        """Go on to the next state."""
        self._ends.append(len(self._targets))

    def are_acyclic(self) -> bool:
        """Whether no state leads back to itself. All states must have been closed."""
        targets, ends = self._targets, self._ends
        before = array(_NUMBER, bytes(4 * len(ends)))
        for target in targets:
            before[target] += 1
        free = [number for number, count in enumerate(before) if not count]
        seen = 0
        while free:
            number = free.pop()
            seen += 1
            for target in targets[ends[number - 1] if number else 0 : ends[number]]:
                before[target] -= 1
                if not before[target]:
                    free.append(target)
        return seen == len(ends)
