"""What one host does for one tenancy: drives its local ranks to the ordered goal.

Rules:

* Orders are goals. A repeated order is answered again; one with a lower stamp is refused.
* AT and CANNOT are said only when none of its operations is in flight, with the observed states.
* FROZEN: find the ranks, reserve host memory, quiesce, freeze serially, look for late ranks.
  OFF: snapshot, in parallel where ranks share no device; then the devices are seen free.
  RESTORED: the devices are seen free of others and have room; then restore. ON: thaw, resume.
* A failed operation answers only the epoch that it was started for; what the driver observed
  counts always.

Safety rule: nothing is restored while anybody else is seen on the devices, and nothing is called
off whose memory is still seen there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from tsliced.core.actions import (
    FreeMemory,
    Note,
    RankEndedRecord,
    ReserveDeviceMemory,
    ReserveHostMemory,
    RunHooks,
    ScanGroups,
    SettleHostMemory,
    StartOperation,
)
from tsliced.core.events import GroupsScanned, HooksRun, MemoryReserved, OperationFinished
from tsliced.core.model import (
    Cause,
    CoreLimits,
    DeviceId,
    Epoch,
    FoundRank,
    Goal,
    GroupName,
    HostName,
    OpId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    SessionId,
    TenancyKey,
    Verb,
)
from tsliced.core.numbers import Numbers
from tsliced.core.rank import Operation, Rank, make_operation
from tsliced.core.signals import Effect, Order, Report
from tsliced.core.value import Word, maker, value

_make_note, _make_report = maker(Note), maker(Report)
_make_scan, _make_start = maker(ScanGroups), maker(StartOperation)

#: A job that makes processes faster than they can be frozen is given up on.
MAX_SCANS = 8

#: As with `RoundState`: every grant asks for it.
_PARKED = RankState.PARKED

#: Nothing is done with a rank in one of these before it is known where it is, or at all.
_ADRIFT = (RankState.UNKNOWN, RankState.FAILED)


class Step(Word):
    """A preparation of a goal that is done once for an order."""

    SCAN = "scan"
    RESERVE = "reserve"
    HOOKS = "hooks"
    RESCAN = "rescan"


@value
class Pending:
    """A step in flight; its single result carries `op`."""

    op: OpId
    step: Step
    order: Order
    began_at: float
    #: HOOKS: they are told to resume, not to quiesce.
    resumes: bool = False


_make_pending = maker(Pending)


@dataclass(slots=True, kw_only=True)
class Participant:
    """One tenancy's ranks on this host. Mutate it only through its `on_...` methods."""

    host: HostName
    tenancy: TenancyKey
    numbers: Numbers
    limits: CoreLimits
    ranks: dict[ProcessId, Rank] = field(default_factory=dict)
    #: Sessions of the job whose processes can quiesce and resume.
    hook_sessions: dict[SessionId, None] = field(default_factory=dict)
    #: Says who of another job is on the devices, or on its way onto them.
    company: Callable[[TenancyKey], RankId | None] = lambda _tenancy: None
    #: Groups that are not the tenancy's and that a rank of it has a context in nevertheless.
    beyond: dict[GroupName, RankId] = field(default_factory=dict)
    order: Order | None = None
    answer: Report | None = None
    pending: Pending | None = None
    #: Hooks have been told to quiesce and not yet to resume.
    quiesced: bool = False
    #: It has left its devices, or never was there: who is on them now is not known.
    away: bool = True
    #: Why its ranks could not be snapshotted if somebody waited for their devices.
    shortage: Reason | None = None
    #: The epoch in which it thawed by itself what it was to freeze.
    alone: Epoch | None = None
    _failure: Reason | None = None
    #: A thaw has failed since the order's epoch began.
    _thaw_failed: bool = False
    _done: set[Step] = field(default_factory=set)
    _scans: int = 0
    #: Seen on the devices before the move, with no process listed for it: bytes by device.
    _unlisted: dict[DeviceId, int] = field(default_factory=dict)
    #: Reserved for in the host memory ledger: bytes by rank.
    _reserved: dict[ProcessId, int] = field(default_factory=dict)
    #: How notes name the tenancy.
    _names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = self.tenancy.names()

    # --- events -------------------------------------------------------------------------------

    def on_order(self, order: Order, *, now: float) -> list[Effect]:
        """Take an order; repeat the answer to one that was answered."""
        if self.order is not None and order.stamp < self.order.stamp:
            return []
        if self.order is not None and order.stamp == self.order.stamp:
            return [self.answer] if self.answer else []
        if self.order is None or order.stamp.epoch != self.order.stamp.epoch:
            self._failure, self._thaw_failed = None, False
            self._unlisted = {}
        self.order, self.answer = order, None
        # What is to be frozen is on its devices, and goes back to where it was.
        self.away = self.away and order.goal is not Goal.FROZEN
        if order.goal in (Goal.FROZEN, Goal.OFF):
            # What was promised is asked for once more, before anything is touched and again when it
            # can grow no more: others may have taken it unasked.
            self._reserved.clear()
        self._done.clear()
        self._scans = 0
        return self._drive(now)

    def thaw_alone(self, order: Order, *, now: float) -> list[Effect]:
        """Let what is frozen run: whoever ordered it is silent. That epoch is answered CANNOT.

        `order`: the one that stands, by the journal; a restart has forgotten it.
        """
        if self.alone == order.stamp.epoch:
            return []
        if self.order is None or self.order.stamp < order.stamp:
            self.order = order
        self.alone, self.answer = order.stamp.epoch, None
        self._fail(Reason(cause=Cause.SILENT, text="it thawed alone: its coordinator was silent"))
        return self._drive(now)

    def on_scanned(self, event: GroupsScanned, *, now: float) -> list[Effect]:
        """Go on after a scan; the ranks that it found have been put in before."""
        if not self._take_pending(event.op, event.failure):
            return self._drive(now)
        out = self._judge(event) if event.failure is None else []
        return out + self._drive(now)

    def on_step(self, event: MemoryReserved | HooksRun, *, now: float) -> list[Effect]:
        """Go on after a reservation or after hooks."""
        pending = self.pending
        self._take_pending(event.op, event.failure)
        if pending is None or pending.step is not Step.HOOKS:
            return self._drive(now)
        return [self._note_hooks(pending, event.failure, now), *self._drive(now)]

    def on_operation(self, event: OperationFinished, *, now: float) -> list[Effect]:
        """Take in what became of a rank."""
        rank = self.ranks[event.rank.process]
        operation = rank.finish(event)
        if operation.verb is Verb.RESTORE and rank.state is not RankState.PARKED:
            # The host memory that it had is free for all again.
            self._reserved.pop(rank.id.process, None)
        out: list[Effect] = [self._note(rank, operation, event)]
        if rank.exited:
            out += self._drop(rank)
        else:
            out.append(rank.record(self.tenancy))
            if event.failure and self.order and self.order.stamp.epoch == operation.epoch:
                self._fail(event.failure)
                self._thaw_failed |= operation.verb is Verb.THAW
        return out + self._drive(now)

    def on_rank_exited(self, process: ProcessId, *, now: float) -> list[Effect]:
        """Drop a rank whose process is gone, once its operation has ended."""
        rank = self.ranks[process]
        rank.exited = True
        if rank.operation is not None:
            return []
        return self._drop(rank) + self._drive(now)

    def put(self, found: FoundRank) -> list[Effect]:
        """Take in a process that was seen to be a rank of this tenancy."""
        rank = self.ranks.get(found.process)
        if rank is None:
            rank = Rank(
                id=RankId(self.host, found.process),
                devices=found.devices,
                device_bytes=found.device_bytes,
                bytes_on=found.bytes_on,
                state=found.state,
                watchdog_s=found.watchdog_s,
                drains=found.drains,
                earlier=found.earlier,
            )
            self.ranks[found.process] = rank
            return [rank.record(self.tenancy)]
        rank.watchdog_s = found.watchdog_s if found.watchdog_s is not None else rank.watchdog_s
        if rank.state is RankState.PARKED or rank.operation is not None:
            return []
        grown = not found.devices <= rank.devices
        rank.drains = found.drains or rank.drains
        rank.earlier = found.earlier or rank.earlier
        rank.devices |= found.devices
        if found.device_bytes:
            rank.device_bytes, rank.bytes_on = found.device_bytes, found.bytes_on
        return [rank.record(self.tenancy)] if grown else []

    # --- what is asked of it from inside ------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something that it started has not ended."""
        return self.pending is not None or any(r.operation for r in self.ranks.values())

    @property
    def on_devices(self) -> bool:
        """Whether a rank is known whose memory must be assumed to be on a device."""
        return any(rank.state is not _PARKED for rank in self.ranks.values())

    @property
    def switch_s(self) -> float | None:
        """What a switch of all its ranks takes, by what others of their kinds took.

        Those that share a device move one after the other.
        """
        by_device: dict[DeviceId, float] = {}
        for rank in self.ranks.values():
            if rank.earlier is not None and rank.earlier.switch_s is not None:
                for device in rank.devices:
                    by_device[device] = by_device.get(device, 0.0) + rank.earlier.switch_s
        return max(by_device.values(), default=None)

    @property
    def owes_resume(self) -> bool:
        """Whether a session was told to quiesce and waits to be told to resume."""
        return self.quiesced and bool(self.hook_sessions)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        if self.answer is not None:
            assert self.order is not None, "only orders are answered"
            assert self.answer.stamp == self.order.stamp, "the standing order is answered"
            assert not self.busy, "an answer waits until nothing is in flight"
        if self.order is None:
            states = {rank.state for rank in self.ranks.values()}
            assert RankState.FROZEN not in states, "nobody is frozen without an order"

    # --- the way to the goal ------------------------------------------------------------------

    def _drive(self, now: float) -> list[Effect]:
        order = self.order
        if order is None or self.answer is not None or self.pending is not None:
            return []
        adrift: list[Rank] = []
        for rank in self.ranks.values():
            if rank.operation is not None:
                return []
            if rank.state in _ADRIFT and not rank.exited:
                adrift.append(rank)
        runs_alone = self.alone == order.stamp.epoch and not self._thaw_failed
        if runs_alone and (out := self._thaw_and_resume(order, now)):
            return out
        if self._failure is not None:
            return self._give_answer(order)
        if adrift:
            return self._look_after(adrift, order, now)
        match order.goal:
            case Goal.FROZEN:
                out = self._toward_frozen(order, now)
            case Goal.OFF:
                out = self._toward_off(order, now)
            case Goal.RESTORED:
                out = self._toward_restored(order, now)
            case Goal.ON:
                out = self._toward_on(order, now)
            case Goal.QUERY:
                out = []
            case _:
                assert_never(order.goal)
        if out:
            return out
        return self._give_answer(order)

    def _look_after(self, adrift: list[Rank], order: Order, now: float) -> list[Effect]:
        """Ask where ranks are, or give up for those that nothing can be done with."""
        if unknown := [rank for rank in adrift if rank.state is RankState.UNKNOWN]:
            return [effect for rank in unknown for effect in self._start(rank, Verb.QUERY, now)]
        text = "its device context is broken for good; end the process"
        self._fail(Reason(cause=Cause.FAILED, text=text, rank=adrift[0].id))
        return self._give_answer(order)

    def _toward_frozen(self, order: Order, now: float) -> list[Effect]:
        if Step.SCAN not in self._done:
            return [self._scan(order, Step.SCAN, now)]
        moving = [rank for rank in self.ranks.values() if rank.state is not RankState.PARKED]
        if self._short_of_host_memory(moving):
            return [self._reserve_host_memory(order, moving, now)]
        if Step.HOOKS not in self._done and self.hook_sessions and moving:
            self.quiesced = True
            return [self._run_hooks(order, now, quiesce=True)]
        # Serially: the first freeze waits for its collective, the next ones fall just after it.
        for rank in self._to_freeze():
            return self._start(rank, Verb.FREEZE, now)
        if Step.RESCAN not in self._done:
            return [self._scan(order, Step.RESCAN, now)]
        return []

    def _toward_off(self, order: Order, now: float) -> list[Effect]:
        # A rank that came while the others were being snapshotted is taken along.
        for rank in self._to_freeze():
            return self._start(rank, Verb.FREEZE, now)
        frozen = self._in_state(RankState.FROZEN)
        if self._short_of_host_memory(frozen):
            return [self._reserve_host_memory(order, frozen, now)]
        if frozen:
            return self._start_disjoint(frozen, Verb.SNAPSHOT, now)
        if Step.RESCAN not in self._done:
            return [self._scan(order, Step.RESCAN, now)]
        settle = SettleHostMemory(tenancy=self.tenancy, parked=True)
        free = FreeMemory(tenancy=self.tenancy, host=False, device=True)
        return [settle, free, *self._give_answer(order)]

    def _toward_restored(self, order: Order, now: float) -> list[Effect]:
        parked = self._in_state(RankState.PARKED)
        if Step.SCAN not in self._done and (parked or self.away):
            return [self._scan(order, Step.SCAN, now)]
        if Step.RESERVE not in self._done and parked:
            return [self._reserve_device_memory(order, parked, now)]
        if parked and (other := self.company(self.tenancy)) is not None:
            text = f"pid {other.process.pid} of another job is on the devices, or comes onto them"
            self._fail(Reason(cause=Cause.OCCUPIED, text=text))
            return []
        return self._start_disjoint(parked, Verb.RESTORE, now)

    def _toward_on(self, order: Order, now: float) -> list[Effect]:
        if parked := self._in_state(RankState.PARKED):
            text = "it is still parked while others are to run"
            self._fail(Reason(cause=Cause.DRIVER, text=text, rank=parked[0].id))
            return []
        if out := self._thaw_and_resume(order, now):
            return out
        self.quiesced = False
        settle = SettleHostMemory(tenancy=self.tenancy, parked=False)
        free = FreeMemory(tenancy=self.tenancy, host=False, device=True)
        return [settle, free, *self._give_answer(order)]

    def _thaw_and_resume(self, order: Order, now: float) -> list[Effect]:
        if frozen := self._in_state(RankState.FROZEN):
            return [effect for rank in frozen for effect in self._start(rank, Verb.THAW, now)]
        if self.owes_resume:
            return [self._run_hooks(order, now, quiesce=False)]
        return []

    def _start_disjoint(self, ranks: list[Rank], verb: Verb, now: float) -> list[Effect]:
        """Start `verb` on as many of the ranks as share no device with another."""
        out: list[Effect] = []
        taken: set[DeviceId] = set()
        for rank in ranks:
            if taken.isdisjoint(rank.devices):
                taken |= rank.devices
                out += self._start(rank, verb, now)
        return out

    def _start(self, rank: Rank, verb: Verb, now: float) -> list[Effect]:
        assert self.order is not None
        op = self.numbers.take_op()
        epoch = self.order.stamp.epoch
        rank.start(make_operation(op=op, verb=verb, epoch=epoch, started_at=now))
        start = _make_start(
            op=op,
            rank=rank.id,
            tenancy=self.tenancy,
            verb=verb,
            timeout_s=self._freeze_timeout_s(rank) if verb is Verb.FREEZE else None,
        )
        return [start] if verb is Verb.QUERY else [rank.record(self.tenancy), start]

    def _to_freeze(self) -> list[Rank]:
        """Return the ranks that run; those that drain come first, while the others run for them."""
        return sorted(self._in_state(RankState.RUNNING), key=lambda rank: not rank.drains)

    def _freeze_timeout_s(self, rank: Rank) -> float:
        limits = self.limits
        if rank.drains or not self._in_state(RankState.FROZEN):
            # Its peers run, and end what it waits for.
            return limits.freeze_timeout_s
        return min(limits.freeze_timeout_s, limits.peer_freeze_timeout_s)

    # --- steps --------------------------------------------------------------------------------

    def _begin(self, order: Order, step: Step, now: float, *, resumes: bool = False) -> OpId:
        op = self.numbers.take_op()
        self.pending = _make_pending(op=op, step=step, order=order, began_at=now, resumes=resumes)
        return op

    def _scan(self, order: Order, step: Step, now: float) -> Effect:
        self._scans += 1
        parked = self._in_state(RankState.PARKED) if order.goal is Goal.OFF else []
        return _make_scan(
            op=self._begin(order, step, now),
            tenancy=self.tenancy,
            expect_gone=frozenset(rank.id.process for rank in parked),
            residue_bytes=self.allowed_residue(parked) if parked else 0,
            unlisted=tuple(self._unlisted.items()) if parked else (),
            beyond=tuple(self.beyond),
            forgotten=order.goal is Goal.RESTORED and not self.ranks,
            recent=order.goal is Goal.RESTORED,
        )

    def _short_of_host_memory(self, moving: list[Rank]) -> bool:
        return any(r.device_bytes > self._reserved.get(r.id.process, -1) for r in moving)

    def _reserve_host_memory(self, order: Order, moving: list[Rank], now: float) -> Effect:
        self._reserved |= {rank.id.process: rank.device_bytes for rank in moving}
        return ReserveHostMemory(
            op=self._begin(order, Step.RESERVE, now),
            tenancy=self.tenancy,
            demands=tuple((rank.id, rank.device_bytes) for rank in moving),
        )

    def _reserve_device_memory(self, order: Order, parked: list[Rank], now: float) -> Effect:
        return ReserveDeviceMemory(
            op=self._begin(order, Step.RESERVE, now),
            tenancy=self.tenancy,
            demands=tuple((rank.id, rank.needs()) for rank in parked),
        )

    def _run_hooks(self, order: Order, now: float, *, quiesce: bool) -> Effect:
        return RunHooks(
            op=self._begin(order, Step.HOOKS, now, resumes=not quiesce),
            tenancy=self.tenancy,
            sessions=tuple(self.hook_sessions),
            quiesce=quiesce,
            timeout_s=self.limits.quiesce_timeout_s,
            epoch=order.stamp.epoch,
        )

    def _take_pending(self, op: OpId, failure: Reason | None) -> bool:
        """End the step in flight; return whether it was begun for the standing order."""
        pending = self.pending
        assert pending is not None
        assert pending.op == op, "a step has one result"
        self.pending = None
        if pending.step is Step.RESERVE and failure and pending.order.goal is not Goal.RESTORED:
            self._reserved.clear()
        if pending.resumes:
            # A job that cannot resume is not frozen again for it: it runs.
            self.quiesced, failure = False, None
        if pending.order != self.order:
            return False
        self._done.add(pending.step)
        if failure is not None:
            self._fail(failure)
        return True

    def _judge(self, scan: GroupsScanned) -> list[Effect]:
        """Draw the conclusions from a scan that belongs to the standing order."""
        assert self.order is not None
        if self.order.goal is Goal.RESTORED:
            self._refuse_company(scan.found)
            return []
        out: list[Effect] = []
        if self.order.goal is Goal.OFF:
            out = self._weigh_residue(scan)
        else:
            self._unlisted = dict(scan.unlisted)
        late = self._in_state(RankState.RUNNING)
        if late and Step.RESCAN in self._done:
            self._done.remove(Step.RESCAN)
            if self._scans >= MAX_SCANS:
                text = "new processes keep appearing on the devices while it is being frozen"
                self._fail(Reason(cause=Cause.FREEZE_TIMEOUT, text=text, rank=late[0].id))
        return out

    def _weigh_residue(self, scan: GroupsScanned) -> list[Effect]:
        """Know what snapshots left on the devices, and whether it is little enough."""
        out: list[Effect] = []
        parked = self._in_state(RankState.PARKED)
        left = {rank.id.process: dict[DeviceId, int]() for rank in parked}
        for found in scan.found:
            if found.process in left and found.device_bytes:
                on = found.bytes_on or ((min(found.devices), found.device_bytes),)
                left[found.process].update(on)
        for device, unlisted in scan.unlisted:
            more = unlisted - self._unlisted.get(device, unlisted)
            owner = next((r for r in parked if device in r.devices and r.device_bytes), None)
            if more > 0 and owner is not None:
                of_owner = left[owner.id.process]
                of_owner[device] = of_owner.get(device, 0) + more
        for rank in parked:
            residue = tuple(sorted(left[rank.id.process].items()))
            count, allowed = sum(size for _, size in residue), self.allowed_residue([rank])
            if count > allowed:
                text = (
                    f"{count:,} bytes are still on its devices after the snapshot, and no more "
                    f"than {allowed:,} may be (memory.max_residue_bytes, half of what it had)"
                )
                self._fail(Reason(cause=Cause.NOT_FREED, text=text, rank=rank.id))
            elif residue != rank.residue and (self._unlisted or count > rank.residue_bytes):
                # Of what was parked before this order, what was known stands.
                rank.residue = residue
                out.append(rank.record(self.tenancy))
        return out

    def allowed_residue(self, parked: list[Rank]) -> int:
        """Return how much each of some ranks may leave behind: never what would be no snapshot."""
        halves = (rank.device_bytes // 2 for rank in parked)
        return min([self.limits.max_residue_bytes, *halves])

    def _refuse_company(self, found: tuple[FoundRank, ...]) -> None:
        for other in found:
            if other.job == self.tenancy.job or not other.devices or other.process in self.ranks:
                continue
            who = f"pid {other.process.pid} ({other.name or 'unknown'}) of uid {other.uid}"
            cause = Cause.STRANGER if other.job is None else Cause.OCCUPIED
            self._fail(Reason(cause=cause, text=f"{who} is on the devices"))
            return

    def _is_untried(self) -> bool:
        return any(
            rank.earlier is None or not rank.earlier.qualified for rank in self.ranks.values()
        )

    # --- small change -------------------------------------------------------------------------

    def _in_state(self, state: RankState) -> list[Rank]:
        return [r for r in self.ranks.values() if r.state is state and not r.exited]

    def _fail(self, reason: Reason) -> None:
        if self._failure is None:
            self._failure = reason

    def _give_answer(self, order: Order) -> list[Effect]:
        if self._failure is None and order.goal in (Goal.OFF, Goal.ON):
            self.away = order.goal is Goal.OFF
        states = tuple((rank.id.process, rank.state) for rank in self.ranks.values())
        self.answer = _make_report(
            host=self.host,
            tenancy=self.tenancy,
            stamp=order.stamp,
            failure=self._failure,
            states=states,
            untried=order.goal is Goal.OFF and self._is_untried(),
        )
        return [self.answer]

    def _drop(self, rank: Rank) -> list[Effect]:
        del self.ranks[rank.id.process]
        self._reserved.pop(rank.id.process, None)
        out: list[Effect] = [RankEndedRecord(rank=rank.id)]
        if not self.ranks:
            out.append(FreeMemory(tenancy=self.tenancy, host=True, device=True))
        return out

    def _note(self, rank: Rank, operation: Operation, event: OperationFinished) -> Note:
        return _make_note(
            kind="operation",
            level="info" if event.failure is None else "warning",
            facts={
                **self._names,
                "rank": str(rank.id),
                "epoch": operation.epoch.as_int(),
                "verb": operation.verb.value,
                "state": event.observed.value,
                "seconds": event.seconds,
                "bytes": event.moved_bytes,
                "cause": event.failure.cause.value if event.failure else None,
                "reason": str(event.failure) if event.failure else None,
            },
        )

    def _note_hooks(self, pending: Pending, failure: Reason | None, now: float) -> Note:
        return _make_note(
            kind="hooks",
            level="info" if failure is None else "warning",
            facts={
                **self._names,
                "host": self.host,
                "epoch": pending.order.stamp.epoch.as_int(),
                "verb": "resume" if pending.resumes else "quiesce",
                "seconds": now - pending.began_at,
                "cause": failure.cause.value if failure else None,
                "reason": str(failure) if failure else None,
            },
        )
