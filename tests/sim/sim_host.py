"""One host of the simulation: a daemon, the processes and devices of its machine, and its clients.

The world of `tests/tsliced/core` with time in it: long actions end after a while, one after the
other for each process, whatever becomes of the daemon meanwhile; what is said to the daemon is
read in order; and the daemon can be killed, stopped, and lose its machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from clients import Client, Request
from network import Network
from simulated import failure
from timeline import Timeline
from world import Crash, World

from tsliced.core.actions import (
    NOTHING,
    Action,
    Effects,
    ReserveNumbers,
    Send,
    StartOperation,
)
from tsliced.core.events import (
    Event,
    GroupsObserved,
    NumbersReserved,
    ProcessExited,
    Started,
    TimePassed,
)
from tsliced.core.model import Cause, GroupName, JobKey, ProcessId, SessionId, Verb

#: How long a long action takes, seconds at most; a call that hangs takes as long as it likes.
DURATIONS_S = {
    Verb.FREEZE: 0.4,
    Verb.SNAPSHOT: 3.0,
    Verb.RESTORE: 3.0,
    Verb.THAW: 0.3,
    Verb.QUERY: 0.1,
}
STEP_S = 0.2
#: From a process's end, or its first sight on a device, to the daemon's knowledge of it.
EXIT_S, LOOK_S = 0.02, 2.0
#: A client's words on their way.
CLIENT_S = 0.01


@dataclass(slots=True, eq=False)
class Call:
    """A backend call on a process: the first one in its queue is under way."""

    start: StartOperation
    #: Of which run of the daemon: nobody waits for the result of an earlier one.
    life: int


@dataclass(slots=True, kw_only=True, eq=False)
class SimHost(World):
    """A daemon and its surroundings on a timeline."""

    timeline: Timeline
    network: Network
    random: Random
    #: Looks at the host after each event.
    after: Callable[[SimHost, Event], None] = lambda _host, _event: None
    #: Hears what the host's clients are told.
    told: Callable[[Client, Action], None] = lambda _client, _action: None
    #: Hears what happens to the host, in words.
    note: Callable[[str, str], None] = lambda _host, _text: None
    #: Returns what a job's clients, wherever they are, believe to hold.
    held_by: Callable[[JobKey], set[GroupName]] = lambda _owner: set()
    boot: str = ""
    alive: bool = False
    paused: bool = False
    #: Each run of the daemon has another number.
    life: int = 0
    #: How far its clock is ahead of the timeline, seconds.
    skew_s: float = 0.0
    #: Everything takes so many times as long.
    slowness: float = 1.0
    #: So many of the next calls do not come back before they are let go.
    hanging: int = 0
    #: So many of the next calls fail, and by bad luck this share of the others.
    failing: int = 0
    bad_luck: float = 0.0
    #: Its journal missed something.
    was_broken: bool = False
    #: The machine runs.
    powered: bool = False
    boots: int = 0
    _hung: dict[ProcessId, None] = field(default_factory=dict)
    _calls: dict[ProcessId, deque[Call]] = field(default_factory=dict)
    _backlog: deque[Event] = field(default_factory=deque)
    _depth: int = 0
    _armed: float | None = None
    _look_is_due: bool = False

    def __post_init__(self) -> None:
        self.auto = False

    # --- the daemon ---------------------------------------------------------------------------

    def boot_up(self) -> None:
        """Let the machine run, after it had no power, and its daemon."""
        self.boots, self.powered = self.boots + 1, True
        self.boot = f"{self.host}-boot-{self.boots}"
        self.start()

    def start(self) -> None:
        """Start the daemon with what its journal has."""
        self.note(self.host, "daemon starts")
        self.alive, self.life = True, self.life + 1
        self._armed = None
        self.now = self.timeline.now + self.skew_s
        self.start_daemon()
        self.feed(Started())
        for _ in range(len(self.inbox)):
            self._read_soon()
        self.look_soon()
        self.network.start(self.host)

    def kill(self, *, silently: bool = False) -> None:
        """Kill the daemon: what is kept stays, and calls that are under way end."""
        self.note(self.host, "daemon is killed")
        self.alive, self.paused, self.fuse = False, False, None
        self._backlog.clear()
        for action in self.pending:
            if isinstance(action, ReserveNumbers) and self.random.random() < 0.5:
                self.durable_ceiling = max(self.durable_ceiling, action.ceiling)
        for calls in self._calls.values():
            while len(calls) > 1:
                calls.pop()
        self.end_daemon()
        self.network.end(self.host, silently=silently)

    def lose_power(self) -> None:
        """Take the machine's processes, their state and all that is only kept away."""
        self.note(self.host, "power is lost")
        self.kill(silently=True)
        self.powered = False
        for client in self.clients.values():
            client.end()
        self.clients.clear()
        self.processes.clear()
        self._calls.clear()
        self._hung.clear()
        self.journal.clear()

    def pause(self) -> None:
        """Stop the daemon: it reads nothing and does nothing."""
        self.note(self.host, "daemon is stopped")
        self.paused = True
        self.network.listen_to(self.host)

    def go_on(self) -> None:
        """Continue the daemon: it reads what has come meanwhile."""
        if not self.paused:
            return
        self.note(self.host, "daemon is continued")
        self.paused = False
        self.network.listen_to(self.host)
        while self._backlog and self.alive:
            self.feed(self._backlog.popleft())
        while self.inbox and self.alive:
            self.read()
        self._arm()

    def tell(self, event: Event) -> None:
        """Hand an event over, now or when the daemon goes on."""
        if self.paused:
            self._backlog.append(event)
        elif self.alive:
            self.feed(event)

    def feed(self, event: Event) -> Effects:
        """Let the daemon deal with an event, and die of it where its fuse burns down."""
        self.now = self.timeline.now + self.skew_s
        self._depth += 1
        try:
            effects = World.feed(self, event)
        except Crash:
            if self._depth > 1:
                raise
            self.kill()
            effects = NOTHING
        finally:
            self._depth -= 1
        if not self._depth:
            self._arm()
            self.after(self, event)
        return effects

    def do(self, action: Action) -> None:
        """Do one action; one that takes time ends later."""
        World.do(self, action)
        match action:
            case Send(host=target, message=message):
                self.network.send(self.host, target, message)
            case StartOperation():
                self._call(Call(action, self.life))
            case _ if self.pending and self.pending[-1] is action:
                delay_s = self.random.random() * STEP_S * self.slowness
                life = self.life
                self.timeline.after(delay_s, lambda: self._end_step(action, life))
            case _:
                client = self.clients.get(getattr(action, "session", SessionId("")))
                if client is not None:
                    self.told(client, action)

    def _end_step(self, action: Action, life: int) -> None:
        if self.alive and life == self.life:
            self.pending.remove(action)
            self.tell(self.result(action))

    def result(self, action: Action) -> Event:
        """Carry a long action out; what must be durable fails on a disk that takes nothing."""
        if isinstance(action, ReserveNumbers) and self.journal_broken is not None:
            return NumbersReserved(ceiling=action.ceiling, failure=self.journal_broken)
        return World.result(self, action)

    # --- calls of the backend -----------------------------------------------------------------

    def _call(self, call: Call) -> None:
        process = call.start.rank.process
        calls = self._calls.setdefault(process, deque())
        calls.append(call)
        if len(calls) == 1:
            self._begin_call(process)

    def _begin_call(self, process: ProcessId) -> None:
        call = self._calls[process][0]
        if self.hanging and process in self.processes:
            self.hanging -= 1
            self.note(self.host, f"{call.start.verb.value} of {process.pid} hangs")
            self._hung[process] = None
            return
        delay_s = self.random.random() * DURATIONS_S[call.start.verb] * self.slowness
        self.timeline.after(delay_s, lambda: self._end_call(process, call))

    def _end_call(self, process: ProcessId, call: Call) -> None:
        calls = self._calls.get(process)
        if not calls or calls[0] is not call:
            return
        calls.popleft()
        if calls:
            self._begin_call(process)
        else:
            del self._calls[process]
        if self.alive and call.life == self.life:
            self.pending.remove(call.start)
            self.tell(self.result(call.start))
        else:
            # Its worker has lived on, and nobody is told.
            self._operate(call.start)

    def let_calls_go(self) -> None:
        """Let the calls that hang come back."""
        for process in list(self._hung):
            self._let_go(process)

    def _let_go(self, process: ProcessId) -> None:
        if process in self._hung:
            del self._hung[process]
            self._end_call(process, self._calls[process][0])

    @property
    def busy_ranks(self) -> bool:
        """Whether a call is under way."""
        return bool(self._calls)

    # --- time ---------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Plan `TimePassed` for the machine's deadline."""
        due = self.machine.deadline if self.alive else None
        if due is None or due == self._armed:
            return
        self._armed = due
        self.timeline.at(due - self.skew_s, lambda: self._ring(due))

    def _ring(self, due: float) -> None:
        if not self.alive or self._armed != due:
            return
        self._armed = None
        if not self.paused:
            # Of an instant that is reckoned back and forth, the last digit may be lost.
            self.skew_s = max(self.skew_s, due - self.timeline.now)
            self.feed(TimePassed())

    def jump(self, seconds: float) -> None:
        """Let the machine's clock jump ahead, as it does where a virtual machine was stopped."""
        self.note(self.host, f"clock jumps by {seconds:.0f} s")
        self.skew_s += seconds
        self._armed = None
        self.now = self.timeline.now + self.skew_s
        self._arm()

    # --- what is said to the daemon -----------------------------------------------------------

    def post(self, event: Event) -> None:
        """Let a client say something, which the daemon reads a little later, in order."""
        self.inbox.append(event)
        self._read_soon()

    def _read_soon(self) -> None:
        self.timeline.after(self.random.random() * CLIENT_S, self._read_one)

    def _read_one(self) -> None:
        if self.inbox and self.alive and not self.paused:
            self.read()

    def send(self, request: Request) -> None:
        """Let a client send a request; without a connection it is sent later."""
        client = self.clients[request.session]
        client.ask(request)
        if client.connected:
            self.post(request)

    def die(self, process: ProcessId) -> None:
        """Let a process end; the daemon learns of it a little later."""
        self.note(self.host, f"process {process.pid} ends")
        self.processes.pop(process, None)
        for session in [s for s, c in self.clients.items() if c.process == process]:
            self.clients.pop(session).end()
            self.inbox = deque(e for e in self.inbox if getattr(e, "session", None) != session)
        life = self.life

        def report() -> None:
            if life == self.life:
                self.tell(ProcessExited(process=process))

        self.timeline.after(self.random.random() * EXIT_S, report)
        # A call on a process that is gone comes back, also one that hung.
        self.timeline.after(0.1, lambda: self._let_go(process))

    def groups_held_by(self, owner: JobKey) -> set[GroupName]:
        """Return what a job's clients, here and elsewhere, believe to hold."""
        return self.held_by(owner)

    def look_soon(self) -> None:
        """Let the daemon's next regular look at the devices come before long."""
        if not self._look_is_due:
            self._look_is_due = True
            self.timeline.after(self.random.random() * LOOK_S, self._look)

    def _look(self) -> None:
        self._look_is_due = False
        devices = frozenset(device for group in self.groups for device in group.devices)
        if self.alive:
            self.tell(GroupsObserved(found=self.found(devices)))

    def free_memory(self) -> None:
        """Let the devices be free of what snapshots have left there, and leave nothing any more."""
        self.noop_snapshots = False
        for process in self.processes.values():
            process.leftover = False

    def fill_disk(self) -> None:
        """Let the journal take nothing."""
        self.journal_broken, self.was_broken = failure(Cause.JOURNAL), True

    def empty_disk(self) -> None:
        """Let the journal take everything again."""
        self.journal_broken = None
