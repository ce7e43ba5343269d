"""What a round needs of hosts that move state on its groups.

Rules:

* What is in its way, and another host moves, that host is asked to take off (`Clear`).
* What is of its own job, and another host moves, that host is asked to cede (`Cede`): all of a
  lease is moved from one place.
* Who was asked is not asked again before it has answered, or was away; after an answer that does
  not help there is a pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsliced.core.coordinator import MAX_DOUBLINGS
from tsliced.core.lending import Lending
from tsliced.core.messages import Cede, Clear, NotCleared
from tsliced.core.model import Cause, GroupName, HostName, JobKey, Reason, RoundId, TenancyKey
from tsliced.core.remedies import out_of_silence
from tsliced.core.rounds import Round
from tsliced.core.timers import TimerKey, TimerKind

if TYPE_CHECKING:
    from random import Random


@dataclass(slots=True, kw_only=True)
class Clearing(Lending):
    """The books of one host, and what rounds in them need of other hosts."""

    random: Random

    # --- what is in the way -------------------------------------------------------------------

    def _clear_guests(self, round_: Round) -> bool:
        """Have taken off what others move on groups of here; return whether there is nothing."""
        arbitrated = [group for group in round_.groups if group in self.arbiters]
        others = [
            (guest, group)
            for group in arbitrated
            for guest in self.tenancies.guests_on(group)
            if guest[0] != round_.job
        ]
        for guest, group in others:
            self._ask_to_clear(round_, guest, group)
        return not others

    def _ask_to_clear(
        self, round_: Round, guest: tuple[JobKey, HostName], group: GroupName
    ) -> None:
        """Ask the host that moves a job's state on a group to take it off."""
        job, lead = guest
        round_.moved = True
        if lead == self.tenancies.host:
            # It becomes one of those that this host moves before this event is dealt with.
            return
        if lead not in self.tenancies.links.up:
            text = f"host {lead}, which moves what job {job} has on {group}, is not connected"
            reason = Reason(cause=Cause.SILENT, text=text)
            self.tell_stalled(round_, job, reason, out_of_silence())
        elif (job, group) not in round_.clearing and not self._pausing(round_):
            round_.clearing.add((job, group))
            self.say(lead, Clear(job=job, group=group))

    def on_not_cleared(self, message: NotCleared, now: float) -> None:
        """Another host could not take a job off a group."""
        round_ = self.chosen_for(message.group)
        if round_ is None or (message.job, message.group) not in round_.clearing:
            return
        if message.job not in [job for job, _ in self.tenancies.guests_on(message.group)]:
            # It has gone meanwhile.
            round_.clearing.discard((message.job, message.group))
            return
        self.tell_stalled(round_, message.job, message.reason, message.way_out)
        if not message.given_up:
            # Else whoever moves it tries again by itself when something has changed.
            round_.clearing.discard((message.job, message.group))
            key = TenancyKey(message.job, (message.group,))
            tries = round_.evict_tries[key] = round_.evict_tries.get(key, 0) + 1
            self._pause(round_, tries, now)

    # --- what is to be moved from here --------------------------------------------------------

    def _gather(self, round_: Round) -> bool:
        """Have what others move of a round's job ceded; return whether nothing is left to be."""
        there = (host for e in round_.elsewhere.values() for host in e.leads)
        here = self.tenancies.leads_of(round_.job, round_.groups)
        for host in dict.fromkeys((*here, *there)):
            if host == self.tenancies.host or host in round_.ceding:
                continue
            if self._pausing(round_):
                return False
            round_.ceding[host] = False
            self.say(host, Cede(round=round_.id, job=round_.job, groups=round_.groups))
        return all(round_.ceding.values())

    def on_ceded(self, host: HostName, round_id: RoundId, now: float) -> Round | None:
        """Another host has ceded all that it moved of a round's job; return the round, to go on."""
        round_ = self.rounds.get(round_id)
        if round_ is None or host not in round_.ceding:
            return None
        # It moves nothing more of the job there.
        self.tenancies.forget_claim(host, round_.job, round_.groups)
        if host in self.tenancies.leads_of(round_.job, round_.groups):
            # It has yet to hear of what it moves.
            del round_.ceding[host]
            self._pause(round_, 1, now)
            return None
        round_.ceding[host] = True
        return round_

    # --- pauses before another try ------------------------------------------------------------

    def _pausing(self, round_: Round) -> bool:
        return self.timers.get(TimerKey(TimerKind.RETRY, round_.id)) is not None

    def _pause(self, round_: Round, tries: int, now: float) -> None:
        limits = self.limits
        pause_s = min(limits.retry_max_s, limits.retry_min_s * 2 ** min(tries - 1, MAX_DOUBLINGS))
        # Jitter: two hosts that turned back together must not try again together.
        pause_s *= 0.5 + self.random.random()
        round_.paused = True
        self.timers.set(TimerKey(TimerKind.RETRY, round_.id), now + pause_s)
