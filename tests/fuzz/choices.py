"""Bytes read as choices, so that a fuzzer of bytes is one of whole conversations.

The same bytes make the same choices, whoever came up with them: atheris, hypothesis or `mutation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Deals choices out. When the bytes are used up, all that is left are zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def spent(self) -> bool:
        """Whether the bytes are used up."""
        return self._at >= len(self._data)

    def byte(self) -> int:
        at, self._at = self._at, self._at + 1
        return self._data[at] if at < len(self._data) else 0

    def below(self, limit: int) -> int:
        """A number below a limit of at most 256."""
        return self.byte() % limit

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def some_bytes(self) -> bytes:
        """Up to 255 bytes, as they are."""
        count = self.byte()
        start, self._at = self._at, self._at + count
        return self._data[start : self._at]
