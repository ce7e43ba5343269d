"""Which leases the code that runs now is inside of.

Threads and tasks that share a client do not nest in each other's leases: what one of them asks for
while another one holds something is asked for side by side. A task that was started inside of a
lease is inside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar

from libtimeslice.session import Grant

_inside: ContextVar[tuple[Grant, ...]] = ContextVar("libtimeslice_inside", default=())


def enter(grants: Iterable[Grant]) -> None:
    """Notes that the code which runs now is inside of leases on these grants, until they end."""
    _inside.set((*(grant for grant in _inside.get() if grant.live), *grants))


def inside_of(held: Mapping[str, Grant]) -> list[str]:
    """Returns the names of those of a client's leases that the code which runs now is inside of."""
    entered = _inside.get()
    if not entered:
        return []
    return list(dict.fromkeys(g.lease for g in entered if held.get(g.lease) is g))
