"""The core of one host: the state machines together, behind one `handle`.

The driver is the single writer: it hands over one event at a time and carries out what comes back.
In here an event goes to the machine that it concerns; what that has to tell the others is delivered
before the call returns, so that between two events nothing is half done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never, get_args

from tsliced.core.actions import (
    NOTHING,
    Action,
    ClientAction,
    DrainRecord,
    Effects,
    EndSession,
    FaultRecord,
    ForeignLeaseRecord,
    Grant,
    HandoverRecord,
    HostRecord,
    LeaseEndedRecord,
    LeaseRecord,
    Note,
    RankEndedRecord,
    RankRecord,
    Record,
    RemainsRecord,
    ReservationRecord,
    ReserveDeviceMemory,
    ReserveHostMemory,
    RunHooks,
    ScanGroups,
    Send,
    SessionEndedRecord,
    SessionRecord,
    StartOperation,
    StrangerRecord,
    TenancyEndedRecord,
    TenancyRecord,
    WatchProcess,
)
from tsliced.core.alarms import Alarms
from tsliced.core.barriers import Barriers
from tsliced.core.ending import Ending
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    DrainOrdered,
    EndAsked,
    Event,
    FaultCleared,
    GrantConfirmed,
    GroupsObserved,
    GroupsScanned,
    HooksRun,
    HostDied,
    HostMemoryPromised,
    KillRequested,
    LastTurnRequested,
    MemoryReserved,
    NumbersReserved,
    OperationFinished,
    OperationHindered,
    PeerConnected,
    PeerDisconnected,
    PeerLost,
    PeerSaid,
    ProcessExited,
    QualifyRequested,
    RankRegistered,
    Reconfigured,
    RecordsFailed,
    ReleaseRequested,
    RetryRequested,
    SessionClosed,
    SessionDisconnected,
    SessionOpened,
    SessionResumed,
    SignOfLife,
    Started,
    TimePassed,
    WatchdogTold,
)
from tsliced.core.fronting import Fronting
from tsliced.core.hosts import Hosts
from tsliced.core.leads import Leads
from tsliced.core.leasing import Leasing
from tsliced.core.losses import Losses
from tsliced.core.model import (
    Cause,
    CoreLimits,
    GroupConfig,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    OpId,
    RankId,
    Reason,
    Verb,
)
from tsliced.core.numbers import Numbers
from tsliced.core.policy import Policy
from tsliced.core.reconfiguring import arbiters_of, hosts_of, longest_holds, reconfigure
from tsliced.core.remains import Remains
from tsliced.core.rounds import RoundState
from tsliced.core.sessions import lease_name
from tsliced.core.signals import Effect
from tsliced.core.strangers import Inhabitants
from tsliced.core.timers import TimerKey, TimerKind, Timers
from tsliced.core.unwritten import Unwritten
from tsliced.core.value import maker

if TYPE_CHECKING:
    from random import Random

RECORDS = (
    SessionRecord,
    SessionEndedRecord,
    LeaseRecord,
    LeaseEndedRecord,
    TenancyRecord,
    TenancyEndedRecord,
    RankRecord,
    RankEndedRecord,
    FaultRecord,
    DrainRecord,
    StrangerRecord,
    RemainsRecord,
    ForeignLeaseRecord,
    HostRecord,
    ReservationRecord,
    HandoverRecord,
)
_IS_RECORD = frozenset(RECORDS)

_IS_FOR_CLIENTS = frozenset(get_args(ClientAction))

_make_effects = maker(Effects)

#: Timers of which there is one.
_NUMBERS = TimerKey(TimerKind.NUMBERS, OpId(0))
_JOURNAL = TimerKey(TimerKind.JOURNAL, OpId(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """What a machine is made of. Groups and limits may change while it lives: `Reconfigured`."""

    host: HostName
    #: In the configured order.
    groups: tuple[GroupConfig, ...]
    limits: CoreLimits
    #: Of the journal: see `Counter`.
    generation: int
    ceiling: int
    policies: Mapping[GroupName, Policy] = field(default_factory=dict)
    #: Part of the keys of jobs.
    cluster: str = ""
    #: Let strangers on the devices be jobs of their own, which make room for others.
    freeze_strangers: bool = False
    #: Tell the history of each lease; else only of those that had to wait, for the log.
    recording: bool = True


class Machine:
    """All state of the core. Mutate it only through `handle`."""

    def __init__(self, config: MachineConfig, *, random: Random, full_checks: bool = False) -> None:
        limits = config.limits
        self.config = config
        self.numbers = Numbers(
            generation=config.generation, ceiling=config.ceiling, block=limits.block
        )
        self.timers: Timers[TimerKey] = Timers()
        self.tenancies = Inhabitants(
            host=config.host,
            hosts_of=hosts_of(config),
            group_of={device: g.name for g in config.groups for device in g.devices},
            order_of={group.name: i for i, group in enumerate(config.groups)},
            numbers=self.numbers,
            limits=limits,
            cluster=config.cluster,
            freeze=config.freeze_strangers,
        )
        self.leasing = Leasing(
            limits=limits,
            arbiters=arbiters_of(config, {}),
            tenancies=self.tenancies,
            numbers=self.numbers,
            timers=self.timers,
            random=random,
            max_hold_s=longest_holds(config),
            recording=config.recording,
        )
        self.fronting = Fronting(books=self.leasing, links=self.tenancies.links)
        self.ending = Ending(
            leasing=self.leasing,
            tenancies=self.tenancies,
            fronting=self.fronting,
            timers=self.timers,
        )
        self.remains = Remains(
            leasing=self.leasing,
            tenancies=self.tenancies,
            timers=self.timers,
            limits=limits,
            ending=self.ending,
        )
        self.leasing.is_orphaned = self.remains.is_orphaned
        self.leads = Leads(leasing=self.leasing, tenancies=self.tenancies)
        self.hosts = self._make_hosts()
        self.hosts.look_for_silence()
        #: Groups of arbiters on other hosts.
        self.elsewhere = frozenset(self.tenancies.order_of) - self.leasing.arbiters.keys()
        #: Records that the journal does not have and should.
        self.unwritten = Unwritten()
        self.losses = Losses(tenancies=self.tenancies, granting=self.leasing)
        self.alarms = Alarms(limits=limits, tenancies=self.tenancies, granting=self.leasing)
        self.barriers = Barriers(tenancies=self.tenancies, granting=self.leasing)
        #: The latest events, for the story of a broken invariant.
        self.story: deque[tuple[float, Event]] = deque(maxlen=limits.story)
        self._full_checks = full_checks

    def _make_hosts(self) -> Hosts:
        return Hosts(
            links=self.tenancies.links,
            leasing=self.leasing,
            tenancies=self.tenancies,
            fronting=self.fronting,
            remains=self.remains,
            ending=self.ending,
            leads=self.leads,
        )

    @property
    def deadline(self) -> float | None:
        """The instant at which the driver must hand over `TimePassed`, if any."""
        return self.timers.deadline

    def groups_of(self, leases: Iterable[str]) -> tuple[GroupName, ...]:
        """Return the groups of those of some leases that are held, here or elsewhere."""
        own, others = self.leasing.leases, self.fronting.leases
        known = (own.get(LeaseId(name)) or others.get(LeaseId(name)) for name in leases)
        return tuple(group for lease in known if lease is not None for group, _ in lease.tokens)

    def handle(self, event: Event, *, now: float) -> Effects:
        """Apply one event, and return what must be written down and then done."""
        self.story.append((now, event))
        leasing = self.leasing
        leasing.out = []
        self._dispatch(event, now)
        self._settle(now)
        if self._full_checks:
            self.check_invariants()
        return self._effects(leasing.out, add_unwritten=not isinstance(event, RecordsFailed))

    def untold(self, *, now: float) -> list[Note]:
        """Return what the history has not been told yet: for somebody who reads it, or the end."""
        leasing = self.leasing
        leasing.out = []
        leasing.note_all_untold(now)
        return [effect for effect in leasing.out if isinstance(effect, Note)]

    def _dispatch(self, event: Event, now: float) -> None:
        leasing, tenancies = self.leasing, self.tenancies
        match event:
            case AcquireRequested():
                if not (self.elsewhere and self._ask_elsewhere(event, now)):
                    leasing.on_acquire(event, now)
            case ReleaseRequested():
                if not (self.fronting.leases and self.fronting.release(event)):
                    leasing.on_release(event, now)
            case GrantConfirmed():
                if not (self.fronting.leases and self.fronting.confirm(event)):
                    leasing.on_confirmed(event)
            case OperationFinished():  # the first of those of each switch
                self._on_operation(event, now)
            case GroupsScanned():
                leasing.out += tenancies.on_scanned(event, now=now)
            case MemoryReserved() | HooksRun():
                leasing.out += tenancies.on_step(event, now=now)
            case PeerSaid(host=host, message=message):
                self.hosts.on_said(host, message, now)
            case WatchdogTold():
                leasing.on_watchdog(event)
            case (
                SessionOpened()
                | SessionDisconnected()
                | SessionResumed()
                | SessionClosed()
                | SignOfLife()
                | LastTurnRequested()
                | CancelRequested()
            ):
                self._on_session(event, now)
            case OperationHindered():
                self.alarms.on_hindered(event, now)
            case HostMemoryPromised():
                self._on_promised(event, now)
            case GroupsObserved():
                self._on_observed(event, now)
            case RankRegistered(found=found, groups=groups):
                leasing.out += tenancies.put(found, groups)
            case ProcessExited():
                self._on_exit(event, now)
            case NumbersReserved():
                self._on_numbers(event, now)
            case TimePassed():
                self._on_time(now)
            case Started():
                self._on_started(now)
            case RecordsFailed():
                self._on_records_failed(event, now)
            case FaultCleared() | RetryRequested() | KillRequested() | EndAsked() | DrainOrdered():
                self._on_operator(event, now)
            case QualifyRequested(job=job):
                leasing.qualify(job, now)
            case Reconfigured():
                reconfigure(self, event)
            case PeerConnected() | PeerDisconnected() | PeerLost() | HostDied():
                self.hosts.on_event(event, now)
            case _:
                assert_never(event)

    def _on_promised(self, event: HostMemoryPromised, now: float) -> None:
        if effects := self.tenancies.on_promised(event, now=now):
            self.leasing.out += effects
            self.leasing.todo += event.tenancy.groups

    def _on_session(
        self,
        event: SessionOpened
        | SessionDisconnected
        | SessionResumed
        | SessionClosed
        | SignOfLife
        | LastTurnRequested
        | CancelRequested,
        now: float,
    ) -> None:
        match event:
            case SignOfLife(session=session):
                self.leasing.on_sign_of_life(session, now)
                self.fronting.show_life(event)
            case LastTurnRequested():
                if not (self.elsewhere and self._ask_elsewhere(event, now)):
                    self.leasing.on_last_turn(event, now)
            case CancelRequested():
                if not self.fronting.cancel(event):
                    self.leasing.on_cancel(event, now)
            case SessionOpened(job=job):
                self.leasing.on_opened(event)
                self.remains.on_opened(job)
            case SessionDisconnected(session=session):
                self.leasing.on_disconnected(session, now)
            case SessionResumed(session=session):
                self.leasing.on_resumed(session, now)
                self.fronting.on_resumed(session)
            case SessionClosed(session=session):
                self.leasing.end_session(session, "it was closed", now)
            case _:
                assert_never(event)

    def _ask_elsewhere(self, event: AcquireRequested | LastTurnRequested, now: float) -> bool:
        """Pass a wish on to the arbiter that it concerns, if that is on another host."""
        session = self.leasing.sessions.get(event.session)
        if session is None or lease_name(event.session, event.request) in session.ended:
            return False
        if isinstance(event, AcquireRequested):
            groups = event.groups or session.groups
            first = groups[0] if groups else None
            arbiter = self.tenancies.arbiter_of(first) if first in self.elsewhere else None
        else:
            tenancy = self.tenancies.tenancy_of(self.leasing.rank_of(session))
            arbiter = tenancy.lead if tenancy is not None and not tenancy.led_here else None
        if arbiter is None:
            return False
        session.heard_at = session.asked_at = now
        self.fronting.ask(event, arbiter, now)
        return True

    def _settle(self, now: float) -> None:
        """Deliver what coordinators had to say, then bring the clocks up to date."""
        tenancies, leasing = self.tenancies, self.leasing
        if tenancies.claims:
            self._settle_claims()
        if leasing.turns or leasing.idle or leasing.told_to_end:
            leasing.check_turns(now)
        if tenancies.untold:
            # What others move may have left devices of groups that are arbitrated here.
            leasing.todo += tenancies.untold
            # First, so that who is asked to take something off knows of it.
            self.hosts.tell_presence()
        if leasing.todo or leasing.vacated:
            leasing.work_off(now)
        if tenancies.signals:
            self._hear_coordinators(now)
        if tenancies.links.boots:
            # Nobody else leaves anything to be done here for other hosts.
            self._settle_leads(now)
        if leasing.left:
            for job in leasing.left:
                self.remains.on_left(job, now)
            leasing.left.clear()
        if tenancies.touched:
            self._set_barriers()
        if leasing.gone:
            for session in leasing.gone:
                self.fronting.on_ended(session)
            leasing.gone.clear()
        if tenancies.arrived:
            for job in tenancies.arrived:
                leasing.tidy(job)
            tenancies.arrived.clear()
        if tenancies.reshaped:
            leasing.todo += tenancies.take_misled()
            leasing.work_off(now)
            self._hear_coordinators(now)
        if tenancies.unled:
            self.hosts.forget_clients()
            leasing.tell_unclaimed()
        if tenancies.untold:
            self.hosts.tell_presence()
        if self.numbers.low and (ask := self.numbers.ask()) is not None:
            leasing.out.append(ask)

    def _settle_leads(self, now: float) -> None:
        """Do what other hosts wait for, where nothing moves any more."""
        if self.leasing.borrowers:
            self.leads.offer()
        while self.leads.waiting and self.leads.settle(now):
            self.leasing.work_off(now)
            self._hear_coordinators(now)

    def _hear_coordinators(self, now: float) -> None:
        tenancies = self.tenancies
        while tenancies.signals:
            outcome = tenancies.signals.popleft()
            self.leads.on_outcome(outcome, now)
            self.leasing.on_outcome(outcome, now)
            if tenancies.claims:
                self._settle_claims()

    def _settle_claims(self) -> None:
        strangers = list(self.tenancies.stranger_jobs)
        self.leasing.out += self.tenancies.settle_claims()
        for job in strangers:
            if job not in self.tenancies.stranger_jobs:
                self.leasing.tidy(job)

    def _set_barriers(self) -> None:
        tenancies = self.tenancies
        for key in tenancies.touched:
            timer = TimerKey(TimerKind.BARRIER, key)
            tenancy = tenancies.all.get(key)
            if tenancy is None or tenancy.coordinator.deadline is None:
                self.timers.clear(timer)
            elif self.timers.get(timer) != tenancy.coordinator.deadline:
                self.timers.set(timer, tenancy.coordinator.deadline)
            self.barriers.follow(key)
        tenancies.touched.clear()

    def _effects(self, out: list[Effect], *, add_unwritten: bool) -> Effects:
        if not out:
            return NOTHING
        records: list[Record] = []
        actions: list[Action] = []
        foreign = self.leasing.foreign
        for effect in out:
            kind = effect.__class__
            if kind in _IS_RECORD:
                records.append(effect)  # type: ignore[arg-type]  # that is what was asked
            elif foreign and kind in _IS_FOR_CLIENTS and effect.session in foreign:  # type: ignore[union-attr]
                actions += self._tell_abroad(effect)  # type: ignore[arg-type]  # as was asked
            else:
                actions.append(effect)  # type: ignore[arg-type]  # signals never come this far
                if kind is StartOperation:
                    self.alarms.arm(effect)  # type: ignore[arg-type]  # that is what was asked
        if self.unwritten and records and add_unwritten:
            records = self.unwritten.take_with(records)
        return _make_effects(records=tuple(records), actions=tuple(actions))

    def _tell_abroad(self, action: ClientAction) -> list[Action]:
        """Return how a client of another host is told: by its front, if that is there."""
        host = self.leasing.foreign[action.session]
        if isinstance(action, EndSession):
            del self.leasing.foreign[action.session]
        return [Send(host=host, message=action)] if host in self.hosts.links.up else []

    # --- events that concern several machines -------------------------------------------------

    def _on_started(self, now: float) -> None:
        leasing, tenancies = self.leasing, self.tenancies
        processes = dict.fromkeys((*leasing.by_process, *tenancies.home))
        leasing.out += [WatchProcess(process=process) for process in processes]
        leasing.out += tenancies.ask_all(now=now)
        # Who was known to be dead is not waited for.
        self.hosts.look_for_silence()
        for round_ in sorted(leasing.rounds.values(), key=lambda round_: round_.place):
            if round_.state is RoundState.HELD:
                leasing.hold_rest(round_, now)
            else:
                leasing.take_place(round_, now)
        leasing.resume_clocks(now)
        for session in leasing.sessions.values():
            if session.host is None:
                # What a client said may not have been acted upon when the daemon ended.
                tenancies.claim(session.process, session.job)
        jobs = (*tenancies.by_job, *leasing.faults, *tenancies.stranger_jobs)
        for job in dict.fromkeys(jobs):
            leasing.tidy(job)
        self.remains.resume(now)
        self.hosts.await_leads(now)
        leasing.todo += leasing.drains

    def _on_operation(self, event: OperationFinished, now: float) -> None:
        self.alarms.on_ended(event.op, now)
        self.leasing.out += self.tenancies.on_operation(event, now=now)

    def _on_observed(self, event: GroupsObserved, now: float) -> None:
        self.leasing.out += self.tenancies.observe(event.found)
        self.losses.on_observed(dict(event.lost), now)
        self.leasing.todo += self.leasing.drains

    def _on_exit(self, event: ProcessExited, now: float) -> None:
        leasing, process = self.leasing, event.process
        self.ending.on_exit(process)
        text = f"its process {process.pid} ended"
        rank = RankId(self.config.host, process)
        tenancy = self.tenancies.tenancy_of(rank)
        reach = tenancy.reach if tenancy is not None else ()
        # First the rank: the lease's end may choose the next round, which evicts what is left.
        leasing.out += self.tenancies.on_exit(process, now=now)
        for session in list(leasing.by_process.get(process, ())):
            leasing.end_session(session, text, now)
        if tenancy is not None:
            self.hosts.on_rank_gone(tenancy.key, reach, rank, now)

    def _on_numbers(self, event: NumbersReserved, now: float) -> None:
        self.numbers.on_reserved(event)
        if event.failure is not None:
            facts = {"reason": str(event.failure)}
            self.leasing.out.append(Note(kind="journal", level="error", facts=facts))
            self.timers.set(_NUMBERS, now + self.config.limits.retry_max_s)
            return
        self.leasing.out += self.tenancies.on_numbers(now=now)
        self.leasing.advance_all()

    def _on_operator(
        self,
        event: FaultCleared | RetryRequested | KillRequested | EndAsked | DrainOrdered,
        now: float,
    ) -> None:
        leasing = self.leasing
        match event:
            case FaultCleared(job=job):
                self._on_fault_cleared(job, now)
            case RetryRequested(job=job):
                self._on_fault_cleared(job, now)
                leasing.out += self.tenancies.hurry(job, now=now)
                leasing.retry(job, now)
            case KillRequested(job=job, by=by, grace_s=grace_s, onward=onward):
                text = f"{by} wants it"
                self.ending.end_job(job, text=text, grace_s=grace_s, now=now, onward=onward)
            case EndAsked(job=job):
                leasing.on_end_asked(job, now)
            case DrainOrdered(group=group, drain=drain):
                if group in leasing.arbiters:
                    leasing.drain(group, drain, now)
            case _:
                assert_never(event)

    def _on_fault_cleared(self, job: JobKey, now: float) -> None:
        self.leasing.clear_fault(job)
        self.leasing.out += self.tenancies.clear(job, now=now)
        self.leasing.advance_all()

    def _on_time(self, now: float) -> None:
        leasing = self.leasing
        for kind, id_ in self.timers.pop_due(now):
            match kind:
                case TimerKind.ACQUIRE:
                    leasing.on_acquire_due(id_, now)  # type: ignore[arg-type]  # by kind
                    self.fronting.on_acquire_due(id_, now)  # type: ignore[arg-type]
                case TimerKind.CONFIRM:
                    leasing.on_confirm_due(id_, now)  # type: ignore[arg-type]  # by kind
                    self.fronting.on_confirm_due(id_, now)  # type: ignore[arg-type]
                case TimerKind.GRACE:
                    leasing.on_grace_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.RETRY:
                    leasing.on_retry_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.PARK:
                    leasing.todo.append(id_)  # type: ignore[arg-type]  # by kind
                case TimerKind.SILENCE:
                    leasing.on_silence_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.HOLD:
                    leasing.on_hold_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.IDLE:
                    leasing.on_idle_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.REMAINS:
                    self.remains.on_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.WATCHDOG:
                    leasing.on_watchdog_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.TURN:
                    leasing.on_turn_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.BARRIER:
                    leasing.out += self.tenancies.on_barrier(id_, now=now)  # type: ignore[arg-type]
                case TimerKind.AWAITED:
                    self.barriers.on_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.UNTOLD:
                    leasing.on_untold_due(now)
                case TimerKind.ALONE:
                    self.hosts.on_alone_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.STUCK:
                    self.alarms.on_due(id_, now)  # type: ignore[arg-type]  # by kind
                case TimerKind.NUMBERS:
                    self.numbers.let_go()
                case TimerKind.ENDING:
                    self.ending.on_due(id_)  # type: ignore[arg-type]  # by kind
                case TimerKind.JOURNAL:
                    leasing.out[:0] = self.unwritten.take_with(())
                case _:
                    assert_never(kind)

    # --- when the journal cannot be written ---------------------------------------------------

    def _on_records_failed(self, event: RecordsFailed, now: float) -> None:
        """Let what was announced have failed; what needs no record is done all the same."""
        self.unwritten.add(event.records)
        self.timers.set(_JOURNAL, now + self.config.limits.retry_max_s)
        granted = (LeaseRecord, ForeignLeaseRecord)
        unwritten = {record.lease for record in event.records if isinstance(record, granted)}
        for action in event.actions:
            match action:
                case Grant(lease=lease) | Send(message=Grant(lease=lease)) if lease in unwritten:
                    text = f"the daemon cannot write its journal: {event.failure.text}"
                    if not self.fronting.hand_back(lease, text):
                        self.leasing.revoke_unwritten(lease, text, now)
                case StartOperation(verb=Verb.FREEZE | Verb.SNAPSHOT):
                    self._fail_operation(action, event.failure, now)
                case ScanGroups(tenancy=key) | ReserveDeviceMemory(tenancy=key) if (
                    self.tenancies.turns_back(key)
                ):
                    # A job that has to stay is not kept from running for it.
                    self.leasing.out.append(action)
                case ScanGroups(op=op):
                    scanned = GroupsScanned(op=op, failure=event.failure)
                    self.leasing.out += self.tenancies.on_scanned(scanned, now=now)
                case ReserveHostMemory(op=op) | ReserveDeviceMemory(op=op):
                    reserved = MemoryReserved(op=op, failure=event.failure)
                    self.leasing.out += self.tenancies.on_step(reserved, now=now)
                case RunHooks(op=op, quiesce=True):
                    run = HooksRun(op=op, failure=event.failure)
                    self.leasing.out += self.tenancies.on_step(run, now=now)
                case _:
                    # The way back (restore, thaw, resume) and answers: a restart asks the driver.
                    self.leasing.out.append(action)
        self.leasing.tell_moving(event.failure)

    def _fail_operation(self, start: StartOperation, reason: Reason, now: float) -> None:
        key = self.tenancies.home[start.rank.process]
        rank = self.tenancies.all[key].participant.ranks[start.rank.process]
        failed = Reason(cause=Cause.JOURNAL, text=reason.text, rank=start.rank)
        finished = OperationFinished(
            op=start.op, rank=start.rank, observed=rank.state, failure=failed
        )
        self._on_operation(finished, now)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events.

        It takes time in proportion to all that is known, so only tests do it after every event. In
        production the machines assert what concerns just what they do: at every grant, every
        operation, every number.
        """
        self.leasing.check_invariants()
        self.tenancies.check_invariants()
