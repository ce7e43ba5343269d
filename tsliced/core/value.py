"""The decorator of the core's immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def value(cls: type[T]) -> type[T]:
    """Make a dataclass of keywords that is frozen for the type checker.

    At run time it is not: a frozen dataclass takes nearly three times as long to be made, and every
    request makes a dozen of them. mypy, which checks the tests too, refuses any assignment.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)
