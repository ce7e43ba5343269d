"""A participant to test on, and shorthand for what it says and hears."""

from __future__ import annotations

from dataclasses import dataclass, field

from world import D1, G1, HOST, LIMITS, job

from tsliced.core.actions import (
    FreeMemory,
    Note,
    RankRecord,
    ReserveHostMemory,
    ScanGroups,
    SettleHostMemory,
    StartOperation,
)
from tsliced.core.events import GroupsScanned, HooksRun, MemoryReserved, OperationFinished
from tsliced.core.model import (
    Counter,
    DeviceId,
    Earlier,
    FoundRank,
    Goal,
    JobKey,
    OpId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    SessionId,
    Stamp,
    TenancyKey,
    Verb,
)
from tsliced.core.numbers import Numbers
from tsliced.core.participant import Participant
from tsliced.core.rank import Rank
from tsliced.core.signals import Effect, Order, Report

KEY = TenancyKey(job("a"), (G1,))
P1, P2, P3 = (ProcessId(pid, 1) for pid in (1, 2, 3))
RUNNING, FROZEN, PARKED = RankState.RUNNING, RankState.FROZEN, RankState.PARKED
SESSION = SessionId("s")
#: Others like it were seen to leave and to come back.
TRIED = Earlier(qualified=True)


def found(
    process: ProcessId,
    *devices: DeviceId,
    owner: JobKey | None = KEY.job,
    device_bytes: int = 100,
) -> FoundRank:
    return FoundRank(
        process=process,
        job=owner,
        devices=frozenset(devices or {D1}),
        device_bytes=device_bytes,
        uid=1000,
        name="python",
        earlier=TRIED,
    )


@dataclass(slots=True)
class Lab:
    """A participant, and shorthand for what it says and hears."""

    participant: Participant = field(
        default_factory=lambda: Participant(
            host=HOST,
            tenancy=KEY,
            numbers=Numbers(generation=1, ceiling=0, block=8),
            limits=LIMITS,
        )
    )
    epoch: int = 0
    #: What was last told of hooks.
    told: Note | None = None

    def rank(self, process: ProcessId, state: RankState = RUNNING, *devices: DeviceId) -> ProcessId:
        on = frozenset(devices or {D1})
        self.participant.ranks[process] = Rank(
            id=RankId(HOST, process),
            devices=on,
            device_bytes=100,
            state=state,
            parked_bytes=90 if state is PARKED else 0,
            earlier=TRIED,
        )
        return process

    def stamp(self, step: int = 0) -> Stamp:
        return Stamp(0, Counter(1, self.epoch), step)

    def order(self, goal: Goal, *, step: int = 0) -> list[Effect]:
        """Order a goal; step 0 is a new epoch."""
        self.epoch += step == 0
        order = Order(host=HOST, tenancy=KEY, stamp=self.stamp(step), goal=goal)
        return self._checked(self.participant.on_order(order, now=0.0))

    def scanned(
        self,
        op: int,
        *found: FoundRank,
        unlisted: dict[DeviceId, int] | None = None,
        failed: Reason | None = None,
    ) -> list[Effect]:
        for process in found:
            if process.job == KEY.job:
                self.participant.put(process)
        seen = tuple((unlisted or {}).items())
        event = GroupsScanned(op=OpId(op), found=found, unlisted=seen, failure=failed)
        return self._checked(self.participant.on_scanned(event, now=0.0))

    def reserved(self, op: int, failed: Reason | None = None) -> list[Effect]:
        event = MemoryReserved(op=OpId(op), failure=failed)
        return self._checked(self.participant.on_step(event, now=0.0))

    def hooks(self, op: int, failed: Reason | None = None, *, after_s: float = 0.0) -> list[Effect]:
        """End a call of hooks; return what follows from it, behind the note."""
        event = HooksRun(op=OpId(op), failure=failed)
        note, *rest = self._checked(self.participant.on_step(event, now=after_s))
        assert isinstance(note, Note)
        assert note.kind == "hooks"
        assert note.facts["reason"] == (str(failed) if failed else None)
        self.told = note
        return rest

    def ended(
        self, op: int, process: ProcessId, state: RankState, failed: Reason | None = None
    ) -> list[Effect]:
        """End an operation; return what follows from it, behind the note and the record."""
        event = OperationFinished(
            op=OpId(op), rank=RankId(HOST, process), observed=state, failure=failed, moved_bytes=90
        )
        note, record, *rest = self._checked(self.participant.on_operation(event, now=0.0))
        assert isinstance(note, Note)
        assert isinstance(record, RankRecord)
        assert (record.state, record.verb) == (state, None)
        return rest

    def _checked(self, effects: list[Effect]) -> list[Effect]:
        self.participant.check_invariants()
        return effects

    def start(
        self, op: int, process: ProcessId, verb: Verb, *, peer_frozen: bool = False
    ) -> list[Effect]:
        """Return what starts an operation: first its record."""
        rank = self.participant.ranks[process]
        limit_s = LIMITS.peer_freeze_timeout_s if peer_frozen else LIMITS.freeze_timeout_s
        start = StartOperation(
            op=OpId(op),
            rank=rank.id,
            tenancy=KEY,
            verb=verb,
            timeout_s=limit_s if verb is Verb.FREEZE else None,
        )
        record = RankRecord(
            rank=rank.id,
            tenancy=KEY,
            devices=rank.devices,
            device_bytes=rank.device_bytes,
            state=rank.state,
            verb=verb,
        )
        return [start] if verb is Verb.QUERY else [record, start]

    def at(self, *, step: int = 0, failed: Reason | None = None) -> Report:
        """Return the answer to the standing order."""
        ranks = self.participant.ranks.values()
        return Report(
            host=HOST,
            tenancy=KEY,
            stamp=self.stamp(step),
            failure=failed,
            states=tuple((rank.id.process, rank.state) for rank in ranks),
        )

    def freeze_one(self) -> None:
        """Freeze a single rank, up to the second scan."""
        self.order(Goal.FROZEN)
        self.scanned(1, found(P1))
        self.reserved(2)
        self.ended(3, P1, FROZEN)

    def park_one(self) -> None:
        """Go on from there until all of it is off."""
        self.order(Goal.OFF, step=1)
        self.reserved(5)
        self.ended(6, P1, PARKED)
        self.scanned(7)


def scan(op: int, *gone: ProcessId) -> ScanGroups:
    # Half of what each has may stay: more would be no snapshot.
    left = 50 if gone else 0
    return ScanGroups(op=OpId(op), tenancy=KEY, expect_gone=frozenset(gone), residue_bytes=left)


FREE_DEVICE = FreeMemory(tenancy=KEY, host=False, device=True)
PARKED_NOW = SettleHostMemory(tenancy=KEY, parked=True)
BACK_NOW = SettleHostMemory(tenancy=KEY, parked=False)


def reserve_host(op: int, *processes: ProcessId) -> ReserveHostMemory:
    demands = tuple((RankId(HOST, process), 100) for process in processes)
    return ReserveHostMemory(op=OpId(op), tenancy=KEY, demands=demands)
