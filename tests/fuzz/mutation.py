"""Inputs without coverage: random ones, and variations of those that brought something new."""

from __future__ import annotations

from random import Random

LONGEST = 400
KEPT_MOST = 2000


class Mutator:
    """Makes inputs; the same seed and the same news make the same ones."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._kept: list[bytes] = []

    def next(self) -> bytes:
        """Returns the next input."""
        rng = self._rng
        if not self._kept or rng.random() < 0.3:
            return rng.randbytes(rng.randint(1, LONGEST))
        data = bytearray(rng.choice(self._kept))
        for _ in range(rng.randint(1, 4)):
            self._change(data)
        return bytes(data[:LONGEST])

    def keep(self, data: bytes) -> None:
        """Notes an input that brought something new."""
        if len(self._kept) < KEPT_MOST:
            self._kept.append(data)
        else:
            self._kept[self._rng.randrange(KEPT_MOST)] = data

    def _change(self, data: bytearray) -> None:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(5)
        if what == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif what == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 16))
        elif what == 2:
            del data[at : at + rng.randint(1, 16)]
        elif what == 3:
            other = rng.choice(self._kept)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        else:
            data[at:at] = data[at : at + rng.randint(1, 32)]
