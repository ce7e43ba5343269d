"""A rank of torch (``torch_rank.py``) with state on a device too, which the driver has to move.

What moves its tensors fails or takes its time when it is told to.
"""

from __future__ import annotations

import time

import rank
import torch_rank  # noqa: F401 - its commands

from libtimeslice.errors import Refused
from libtimeslice.parking import Parking
from libtimeslice.protocol import Message

_obey = Parking.obey
_faults: dict[str, float | None] = {}


def _obey_with_faults(self: Parking, order: str) -> Message:
    """Fails where memory is short, or takes its time."""
    seconds = _faults.get(order, 0.0)
    if seconds is None:
        raise Refused(f"{order} does not work", code="no_host_memory")
    time.sleep(seconds)
    return _obey(self, order)


Parking.obey = _obey_with_faults  # type: ignore[method-assign]  # this process is the test's own


@rank.command
def order_takes(seconds: dict[str, float | None]) -> None:
    """Says how long each order to its tensors takes from now on; None: it fails."""
    _faults.clear()
    _faults.update(seconds)


if __name__ == "__main__":
    rank.main()
