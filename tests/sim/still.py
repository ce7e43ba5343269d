"""Hosts that are held still: their states as values, to be told apart and gone on from.

A state is stored as bytes and woken as often as it is needed. Two states are one if nothing by
which the core decides tells them apart. So names of operations do not count, nor instants, but for
whether they are past or to come, nor what is only remembered to be told.
"""

from __future__ import annotations

import io
import marshal
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from random import Random
from typing import Any

from clients import Client
from hosts_lab import HostWorld

from tsliced.core import actions, alarms, events, messages, model, signals
from tsliced.core.actions import Action, StartOperation
from tsliced.core.machine import Machine, MachineConfig
from tsliced.core.participant import Pending
from tsliced.core.rank import Operation
from tsliced.core.timers import TimerKey, TimerKind, Timers

#: Modules of what is made once and never changed.
OF_VALUES = (actions, events, messages, model, signals)

#: What nothing depends on, or what something else says too.
LEFT_OUT = frozenset(
    {
        "_asked", "_barrier_s", "_full_checks", "_next_op", "_short_of", "ceiling",
        "config", "limits", "low", "moves", "operations", "ordered_at", "out", "random", "steps",
        "story",
    }
)  # fmt: skip

#: What changes while a host lives, but for what is emptied after each event.
CHANGING = (
    "machine", "clients", "processes", "journal", "pending", "now", "durable_ceiling", "requests",
)  # fmt: skip


class Steady(Random):
    """Chance that always falls the same way, so that nothing depends on it."""

    def random(self) -> float:
        """Return the middle."""
        return 0.5

    def __reduce__(self) -> tuple[Any, ...]:
        return Steady, ()


@dataclass(slots=True)
class Numbering:
    """Numbers for the requests that clients make up by themselves."""

    last: int

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.last += 1
        return self.last


class Still(HostWorld):
    """A host of which whatever takes time ends when a search says so."""

    __slots__ = ()

    def _machine(self) -> Machine:
        config = MachineConfig(
            host=self.host,
            groups=self.groups,
            limits=self.limits,
            generation=self.generation,
            ceiling=self.durable_ceiling,
            cluster="lab",
        )
        return Machine(config, random=Steady(), full_checks=True)


# --- values ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Values:
    """Numbers for values, so that a state names each of them by its number."""

    all: list[object] = field(default_factory=list)
    _numbers: dict[object, int] = field(default_factory=dict)
    #: The same by identity, which is quicker: what is in `all` stays alive.
    _by_id: dict[int, int] = field(default_factory=dict)

    def of(self, value: object) -> int:
        """Return the number of a value, which must be hashable."""
        known = self._by_id.get(id(value))
        if known is not None:
            return known
        known = self._numbers.get(value)
        if known is None:
            known = self._numbers[value] = len(self.all)
            self.all.append(value)
            self._by_id[id(value)] = known
        return known


#: One for all hosts, since messages go from one to another.
VALUES = Values()


def value_at(number: int) -> object:
    """Return a value by its number, as stored states name it."""
    return VALUES.all[number]


def _is_value(thing: object, module: str) -> bool:
    if not isinstance(thing, type) or thing.__module__ != module:
        return False
    return is_dataclass(thing) or issubclass(thing, Enum) or hasattr(thing, "_fields")


VALUE_TYPES = {alarms.Alarm} | {
    thing
    for module in OF_VALUES
    for thing in vars(module).values()
    if _is_value(thing, module.__name__)
}


def _by_number(value: object) -> tuple[Any, ...]:
    return value_at, (VALUES.of(value),)


_REDUCE: dict[type, Callable[[Any], tuple[Any, ...]]] = dict.fromkeys(VALUE_TYPES, _by_number)


# --- what tells states apart ----------------------------------------------------------------------

#: These are what they are.
_PLAIN = frozenset({int, str, bool, bytes, float, type(None)})


class Teller:
    """Tells what one state is, in tuples of plain values."""

    def __init__(self, world: HostWorld) -> None:
        self.now = world.now
        self.operations = world.machine.tenancies.operations
        #: Which things have been told, by identity: each is told once.
        self.told: dict[int, int] = {}

    def of(self, thing: Any) -> Any:
        """Tell what a thing is."""
        kind = thing.__class__
        if kind in _PLAIN:
            return thing
        if kind in VALUE_TYPES:
            return VALUES.of(thing)
        return (_HOW.get(kind) or _learn(kind))(self, thing)


_How = Callable[[Teller, Any], object]


def _of_dict(teller: Teller, thing: dict[Any, Any]) -> object:
    of = teller.of
    return tuple([(of(key), of(item)) for key, item in thing.items()])


def _of_list(teller: Teller, thing: Any) -> object:
    return tuple(map(teller.of, thing))


def _of_set(teller: Teller, thing: Any) -> object:
    return tuple(sorted(map(repr, map(teller.of, thing))))


def _of_timers(teller: Teller, timers: Timers[TimerKey]) -> object:
    return tuple(sorted(repr(_name_of(teller, key)) for key in timers._at))


def _name_of(teller: Teller, key: TimerKey) -> object:
    if key.kind is TimerKind.STUCK:
        return key.kind.value, str(teller.operations[key.id].rank)  # type: ignore[index]  # by kind
    return key.kind.value, key.id


def _of_operation(_teller: Teller, operation: Operation) -> object:
    return operation.verb.value, VALUES.of(operation.epoch)


def _of_pending(_teller: Teller, pending: Pending) -> object:
    return pending.step.value, VALUES.of(pending.order), pending.resumes


def _of_client(teller: Teller, client: Client) -> object:
    # Not what it was answered: that it was is all that it remembers.
    answered, lost = tuple(client.answers), tuple(client.lost)
    return client.connected, client.ended, teller.of((client.open, client.held)), answered, lost


_HOW: dict[type, _How] = {
    dict: _of_dict,
    list: _of_list,
    deque: _of_list,
    tuple: _of_list,
    set: _of_set,
    frozenset: _of_set,
    Timers: _of_timers,
    Operation: _of_operation,
    Pending: _of_pending,
    Client: _of_client,
}
_BY_FIELDS: dict[type, _How] = {}


def _learn(kind: type) -> _How:
    """Find out how things of a kind are told apart."""
    if issubclass(kind, Enum):
        _HOW[kind] = lambda _teller, thing: thing.value
    elif issubclass(kind, tuple):
        _HOW[kind] = _of_list
    else:
        _HOW[kind] = _by_fields(kind)
    return _HOW[kind]


def _names_of(kind: type) -> list[str]:
    if is_dataclass(kind):
        return [each.name for each in fields(kind)]
    return [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]


def _is_instant(name: str) -> bool:
    return name.endswith("_at") or name in ("deadline", "hold_from", "still_since")


def _attributes_of(thing: object) -> list[str]:
    return [name for name in getattr(thing, "__dict__", ()) if name not in LEFT_OUT]


def _of_instant(instant: object, now: float) -> object:
    match instant:
        case float():
            return instant > now
        case dict():
            return tuple(map(repr, instant))
        case _:
            return instant


def _by_fields(kind: type) -> _How:
    """Return how things of a kind are told apart by what their fields are."""
    if kind in _BY_FIELDS:
        return _BY_FIELDS[kind]
    names = [name for name in _names_of(kind) if name not in LEFT_OUT]
    instants = [name for name in names if _is_instant(name)]
    others = [name for name in names if not _is_instant(name)]

    def how(teller: Teller, thing: Any) -> object:
        if (known := teller.told.get(id(thing))) is not None:
            return kind.__name__, known
        teller.told[id(thing)] = len(teller.told)
        of, now = teller.of, teller.now
        parts = [of(getattr(thing, name)) for name in others or _attributes_of(thing)]
        parts += [_of_instant(getattr(thing, name), now) for name in instants]
        return kind.__name__, *parts

    _BY_FIELDS[kind] = how
    return how


def pending_name(world: HostWorld, action: Action) -> str:
    """Return what tells a pending action apart from others: not the name of its operation."""
    if isinstance(action, StartOperation):
        return f"{action.rank} {action.verb.value}"
    tenancy = action.tenancy  # type: ignore[union-attr]  # all others that may be pending have one
    there = world.machine.tenancies.all.get(tenancy)
    pending = there.participant.pending if there is not None else None
    is_waited_for = pending is not None and pending.op == action.op  # type: ignore[union-attr]
    return f"{type(action).__name__} {tenancy} {is_waited_for}"


def digest_of(world: HostWorld) -> bytes:
    """Return 16 bytes that are the same for states which nothing tells apart."""
    of = Teller(world).of
    told = (
        of(world.machine),
        of(world.clients),
        of(world.processes),
        sorted(repr((key, of(record))) for key, record in world.journal.items()),
        sorted(pending_name(world, action) for action in world.pending),
        world.requests.last,  # type: ignore[attr-defined]  # a `Numbering`
    )
    # Version 2 has no references, by which equal things could differ.
    return blake2b(marshal.dumps(told, 2), digest_size=16).digest()


# --- states as bytes ------------------------------------------------------------------------------


def still_of(world: HostWorld) -> Still:
    """Return a host that goes on where another one is, as a search has it."""
    still: Still = object.__new__(Still)
    for each in fields(HostWorld):
        setattr(still, each.name, getattr(world, each.name))
    still.auto, still.requests = False, Numbering(1000)
    still.machine.leasing.random = Steady()
    return still


def freeze(world: Still) -> bytes:
    """Return a host's state as bytes, for `wake` in this process."""
    world.machine.story.clear()
    world.machine.leasing.out = []
    world.pending.sort(key=lambda action: pending_name(world, action))
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = _REDUCE
    pickler.dump([getattr(world, name) for name in CHANGING])
    return buffer.getvalue()


def wake(template: Still, state: bytes) -> Still:
    """Return a host in a state that was stored."""
    world: Still = object.__new__(Still)
    for each in fields(HostWorld):
        setattr(world, each.name, getattr(template, each.name))
    for name, item in zip(CHANGING, pickle.loads(state), strict=True):
        setattr(world, name, item)
    world.inbox, world.done, world.over, world.outbox = deque(), [], [], []
    return world
