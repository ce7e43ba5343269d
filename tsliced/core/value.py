"""The decorator of the core's immutable values, a quicker way to make them, and its enums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, ParamSpec, TypeVar, dataclass_transform

P = ParamSpec("P")
T = TypeVar("T")

#: What is made more quickly by the interpreter itself.
_LITERALS: dict[object, str] = {dict: "{}", list: "[]"}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a dataclass of keywords that is frozen for the type checker.

    At run time it is not: a frozen dataclass takes nearly three times as long to be made, and every
    request makes a dozen of them. mypy, which checks the tests too, refuses any assignment.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


class Word(Enum):
    """An enum whose members are found in sets and dicts by identity, which is how they compare.

    The standard one hashes their names, by a function in Python that takes longer than the rest of
    such a look, and a switch takes a hundred of them.
    """

    __hash__ = object.__hash__


def maker(cls: Callable[P, T]) -> Callable[P, T]:
    """Return a function that does what a call of a dataclass with slots and keywords does.

    In a third of the time: a class puts its keywords into a dict and takes them out again, which
    for ten fields costs 0.3 us, and a function does not. For what every request makes.
    """
    names: dict[str, Any] = {"new": object.__new__, "cls": cls, "MISSING": MISSING}
    parameters, body = [], []
    for field in fields(cls):  # type: ignore[arg-type]  # a dataclass, seen as what its call is
        name, given = field.name, field.name
        if field.default_factory is not MISSING:
            names[f"make_{name}"] = field.default_factory
            empty = _LITERALS.get(field.default_factory, f"make_{name}()")
            given = f"{empty} if {name} is MISSING else {name}"
            parameters.append(f"{name}=MISSING")
        elif field.default is not MISSING:
            names[f"default_{name}"] = field.default
            parameters.append(f"{name}=default_{name}")
        else:
            parameters.append(name)
        body.append(f"    self.{name} = {given}\n")
    source = f"def make(*, {', '.join(parameters)}):\n    self = new(cls)\n"
    exec(source + "".join(body) + "    return self\n", names)
    made: Callable[P, T] = names["make"]
    return made
