"""Says whether two training runs came to the same, to the bit.

python -m examples.grpo.compare alone.0 shared.0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

#: What runs say of themselves that is not theirs to keep.
NOT_COMPARED = {"moved"}


def load(path: str | Path) -> dict[str, Any]:
    """Returns what a run saved, but for what is not compared."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return {name: value for name, value in saved.items() if name not in NOT_COMPARED}


def differences(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Yields the names of all that is not the same in both, to the bit."""
    if type(one) is not type(other):
        yield name
    elif isinstance(one, dict):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{name}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield name
        for number, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from differences(left, right, f"{name}[{number}]")
    elif not _same(one, other):
        yield name


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(_bytes(one), _bytes(other)))
    # Of floats, repr tells all bits apart that matter: 0.0 and -0.0 too.
    return repr(one) == repr(other)


def _bytes(tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def main() -> int:
    """Prints what differs between two files, and returns 1 if anything does."""
    one, other = sys.argv[1:]
    names = sorted(differences(load(one), load(other)))
    print("\n".join(f"differs: {name}" for name in names) or "the same, to the bit")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
