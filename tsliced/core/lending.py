"""Groups that a round of one host takes from the arbiter of another.

    round's host                  arbiter
    Reserve        ──────────▶    queue, clear the devices
                   ◀──────────    Reserved (token)
    ... the round's next groups, in the configured order ...
    Commit         ──────────▶    keep it until it is given back
                   ◀──────────    Committed
    move, grant, hold
    GiveBack       ──────────▶    the next one

Rules:

* What is reserved may be taken back as long as it is not committed: when the round's host is lost,
  or the group is closed. So the round uses nothing before all of its groups are committed.
* What is committed ends with the round, or with a proof that its host is gone.
* Where it is arbitrated, a round without members stands for it, and queues like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tsliced.core.actions import Note, ReservationRecord
from tsliced.core.messages import (
    Commit,
    Committed,
    GiveBack,
    NotReserved,
    Reservations,
    Reserve,
    Reserved,
    StalledElsewhere,
    Unreserved,
    Waiting,
)
from tsliced.core.model import (
    Arrival,
    GroupName,
    HostName,
    JobKey,
    Reason,
    RoundId,
    Token,
)
from tsliced.core.numbers import Numbers
from tsliced.core.rounds import GRANTING, HELD, QUEUED, Borrower, Elsewhere, Round
from tsliced.core.watchdogs import Watchdogs

NO_ROUND = RoundId(0)


@dataclass(slots=True, kw_only=True)
class Lending(Watchdogs):
    """The books of one host, with what rounds take from arbiters elsewhere."""

    numbers: Numbers
    #: Number of the latest round.
    last_round: RoundId = NO_ROUND
    #: Order of arrival given out last.
    last_place: int = 0
    #: Rounds that stand for those of other hosts.
    borrowers: dict[Borrower, RoundId] = field(default_factory=dict)

    # --- where the round is -------------------------------------------------------------------

    def reserve_elsewhere(self, round_: Round, group: GroupName) -> bool:
        """Ask an arbiter elsewhere for a group, once; return whether the round has it."""
        there = round_.elsewhere.get(group)
        if there is None:
            there = Elsewhere(arbiter=self.tenancies.arbiter_of(group))
            round_.elsewhere[group] = there
            self._want(round_, group, there)
        elif there.token is None and there.at_once != round_.must_not_wait:
            self._want(round_, group, there)
        return there.token is not None

    def _want(self, round_: Round, group: GroupName, there: Elsewhere) -> None:
        token = there.token if there.committed else None
        there.at_once = token is None and round_.must_not_wait
        ask = Reserve(
            round=round_.id, job=round_.job, group=group, token=token, at_once=there.at_once
        )
        self.say(there.arbiter, ask)

    def commit(self, round_: Round) -> bool:
        """Keep what is reserved elsewhere; return whether all of it is kept."""
        for group, there in round_.elsewhere.items():
            if not there.committing:
                there.committing = True
                assert there.token is not None, "it has all of its groups"
                commit = Commit(round=round_.id, group=group, token=there.token)
                self.say(there.arbiter, commit)
        return all(there.committed for there in round_.elsewhere.values())

    def on_arbiter_connected(self, host: HostName) -> None:
        """Let an arbiter know what rounds of here have and want of it, and ask again."""
        self.tell_reservations(host)
        for round_, group, there in self._wanted_of(host):
            self._want(round_, group, there)

    def _wanted_of(self, host: HostName) -> list[tuple[Round, GroupName, Elsewhere]]:
        """Return what rounds of here have and want of an arbiter elsewhere."""
        return [
            (round_, group, there)
            for round_ in self.rounds.values()
            for group, there in round_.elsewhere.items()
            if there.arbiter == host
        ]

    def tell_reservations(self, host: HostName) -> None:
        """Tell an arbiter all that rounds of here have and want of it, and whom this host moves."""
        arbiter_of, wanted = self.tenancies.arbiter_of, self._wanted_of(host)
        claims = {
            (key.job, group): None
            for key, tenancy in self.tenancies.all.items()
            for group in (key.groups if tenancy.led_here else ())
            if arbiter_of(group) == host
        }
        # Those of whom it will move something soon, too.
        claims |= {(round_.job, group): None for round_, group, _ in wanted}
        pairs = tuple((round_.id, group) for round_, group, _ in wanted)
        self.say(host, Reservations(wanted=pairs, claims=tuple(claims)))

    def tell_unclaimed(self) -> None:
        """Let arbiters elsewhere know of what this host does not move any more."""
        tenancies = self.tenancies
        for host in dict.fromkeys(map(tenancies.arbiter_of, tenancies.unclaimed)):
            self.tell_reservations(host)
        tenancies.unclaimed.clear()

    def note_claims(self, host: HostName, claims: Iterable[tuple[JobKey, GroupName]]) -> None:
        """Know whom another host moves on groups of arbiters here: just these."""
        known = self.tenancies.claimed
        self.forget_claims(host)
        for job, group in claims:
            if group in self.arbiters:
                known.setdefault((job, group), {})[host] = None

    def forget_claims(self, host: HostName) -> None:
        """Know that another host moves nobody on groups of arbiters here."""
        for job, group in list(self.tenancies.claimed):
            self.tenancies.forget_claim(host, job, [group])

    def _there(self, host: HostName, round_id: RoundId, group: GroupName) -> Elsewhere | None:
        round_ = self.rounds.get(round_id)
        there = round_.elsewhere.get(group) if round_ is not None else None
        return there if there is not None and there.arbiter == host else None

    def on_reserved(self, host: HostName, message: Reserved) -> Round | None:
        """An arbiter elsewhere has reserved a group; return the round that can go on."""
        there = self._there(host, message.round, message.group)
        if there is None:
            self.say(host, GiveBack(round=message.round, group=message.group))
            return None
        # Whatever was asked before may not have been heard, or of another reservation.
        there.committing = there.committed
        there.token, there.leads = message.token, message.leads
        return self.rounds[message.round]

    def on_committed(self, host: HostName, message: Committed) -> Round | None:
        """An arbiter elsewhere keeps a group; return the round that can go on."""
        there = self._there(host, message.round, message.group)
        if there is None or not there.committing or there.token != message.token:
            return None
        there.committed = True
        self.borrowed[message.group] = message.round
        return self.rounds[message.round]

    def on_unreserved(self, host: HostName, message: Unreserved) -> Round | None:
        """An arbiter elsewhere took a group back; return the round, which waits for it again.

        It is left to the caller if it is held: then it is over.
        """
        there = self._there(host, message.round, message.group)
        if there is None or there.token is None:
            return None
        round_ = self.rounds[message.round]
        if round_.state is not HELD:
            self._lose(round_, message.group, there)
            self._want(round_, message.group, there)
        return round_

    def _lose(self, round_: Round, group: GroupName, there: Elsewhere) -> None:
        """Know that a round that is not held does not have a group of an arbiter elsewhere."""
        there.token, there.committing, there.committed = None, False, False
        self.borrowed.pop(group, None)
        index = round_.groups.index(group)
        for later in round_.groups[index + 1 :]:
            self.leave_group(round_, later)
        round_.reserved, round_.state = min(index, round_.reserved), QUEUED

    def on_arbiter_died(self, host: HostName) -> list[Round]:
        """All that rounds have of an arbiter elsewhere is gone; return those that hold it.

        All others were set aside when it was silent.
        """
        for round_ in self.rounds.values():
            round_.ceding.pop(host, None)
            for there in round_.elsewhere.values():
                there.leads = tuple(lead for lead in there.leads if lead != host)
        return [
            round_
            for round_ in self.rounds.values()
            if any(there.arbiter == host for there in round_.elsewhere.values())
        ]

    def on_waiting(self, host: HostName, message: Waiting) -> Round | None:
        """It is known anew how many wait for a group; return the round that has it."""
        there = self._there(host, message.round, message.group)
        if there is None:
            return None
        there.waiters = message.waiters
        return self.rounds[message.round]

    # --- where the arbiter is -----------------------------------------------------------------

    def open_for(self, host: HostName, message: Reserve, now: float) -> Round | None:
        """Let a round stand for one of another host; return it if it has to go on."""
        borrower = Borrower(host, message.round, message.group)
        arbiter = self.arbiters.get(message.group)
        if arbiter is None:
            text = f"{self.tenancies.host} does not arbitrate {message.group}"
            self.say(host, _refusal(message.round, message.group, "unknown_group", text))
            return None
        known = self.rounds.get(self.borrowers.get(borrower, NO_ROUND))
        if known is not None:
            known.at_once = message.at_once
            if known.reserved_at_home:
                self._tell_reserved(known)
                return None
            return known
        if message.token is not None and arbiter.chosen is not None:
            # This daemon had forgotten it, and has let somebody else have it.
            self.say(host, Unreserved(round=message.round, group=message.group))
            return None
        self.last_round = RoundId(self.last_round + 1)
        self.last_place += 1
        round_ = self.stand_in(borrower, message.job, self.last_round)
        round_.place, round_.asked_at = self.last_place, now
        round_.at_once = message.at_once
        if message.token is not None:
            # This daemon has forgotten it.
            claimed = arbiter.claim(round_.id)
            assert claimed, "nobody has it"
            self.keep_for(round_, message.token, now)
            return None
        self.out.append(reservation_of(round_))
        return round_

    def stand_in(self, borrower: Borrower, job: JobKey, number: RoundId) -> Round:
        """Enter a round that stands for another host's into the books."""
        round_ = Round(
            id=number,
            job=job,
            groups=(borrower.group,),
            ranks=1,
            arrival=Arrival.FIRST,
            asked_at=0.0,
            state=QUEUED,
            stands_for=borrower,
        )
        self.rounds[number] = round_
        self.borrowers[borrower] = number
        return round_

    def keep_for(self, round_: Round, token: Token, now: float) -> None:
        """Let a round of another host have a group until it gives it back."""
        round_.state, round_.reserved, round_.reserved_at_home = HELD, 1, True
        round_.kept_at = now
        round_.tokens = ((round_.groups[0], token),)
        home, _, group = round_.borrower
        self.tenancies.claimed.setdefault((round_.job, group), {})[home] = None
        self.out.append(reservation_of(round_))

    def lend(self, round_: Round, now: float) -> None:
        """Tell another host that its round has a group, for now."""
        if round_.reserved_at_home:
            if round_.commit_asked:
                self._keep_if_clear(round_, now)
            return
        home, _, group = round_.borrower
        token = self.numbers.take()
        if token is None:
            return
        assert self.arbiters[group].chosen == round_.id, "only what it has is lent"
        self.tenancies.assert_alone(group, round_.job, but_led_by=home)
        round_.tokens, round_.reserved_at_home = ((group, token),), True
        self._note("lent", round_)
        self._tell_reserved(round_)

    def _tell_reserved(self, round_: Round) -> None:
        home, number, _ = round_.borrower
        ((group, token),) = round_.tokens
        leads = self.tenancies.leads_of(round_.job, (group,))
        if self.tenancies.led_on(round_.job, group):
            leads.append(self.tenancies.host)
        reserved = Reserved(
            round=number,
            group=group,
            token=token,
            leads=tuple(lead for lead in leads if lead != home),
        )
        self.say(home, reserved)
        if round_.state is HELD:
            self._tell_committed(round_)

    def _tell_committed(self, round_: Round) -> None:
        home, number, _ = round_.borrower
        ((group, token),) = round_.tokens
        self.say(home, Committed(round=number, group=group, token=token))
        self._tell_waiting(round_)

    def on_commit(self, host: HostName, message: Commit, now: float) -> None:
        """Keep a group for a round of another host, if it still has it."""
        borrower = Borrower(host, message.round, message.group)
        known = self.rounds.get(self.borrowers.get(borrower, NO_ROUND))
        tokens = ((message.group, message.token),)
        if known is None or known.tokens != tokens or not known.reserved_at_home:
            self.say(host, Unreserved(round=message.round, group=message.group))
            return
        known.commit_asked = True
        self._keep_if_clear(known, now)

    def _keep_if_clear(self, round_: Round, now: float) -> None:
        """Keep a group for a round that has asked for it, unless somebody is on it again."""
        if round_.state is GRANTING:
            self.keep_for(round_, round_.tokens[0][1], now)
        if round_.state is HELD:
            self._tell_committed(round_)

    def take_back(self, round_: Round) -> None:
        """Tell another host that its round does not have a group any more, if it was told so."""
        if round_.reserved_at_home:
            round_.reserved_at_home, round_.commit_asked, round_.tokens = False, False, ()
            home, number, group = round_.borrower
            self.say(home, Unreserved(round=number, group=group))

    def tell_contended(self, group: GroupName) -> None:
        """Tell who holds a group that its waiters have come or gone."""
        round_ = self.chosen_for(group)
        if round_ is None or round_.stands_for is None:
            Watchdogs.tell_contended(self, group)
        elif round_.state is HELD:
            self._tell_waiting(round_)

    def _tell_waiting(self, round_: Round) -> None:
        """Tell another host how many wait for what its round has."""
        home, number, group = round_.borrower
        waiters = len(self.arbiters[group].queue)
        self.say(home, Waiting(round=number, group=group, waiters=waiters))

    def refuse_elsewhere(self, round_: Round, code: str, text: str) -> None:
        """Tell another host that its round cannot have a group."""
        home, number, group = round_.borrower
        self.say(home, _refusal(number, group, code, text))

    def tell_stalled(self, round_: Round, job: JobKey, reason: Reason, way_out: str = "") -> None:
        """Tell a round, once for each reason, why its turn does not come."""
        if round_.stands_for is None:
            Watchdogs.tell_stalled(self, round_, job, reason, way_out)
        elif round_.stalled != reason:
            round_.stalled = reason
            home, number, group = round_.stands_for
            message = StalledElsewhere(
                round=number, group=group, job=job, reason=reason, way_out=way_out
            )
            self.say(home, message)

    def borrowed_by(self, host: HostName) -> list[Round]:
        """Return the rounds that stand for those of a host."""
        return [self.rounds[number] for key, number in self.borrowers.items() if key.host == host]

    def unwanted(self, host: HostName, message: Reservations) -> list[Round]:
        """Return the rounds that stand for some of a host, which no longer wants them."""
        wanted = set(message.wanted)
        return [
            self.rounds[number]
            for key, number in self.borrowers.items()
            if key.host == host and (key.round, key.group) not in wanted
        ]

    def forget_borrower(self, round_: Round) -> None:
        """Strike a round that stood for another host's; it is over."""
        if round_.stands_for is not None:
            del self.borrowers[round_.stands_for]
            self.out.append(reservation_of(round_, over=True))
            self._note("given_back", round_)

    def _note(self, kind: str, round_: Round) -> None:
        home, _, group = round_.borrower
        facts = {"job": str(round_.job), "groups": group, "host": home}
        self.out.append(Note(kind=kind, level="info", facts=facts))

    def check_lending(self) -> None:
        """Assert what must hold between any two events."""
        for borrower, number in self.borrowers.items():
            round_ = self.rounds[number]
            assert (round_.stands_for, round_.groups) == (borrower, (borrower.group,))
            assert round_.state is not HELD or round_.reserved_at_home


def reservation_of(round_: Round, *, over: bool = False) -> ReservationRecord:
    """Return what must be kept of a round that stands for another host's."""
    home, number, group = round_.borrower
    return ReservationRecord(
        host=home,
        round=number,
        group=group,
        job=round_.job,
        place=round_.place,
        token=round_.tokens[0][1] if round_.state is HELD else None,
        over=over,
    )


def _refusal(round_id: RoundId, group: GroupName, code: str, text: str) -> NotReserved:
    return NotReserved(round=round_id, group=group, code=code, text=text)
