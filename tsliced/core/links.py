"""Which other hosts are there, as far as links tell.

Safety rule: a host that is silent may be alive, with all that it has. Only a proof (`dead`) ends
what it holds: another boot of its system, or an operator's word.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tsliced.core.actions import HostRecord
from tsliced.core.model import HostName


@dataclass(slots=True, kw_only=True)
class Links:
    """The other hosts. Only `hosts.Hosts` changes it."""

    up: set[HostName] = field(default_factory=set)
    #: Silent for longer than a host may be.
    lost: set[HostName] = field(default_factory=set)
    #: Nothing that was there is left, and who says so; until they connect again.
    dead: dict[HostName, str] = field(default_factory=dict)
    #: The latest run of each one's system, ...
    boots: dict[HostName, str] = field(default_factory=dict)
    #: ... and of its daemon.
    incarnations: dict[HostName, str] = field(default_factory=dict)

    def regain(self, record: HostRecord) -> None:
        """After a restart: know again what was known of a host."""
        host = record.host
        for runs, run in ((self.boots, record.boot), (self.incarnations, record.incarnation)):
            if run:
                runs[host] = run
        if record.dead_by is not None:
            self.dead[host] = record.dead_by

    def record(self, host: HostName) -> HostRecord:
        """Return what must be kept of a host."""
        return HostRecord(
            host=host,
            boot=self.boots.get(host, ""),
            incarnation=self.incarnations.get(host, ""),
            dead_by=self.dead.get(host),
        )
