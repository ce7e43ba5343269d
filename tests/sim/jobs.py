"""Jobs of the simulation: they take turns until they have had enough of them, whatever happens.

A job leases its groups either through one driver process or through a seat for each rank, all of
which ask for each turn. A turn is over when each seat has given its lease back, was refused, or
lost it; a seat that fails takes the others of that turn with it. So a job never waits for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from random import Random

from clients import Client
from sim_host import SimHost
from timeline import Timeline

from tsliced.core.actions import Action, ConfirmRelease, Grant, Refuse, TellLost
from tsliced.core.events import AcquireRequested
from tsliced.core.model import Arrival, GroupName, JobKey, LeaseId, ProcessId, RequestId, SessionId

#: Longest stay on a lease, and pauses between turns, seconds.
HOLD_S, THINK_S = 4.0, 3.0
#: From the end of a client to the next one in its seat, and between looks at what is to be done.
COME_AGAIN_S, LOOK_S = 3.0, 2.0


class Part(Enum):
    """How far a seat is in the turn of its job."""

    DONE = "done"
    ASKED = "asked"
    HOLDING = "holding"
    RELEASING = "releasing"


@dataclass(slots=True, eq=False)
class Seat:
    """Where a process of a job asks for turns; if it dies, another takes the seat."""

    host: SimHost
    session: SessionId | None = None
    lease: LeaseId | None = None
    #: The request with which it gives the lease back.
    release: RequestId | None = None
    part: Part = Part.DONE

    @property
    def client(self) -> Client | None:
        """Who sits there, if anybody does whose session goes on."""
        client = self.host.clients.get(self.session) if self.session is not None else None
        return None if client is None or client.ended else client


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A job and how it goes on. Mutate it only through its methods."""

    key: JobKey
    seats: list[Seat]
    #: What it leases, turn by turn.
    wants: list[tuple[GroupName, ...]]
    #: All hosts; its processes run where its groups have devices.
    hosts: tuple[SimHost, ...]
    turns: int
    timeline: Timeline
    random: Random
    make_context: Callable[[SimHost, JobKey, tuple[GroupName, ...], ProcessId | None], None]
    #: Gives a lease up before it is granted, with this probability.
    impatience: float = 0.1
    hooks: bool = False
    turn: int = 0
    #: Turns in which all that asked were granted, and codes with which others were refused.
    served: int = 0
    refusals: set[str] = field(default_factory=set)
    _granted: int = 0
    _failed: bool = False
    _arrival: Arrival = Arrival.ALL
    _busy_until: float = 0.0
    _looks: bool = False

    @property
    def over(self) -> bool:
        """Whether it wants nothing any more."""
        return self.turn >= self.turns and all(seat.part is Part.DONE for seat in self.seats)

    @property
    def content(self) -> bool:
        """Whether it is over and had what it wanted, unless its own processes stand in the way."""
        return self.over and (self.served > 0 or self.refusals == {"refused"})

    @property
    def groups(self) -> tuple[GroupName, ...]:
        """What this turn is about."""
        return self.wants[self.turn % len(self.wants)]

    def begin_anew(self) -> None:
        """Want to be served once more, without giving anything up."""
        self.served, self.impatience = 0, 0.0
        self.refusals.clear()
        self.want_more()

    def want_more(self) -> None:
        """Want one turn at least beyond the present one."""
        self.turns = max(self.turns, self.turn + 2)
        self.begin()

    def unrest(self) -> str:
        """Return how far it is, in words."""
        seats = (f"{seat.host.host} {seat.lease} {seat.part.value}" for seat in self.seats)
        return f"{self.key} in turn {self.turn} for {'+'.join(self.groups)}: {', '.join(seats)}"

    def begin(self) -> None:
        """Let its life begin, or go on after all, by itself."""
        if not self._looks:
            self._looks = True
            self.timeline.after(self.random.random() * THINK_S, self._look)

    def _look(self) -> None:
        """Do what is to be done, and look again a little later."""
        for seat in self.seats:
            self._tend(seat)
        if all(seat.part is Part.DONE for seat in self.seats):
            self._begin_turn()
        self._looks = not self.over
        if self._looks:
            self.timeline.after(self.random.random() * LOOK_S, self._look)

    # --- seats --------------------------------------------------------------------------------

    def _tend(self, seat: Seat) -> None:
        """See to it that somebody sits there and is connected."""
        host = seat.host
        if seat.session is not None and seat.client is None:
            seat.session, seat.lease = None, None
            self._fail(seat)
        if not host.alive or host.paused:
            return
        client = seat.client
        if client is None:
            seat.session = host.session(self.key, hooks=self.hooks)
        elif not client.connected:
            host.reconnect(client.session)
            if seat.part is Part.HOLDING and seat.lease in client.lost:
                self._fail(seat)

    def _begin_turn(self) -> None:
        if self.timeline.now < self._busy_until or self.turn >= self.turns:
            return
        if not all(seat.client is not None and seat.client.connected for seat in self.seats):
            return
        self._granted, self._failed = 0, False
        ranks = len(self.seats)
        self._arrival = arrival = self.random.choice(list(Arrival)) if ranks > 1 else Arrival.ALL
        for seat in self.seats:
            delay_s = self.random.random() if ranks > 1 else 0.0
            seat.part = Part.ASKED
            self.timeline.after(delay_s, partial(self._ask, seat, arrival, self.turn))

    def _ask(self, seat: Seat, arrival: Arrival, turn: int) -> None:
        if self.turn != turn or seat.part is not Part.ASKED:
            return
        client = seat.client
        if client is None or self._failed:
            # Whoever has asked already would wait for this one for ever.
            self._fail(seat)
            return
        seat.lease = seat.host.acquire(
            client.session,
            *self.groups,
            ranks=len(self.seats),
            arrival=arrival,
            timeout_s=self.random.choice((None, 5.0, 60.0)) if self.impatience else None,
        )
        if self.random.random() < self.impatience:
            self.timeline.after(
                self.random.random() * 10.0, partial(self._give_up, seat, seat.lease)
            )

    def _give_up(self, seat: Seat, lease: LeaseId | None) -> None:
        if seat.part is Part.ASKED and seat.lease == lease:
            self._fail(seat, ends=False)
            self._cancel(seat)

    def cancel_one(self) -> bool:
        """Let one seat take back what it waits for; return whether any did."""
        asked = [seat for seat in self.seats if seat.part is Part.ASKED and seat.lease]
        if asked:
            seat = self.random.choice(asked)
            self._give_up(seat, seat.lease)
        return bool(asked)

    def _cancel(self, seat: Seat) -> None:
        client, lease = seat.client, seat.lease
        if client is None or lease is None:
            self._end_part(seat)
        elif any(isinstance(r, AcquireRequested) for r in client.open.values()):
            seat.host.cancel(lease)

    def _fail(self, seat: Seat, *, ends: bool = True) -> None:
        """Let the turn have failed: who still waits in it takes that back."""
        if ends:
            self._end_part(seat)
        if self._failed:
            return
        self._failed = True
        for other in self.seats:
            if other is not seat and other.part is Part.ASKED and other.lease is not None:
                self._cancel(other)

    def _leave_behind(self, seat: Seat) -> None:
        if any(other.part is Part.ASKED for other in self.seats):
            self._fail(seat, ends=False)

    def _end_part(self, seat: Seat) -> None:
        if seat.part is Part.DONE:
            return
        seat.part, seat.lease, seat.release = Part.DONE, None, None
        if all(other.part is Part.DONE for other in self.seats):
            self.turn += 1
            self.served += self._granted == len(self.seats)
            self._busy_until = self.timeline.now + self.random.random() * THINK_S

    # --- answers ------------------------------------------------------------------------------

    def on_told(self, client: Client, action: Action) -> None:
        """Take in what one of its clients was told."""
        seat = next((seat for seat in self.seats if seat.session == client.session), None)
        if seat is None or not client.connected:
            return
        match action:
            case Grant(lease=lease) if lease == seat.lease and seat.part is Part.ASKED:
                self._on_grant(seat)
            case Refuse(request=request) if request == seat.release or (
                seat.part is Part.ASKED and seat.lease == f"{seat.session}.{request}"
            ):
                self.refusals.add(action.code)
                self._fail(seat)
            case ConfirmRelease(request=request) if request == seat.release:
                if self._arrival is Arrival.ALL:
                    # The round went on without ranks that died. Who has come in place of one would
                    # wait for a round that this seat takes part in no more.
                    self._leave_behind(seat)
                self._end_part(seat)
            case TellLost(lease=lease) if lease == seat.lease:
                self._fail(seat)
            case _:
                pass

    def _on_grant(self, seat: Seat) -> None:
        seat.part = Part.HOLDING
        self._granted += 1
        lease = seat.lease
        self.timeline.after(self.random.random(), lambda: self._use(seat, lease))
        hold_s = 1.0 + self.random.random() * HOLD_S
        self.timeline.after(hold_s, lambda: self._release(seat, lease))

    def _use(self, seat: Seat, lease: LeaseId | None) -> None:
        """Make the contexts that are not there yet."""
        client = seat.client
        if seat.part is not Part.HOLDING or seat.lease != lease or client is None:
            return
        if lease not in client.held:
            return
        if len(self.seats) > 1:
            self.make_context(seat.host, self.key, self.groups, client.process)
            return
        for host in self.hosts:
            if host.alive:
                own = client.process if host is seat.host else None
                self.make_context(host, self.key, self.groups, own)

    def _release(self, seat: Seat, lease: LeaseId | None) -> None:
        if seat.part is not Part.HOLDING or seat.lease != lease or lease is None:
            return
        seat.part = Part.RELEASING
        if seat.client is None:
            self._end_part(seat)
        elif lease in seat.client.held:
            seat.release = seat.host.release(lease)
        else:
            self._fail(seat)
