"""Carries the core: one queue, one timer.

An event goes into the core, what the core wants kept goes into the journal, and what it wants done
is done; a long action is a task that ends by posting exactly one event. All events of one turn of
the loop share one write to the journal.

Safety rule: an action runs only after the records of its event are written.
"""

from __future__ import annotations

import asyncio
import signal
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, get_args

from tsliced.core.actions import (
    Action,
    ClientAction,
    EndProcesses,
    FreeMemory,
    Note,
    Record,
    ReserveDeviceMemory,
    ReserveHostMemory,
    ReserveNumbers,
    RunHooks,
    ScanGroups,
    Send,
    SettleHostMemory,
    StartOperation,
    WatchProcess,
)
from tsliced.core.events import (
    Event,
    GroupsObserved,
    GroupsScanned,
    HooksRun,
    NumbersReserved,
    OperationFinished,
    OperationHindered,
    ProcessExited,
    Reconfigured,
    RecordsFailed,
    TimePassed,
)
from tsliced.core.machine import Machine
from tsliced.core.model import (
    Cause,
    OpId,
    ProcessId,
    RankState,
    Reason,
    Verb,
)
from tsliced.core.reconfiguring import objections
from tsliced.core.value import maker
from tsliced.host.backends.base import Backend, Outcome
from tsliced.host.history import Fact, History
from tsliced.host.journal import Journal, JournalError
from tsliced.host.membership import Membership
from tsliced.host.moves import MOVING, Moves
from tsliced.host.processes import ExitWatch, NotAProcessError, ProcessLimitError, send_signal
from tsliced.host.scan import ScanFailed, Scanner
from tsliced.log import Log
from tsliced.observe.sampling import Sampler
from tsliced.qualifying import Qualifying
from tsliced.reserving import Ledgers, Reserving

_make_finished, _make_scanned = maker(OperationFinished), maker(GroupsScanned)

#: Failures whose cause may be seen in the process.
_PERHAPS_THE_JOBS: Final = frozenset(
    {Cause.DRIVER, Cause.UNSUPPORTED, Cause.FAILED, Cause.NOT_FREED, Cause.FREEZE_TIMEOUT}
)
#: Ways on which the driver moves all.
_DRIVERS_OWN: Final = ("cuda", "cli")
_MOVES: Final = (Verb.FREEZE, Verb.SNAPSHOT, Verb.RESTORE)


class Clients(Protocol):
    """The side of the server that the driver needs."""

    def deliver(self, action: ClientAction) -> None:
        """Send an answer or news to a session; one without a connection misses it."""
        ...

    async def run_hooks(self, action: RunHooks) -> Reason | None:
        """Ask sessions to quiesce or resume; return why it did not work out, if so."""
        ...

    async def empty_cache(self, process: ProcessId) -> None:
        """Ask a rank that has an agent to free device memory that it keeps without need."""
        ...


class Hosts(Protocol):
    """The side of the links to other hosts that the driver needs."""

    def deliver(self, sends: Sequence[Send]) -> None:
        """Say things to other hosts; one without a connection misses them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """All that the core's actions act upon."""

    journal: Journal
    history: History
    backend: Backend
    scanner: Scanner
    membership: Membership
    ledgers: Ledgers
    log: Log
    tasks: asyncio.TaskGroup
    moves: Moves = field(default_factory=Moves)
    qualifying: Qualifying | None = None


class Driver:
    """The single writer of the core. All methods belong to the event loop."""

    def __init__(
        self,
        machine: Machine,
        around: Surroundings,
        *,
        on_broken: Callable[[], None],
        linger_s: float = 0.0,
    ) -> None:
        self.machine = machine
        self.around = around
        self.clients: Clients | None = None
        self.hosts: Hosts | None = None
        self._loop = asyncio.get_running_loop()
        #: Adds up how busy the devices are.
        self.sampler: Sampler | None = None
        self._queue: list[Event] = []
        self._turn: asyncio.Handle | None = None
        #: Lines that are due, for what was done.
        self._notes: list[Note] = []
        #: What other hosts are to be told when all actions of this turn of the loop were run.
        self._sends: list[Send] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._linger_s = linger_s
        self._linger_until = 0.0
        self._closed = False
        self._watch = ExitWatch(self._loop, self._on_exit)
        self._reserving = Reserving(machine, around.ledgers, around.scanner)
        self._read_and_reserve = self._long("device memory", self._reserving.reserve_device)
        self._handlers = self._make_handlers()
        self._on_broken = on_broken
        #: What was last seen to keep operations from going on.
        self._hindered: dict[OpId, str] = {}
        #: The invariant that broke; the daemon ends, and the next one starts from the journal.
        self.broken: Exception | None = None

    # --- the queue ----------------------------------------------------------------------------

    @property
    def watched(self) -> int:
        """How many processes are watched, with one descriptor each."""
        return len(self._watch)

    def post(self, event: Event) -> None:
        """Let the core have an event in this turn of the loop, after those before it."""
        if self._closed:
            return
        self._queue.append(event)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._run)

    def reconfigure(self, event: Reconfigured) -> list[str]:
        """Let the core have another configuration now; return what stands in its way, if anything.

        Nothing happens between the look and the change.
        """
        self._run_now()
        if found := list(objections(self.machine, event.groups)):
            return found
        self._queue.append(event)
        self._run_now()
        return []

    def _run_now(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        self._run()

    def post_request(self, event: Event) -> None:
        """Let the core have what a client waits for an answer to; it may soon ask for more.

        The loop does not go to sleep for a moment afterwards. To be woken up again costs more than
        a whole request: the kernel's way there and back, and caches that have gone cold meanwhile.
        """
        if self._closed:
            return
        self._queue.append(event)
        if self._turn is not None:
            return
        self._turn = self._loop.call_soon(self._run)
        if self._linger_s:
            lingers = self._linger_until > 0
            self._linger_until = time.monotonic() + self._linger_s
            if not lingers:
                self._loop.call_soon(self._linger)

    def _linger(self) -> None:
        self.write_notes()
        if not self._closed and time.monotonic() < self._linger_until:
            self._loop.call_soon(self._linger)
        else:
            self._linger_until = 0.0

    def after_turn(self, call: Callable[[], object]) -> None:
        """Call something when the core has had all events that were posted before."""
        self._loop.call_soon(call)

    def close(self) -> None:
        """Take no more events. May be repeated."""
        if not self._closed and self.broken is None:
            if self.sampler is not None:
                self.sampler.write(self.machine.config.groups)
            self.catch_up()
        self._closed = True
        self.write_notes()
        self._watch.close()
        if self._turn is not None:
            self._turn.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._turn = None
        # Not the loop's own clock: uvloop's counts whole milliseconds.
        now = time.monotonic()
        records: list[Record] = []
        actions: list[Action] = []
        # Events that are posted meanwhile have their own turn.
        queue, self._queue = self._queue, []
        for event in queue:
            try:
                effects = self.machine.handle(event, now=now)
            except Exception as exc:
                self._break(exc)
                return
            records += effects.records
            actions += effects.actions
        try:
            self._carry_out(records, actions)
        except Exception as exc:
            # Of what was announced a part is not done, and nobody would ever hear of it.
            self._break(exc)
            return
        self._set_timer()

    def _carry_out(self, records: list[Record], actions: list[Action]) -> None:
        if records:
            try:
                self.around.journal.write(records)
            except JournalError as exc:
                self._fail(records, actions, exc)
                return
        handlers, notes = self._handlers, self._notes
        for action in actions:
            if action.__class__ is Note:
                notes.append(action)
            else:
                handlers[action.__class__](action)
        if self._sends:
            sends, self._sends = self._sends, []
            if self.hosts is not None:
                self.hosts.deliver(sends)
        if notes and not self._linger_until:
            self._loop.call_soon(self.write_notes)

    def catch_up(self) -> None:
        """Bring the log and the history up to now, for whoever reads them next."""
        self._notes += self.machine.untold(now=time.monotonic())
        self.write_notes()

    def write_notes(self) -> None:
        """Add the lines that are due to the log and the history.

        A turn of its own comes here: uvloop writes to the sockets when a turn ends, and clients go
        on with their answers while the lines are written.
        """
        if not self._notes:
            return
        notes, self._notes = self._notes, []
        around, now_unix = self.around, time.time()
        try:
            for note in notes:
                if around.qualifying is not None:
                    around.qualifying.on_note(note)
                around.history.append(note.kind, note.level, note.facts, now_unix)
                around.log.write(note.level, note.kind, note.facts)
        except Exception as exc:
            self._break(exc)
            return
        around.log.flush()

    def _fail(self, records: list[Record], actions: list[Action], exc: JournalError) -> None:
        reason = Reason(cause=Cause.JOURNAL, text=str(exc))
        self.around.log.write("error", "journal", {"reason": reason.text})
        self.around.log.flush()
        self.post(RecordsFailed(records=tuple(records), actions=tuple(actions), failure=reason))

    def _set_timer(self) -> None:
        deadline = self.machine.deadline
        if deadline is None or (self._timer_at is not None and self._timer_at <= deadline):
            # Deadlines come and go with every step of a move, and nearly all before they are due:
            # one alarm too many costs less than to move it each time.
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        delay_s = max(0.0, deadline - time.monotonic())
        self._timer = self._loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_at = None
        deadline = self.machine.deadline
        if deadline is not None and deadline <= time.monotonic():
            self.post(TimePassed())
        else:
            self._set_timer()

    def _break(self, exc: Exception) -> None:
        """An invariant is broken: tell the story and stop; nothing more is done from this state."""
        self.write_notes()
        log = self.around.log
        for at, event in self.machine.story:
            log.write("error", "story", {"at": at, "event": repr(event)})
        where = "".join(traceback.format_exception(exc)[-2:])
        log.write("error", "broken_invariant", {"reason": repr(exc), "where": where})
        log.flush()
        self.broken = exc
        self.close()
        self._on_broken()

    def _on_exit(self, process: ProcessId) -> None:
        around = self.around
        self.post(ProcessExited(process=process))
        around.membership.forget(process)
        around.scanner.forget(process)
        around.backend.forget(process)
        if around.qualifying is not None:
            around.qualifying.forget(process)

    # --- actions ------------------------------------------------------------------------------

    def _make_handlers(self) -> dict[type[Action], Callable[[Any], None]]:
        # Any: a handler takes the action that its key names.
        clients = dict.fromkeys(get_args(ClientAction), self._tell)
        return {
            **clients,
            Send: self._say,
            WatchProcess: self._watch_process,
            EndProcesses: self._end_processes,
            FreeMemory: self._reserving.free,
            SettleHostMemory: self._reserving.settle,
            StartOperation: self._long("operation", self._operate),
            ScanGroups: self._long("scan", self._scan),
            ReserveHostMemory: self._reserve_host_memory,
            ReserveDeviceMemory: self._reserve_device_memory,
            RunHooks: self._long("hooks", self._run_hooks),
            ReserveNumbers: self._long("numbers", self._reserve_numbers),
        }

    def _long(
        self, name: str, act: Callable[[Any], Coroutine[Any, Any, Event]]
    ) -> Callable[[Any], None]:
        """Return a handler that runs `act` as a task and posts the event that it returns."""

        async def run(action: Any) -> None:
            try:
                self.post(await act(action))
            except Exception as exc:
                # The core waits for an event that will never come.
                self._break(exc)

        def start(action: Any) -> None:
            self.around.tasks.create_task(run(action), name=name)

        return start

    def _tell(self, action: ClientAction) -> None:
        if self.clients is not None:
            self.clients.deliver(action)

    def _say(self, action: Send) -> None:
        self._sends.append(action)

    def note(self, kind: str, level: str, /, **facts: str | float | bool | None) -> None:
        """Add a line to the log and the history that does not come from the core."""
        self.write(kind, level, facts)

    def write(self, kind: str, level: str, facts: Mapping[str, Fact]) -> None:
        """Do the same with facts of any names."""
        self._notes.append(Note(kind=kind, level=level, facts=facts))
        if self._closed:
            self.write_notes()
        else:
            self._loop.call_soon(self.write_notes)

    def _watch_process(self, action: WatchProcess) -> None:
        try:
            self._watch.add(action.process)
        except (ProcessLimitError, NotAProcessError) as exc:
            self.note("unwatched", "error", pid=action.process.pid, reason=str(exc))

    def _end_processes(self, action: EndProcesses) -> None:
        number = signal.SIGKILL if action.kill else signal.SIGTERM
        for process in action.processes:
            self._signal(process, number)

    def _signal(self, process: ProcessId, number: signal.Signals) -> None:
        try:
            send_signal(process, number)
        except OSError as exc:
            reason = f"{number.name} could not be sent: {exc.strerror}"
            self.note("not_ended", "error", pid=process.pid, reason=reason)

    async def _operate(self, action: StartOperation) -> Event:
        started = time.monotonic()
        backend, scanner = self.around.backend, self.around.scanner
        moves, size = self.around.moves, self._device_bytes(action)
        qualifying, expected_s = self.around.qualifying, None
        if qualifying is not None:
            if (objection := qualifying.objection(action)) is not None:
                return OperationFinished(
                    op=action.op, rank=action.rank, observed=RankState.RUNNING, failure=objection
                )
            expected_s = qualifying.expected_s(action.rank.process, action.verb, size)
        if action.verb is Verb.FREEZE and self.clients is not None:
            # Bytes that are not held are bytes that are not copied.
            await self.clients.empty_cache(action.rank.process)
        scanner.on_change()
        try:
            moves.begin(action.rank.process, action.verb, size, expected_s)
            outcome = await backend.run(
                action.verb, action.rank, action.timeout_s, action.tenancy.job
            )
        except Exception as exc:
            reason = Reason(
                cause=Cause.DRIVER, text=f"the backend failed: {exc!r}", rank=action.rank
            )
            return OperationFinished(
                op=action.op, rank=action.rank, observed=RankState.UNKNOWN, failure=reason
            )
        finally:
            moves.end(action.rank.process)
            scanner.on_change()
        # For a backend that does not count it is what NVML saw before.
        moved = outcome.moved_bytes or (size if outcome.failure is None else 0)
        seconds = outcome.seconds or time.monotonic() - started
        if outcome.failure is None:
            moves.learn(action.verb, moved, seconds)
        failure = outcome.failure
        if qualifying is not None:
            full = Outcome(
                observed=outcome.observed, failure=failure, moved_bytes=moved, seconds=seconds
            )
            failure = await self._learn(qualifying, action, full)
        return _make_finished(
            op=action.op,
            rank=action.rank,
            observed=outcome.observed,
            failure=failure,
            moved_bytes=moved,
            seconds=seconds,
        )

    async def _learn(
        self, qualifying: Qualifying, action: StartOperation, outcome: Outcome
    ) -> Reason | None:
        """Take down how an operation went, and return why it failed, with what may help."""
        backend, process, failure = self.around.backend, action.rank.process, outcome.failure
        if failure is not None and action.verb in _MOVES and failure.cause in _PERHAPS_THE_JOBS:
            # Who goes a way of its own already is not helped by that.
            alone = (backend.way_of(process) or "cuda") in _DRIVERS_OWN
            proposes = alone and failure.cause is Cause.UNSUPPORTED
            advice = (await qualifying.look(process)).advice(proposes=proposes)
            text = failure.text if advice is None else f"{failure.text}; {advice}"
            failure = replace(failure, text=text)
            outcome = replace(outcome, failure=failure)
        on_devices = None
        if failure is None and qualifying.wants_to_see(process, action.verb):
            on_devices = await qualifying.see(process, backend.context.measure)
        way = backend.way_of(process)
        lack = qualifying.on_operation(
            action.rank, action.verb, outcome, way=way, on_devices=on_devices
        )
        if lack is not None:
            job = str(action.tenancy.job)
            self.note("not_whole", "warning", job=job, rank=str(action.rank), reason=lack)
        return failure

    def _device_bytes(self, action: StartOperation) -> int:
        """Return what an operation is about to move, by what is known of the rank."""
        if action.verb not in MOVING:
            return 0
        tenancy = self.machine.tenancies.tenancy_of(action.rank)
        rank = tenancy.participant.ranks.get(action.rank.process) if tenancy is not None else None
        return rank.parked_bytes or rank.device_bytes if rank is not None else 0

    async def _scan(self, action: ScanGroups) -> Event:
        around = self.around
        try:
            found = await around.scanner.scan(action)
            if action.forgotten and around.backend.seen_by_nvml:
                known = {*self.machine.tenancies.home, *(rank.process for rank in found)}
                host = self.machine.config.host
                found += await around.scanner.forgotten(action.tenancy, known, host=host)
        except ScanFailed as exc:
            return GroupsScanned(op=action.op, failure=exc.reason)
        for rank in found:
            if rank.job is not None:
                around.backend.prepare(rank.process)
        unlisted = around.scanner.unlisted_on(action)
        return _make_scanned(op=action.op, found=found, unlisted=unlisted)

    def _reserve_host_memory(self, action: ReserveHostMemory) -> None:
        self.post(self._reserving.reserve_host(action))

    def _reserve_device_memory(self, action: ReserveDeviceMemory) -> None:
        if (event := self._reserving.reserve_device_at_once(action)) is not None:
            self.post(event)
        else:
            self._read_and_reserve(action)

    async def _run_hooks(self, action: RunHooks) -> Event:
        failure = await self.clients.run_hooks(action) if self.clients is not None else None
        return HooksRun(op=action.op, failure=failure)

    async def _reserve_numbers(self, action: ReserveNumbers) -> Event:
        try:
            await self.around.journal.reserve(action.ceiling)
        except JournalError as exc:
            reason = Reason(cause=Cause.JOURNAL, text=str(exc))
            return NumbersReserved(ceiling=action.ceiling, failure=reason)
        return NumbersReserved(ceiling=action.ceiling)

    # --- what goes on by itself ---------------------------------------------------------------

    async def observe_for_ever(self, interval_s: Callable[[], float]) -> None:
        """Look at all devices regularly, so that strangers are seen within 2 s."""
        failing = False
        while True:
            await asyncio.sleep(interval_s())
            self._notice_hindered()
            try:
                found, lost = await self.around.scanner.look_around()
            except ScanFailed as exc:
                if not failing:
                    self.note("devices", "error", reason=str(exc.reason))
                failing = True
                continue
            failing = False
            self.post(GroupsObserved(found=found, lost=tuple(lost.items())))
            if self.sampler is not None:
                scanner, groups = self.around.scanner, self.machine.config.groups
                self.sampler.add(scanner.readings, scanner.utilization, groups, time.monotonic())
            self.promise_host_memory()

    def _notice_hindered(self) -> None:
        """Tell the core of operations whose process was stopped after they had begun."""
        operations, backend = self.machine.tenancies.operations, self.around.backend
        hindered: dict[OpId, str] = {}
        for op, start in operations.items():
            if (reason := backend.hindrance(start.rank.process)) is not None:
                hindered[op] = reason
        for op, reason in hindered.items():
            if self._hindered.get(op) != reason:
                self.post(OperationHindered(op=op, reason=reason))
        for op in self._hindered.keys() - hindered.keys():
            self.post(OperationHindered(op=op, reason=None))
        self._hindered = hindered

    def promise_host_memory(self) -> None:
        """Promise host memory to every tenancy that has grown, so that it can always be parked."""
        for event in self._reserving.promises():
            self.post(event)

    async def flush_history_for_ever(self, interval_s: Callable[[], float]) -> None:
        """Hand the history over for storing, about every second; tell when that does not work."""
        told: JournalError | None = None
        while True:
            await asyncio.sleep(interval_s())
            self.around.history.flush()
            error = self.around.journal.background_error
            if error is not None and error is not told:
                told = error
                self.note("journal", "error", reason=str(error))
