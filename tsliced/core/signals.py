"""What one machine of the core tells another; the shape of messages between hosts.

A `Signal` never leaves `Machine.handle`: it is delivered to its addressee before the call returns.
`Order` and `Report` are signals to the local participant and messages to one on another host.
"""

from __future__ import annotations

from typing import TypeAlias

from tsliced.core.actions import Action, Record
from tsliced.core.model import (
    Goal,
    GroupName,
    HostName,
    ProcessId,
    RankState,
    Reason,
    Stamp,
    TenancyKey,
)
from tsliced.core.value import value


@value
class Order:
    """A coordinator wants a tenancy's ranks on `host` to be at `goal`."""

    host: HostName
    tenancy: TenancyKey
    stamp: Stamp
    goal: Goal


@value
class Report:
    """A participant's answer to the order with this stamp, given with no operation in flight."""

    host: HostName
    tenancy: TenancyKey
    stamp: Stamp
    #: None: AT the goal. Else CANNOT, and why.
    failure: Reason | None
    states: tuple[tuple[ProcessId, RankState], ...]
    #: Groups of the tenancy on which this host obeys somebody else.
    disowned: tuple[GroupName, ...] = ()
    #: To OFF: a rank there is of a kind that nobody has seen leave and come back.
    untried: bool = False


@value
class Evicted:
    """A tenancy is off every device."""

    tenancy: TenancyKey


@value
class EvictionFailed:
    """A tenancy was turned back and runs as before."""

    tenancy: TenancyKey
    reason: Reason


@value
class Admitted:
    """A tenancy runs on its devices. `restored`: it had been parked."""

    tenancy: TenancyKey
    restored: bool


@value
class AdmissionFailed:
    """A tenancy could not be brought on and is off again."""

    tenancy: TenancyKey
    reason: Reason


@value
class Blocked:
    """A tenancy can be moved neither off nor on; it stays where it is."""

    tenancy: TenancyKey
    reason: Reason


Signal: TypeAlias = Order | Report | Evicted | EvictionFailed | Admitted | AdmissionFailed | Blocked

#: What a machine of the core returns.
Effect: TypeAlias = Record | Action | Signal
