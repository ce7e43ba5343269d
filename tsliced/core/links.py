"""Which other hosts are there, as far as links tell.

Safety rule: a host that is silent may be alive, with all that it has. Only a proof (`dead`) ends
what it holds: another boot of its system, or an operator's word.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.model import HostName


@dataclass(slots=True, kw_only=True)
class Links:
    """The other hosts. Only `hosts.Hosts` changes it."""

    up: set[HostName] = field(default_factory=set)
    #: Silent for longer than a host may be.
    lost: set[HostName] = field(default_factory=set)
    #: Nothing that was there is left; until they connect again.
    dead: set[HostName] = field(default_factory=set)
    #: The latest run of each one's system.
    boots: dict[HostName, str] = field(default_factory=dict)
