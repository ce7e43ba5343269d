"""One rank's device context and its one operation in flight.

The physical truth lives here: the result of an operation is never ignored, whatever became of the
order that it was started for.

Safety rule: one operation in flight per rank; a state is believed only as the driver reported it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsliced.core.actions import RankRecord
from tsliced.core.events import OperationFinished
from tsliced.core.model import DeviceId, Earlier, Epoch, OpId, RankId, RankState, TenancyKey, Verb
from tsliced.core.value import maker, value

#: What a verb may be applied to. QUERY is for all.
LEGAL_FROM = {
    Verb.FREEZE: RankState.RUNNING,
    Verb.SNAPSHOT: RankState.FROZEN,
    Verb.RESTORE: RankState.PARKED,
    Verb.THAW: RankState.FROZEN,
}


_make_record = maker(RankRecord)


@value
class Operation:
    """A backend call in flight."""

    op: OpId
    verb: Verb
    #: The order that it was started for; its failure answers that one only.
    epoch: Epoch
    started_at: float


make_operation = maker(Operation)


@dataclass(slots=True, kw_only=True)
class Rank:
    """A process of a tenancy, as far as its devices are concerned."""

    id: RankId
    devices: frozenset[DeviceId]
    device_bytes: int
    state: RankState
    operation: Operation | None = None
    #: The process is gone; the rank stays only until its operation has ended.
    exited: bool = False
    #: Moved by its latest snapshot.
    parked_bytes: int = 0
    #: What it has on each device; empty where it is not known how it is divided.
    bytes_on: tuple[tuple[DeviceId, int], ...] = ()
    #: What its latest snapshot left on each device, while it is parked.
    residue: tuple[tuple[DeviceId, int], ...] = ()
    #: How long a watchdog in it waits, by what it was started with; None: not known.
    watchdog_s: float | None = None
    #: It is frozen before those that do not: see `FoundRank`.
    drains: bool = False
    #: What was seen of its kind; None: nobody has looked.
    earlier: Earlier | None = None

    @property
    def is_or_comes_on(self) -> bool:
        """Whether its memory must be assumed to be on its devices, or to be there before long."""
        comes = self.operation is not None and self.operation.verb is Verb.RESTORE
        return self.state.holds_device or comes

    @property
    def residue_bytes(self) -> int:
        """What its latest snapshot left on all its devices."""
        return sum(left for _, left in self.residue)

    def needs(self) -> tuple[tuple[DeviceId, int], ...]:
        """Return the device memory that a restore takes beyond what was left there."""
        known, left = dict(self.bytes_on), dict(self.residue)
        rest = max(0, self.parked_bytes - sum(known.values()))
        # How it is divided is not known: evenly.
        return tuple(
            (device, max(0, known.get(device, 0) + rest // len(self.devices) - left.get(device, 0)))
            for device in sorted(self.devices)
        )

    def start(self, operation: Operation) -> None:
        """Note that an operation is in flight."""
        assert self.operation is None, "one operation per rank"
        legal = LEGAL_FROM.get(operation.verb)
        assert legal is None or self.state is legal, f"{operation.verb} from {self.state}"
        self.operation = operation

    def finish(self, event: OperationFinished) -> Operation:
        """Take in a result, and return the operation that it ends."""
        operation = self.operation
        assert operation is not None
        assert operation.op == event.op
        self.operation = None
        self.state = event.observed
        if operation.verb is Verb.SNAPSHOT and event.observed is RankState.PARKED:
            self.parked_bytes = event.moved_bytes or self.device_bytes
        elif event.observed is not RankState.PARKED:
            self.parked_bytes, self.residue = 0, ()
        return operation

    def record(self, tenancy: TenancyKey) -> RankRecord:
        """Return what must be kept of this rank."""
        return _make_record(
            rank=self.id,
            tenancy=tenancy,
            devices=self.devices,
            device_bytes=self.device_bytes,
            bytes_on=self.bytes_on,
            residue=self.residue,
            state=self.state,
            verb=self.operation.verb if self.operation else None,
        )
