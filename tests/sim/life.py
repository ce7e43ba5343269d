"""One life of a simulated cluster: first anything goes wrong, then everything is mended.

In the first part only safety is asked for: the oracle and the core's own invariants, at every step.
In the second nothing new goes wrong, and everybody must get an answer, run, and have enough turns.
Then all leave, and nothing of them may be remembered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random

from cluster import Cluster
from faults import FAULTS, OF_LINKS, Target
from oracle import Oracle
from sim_host import SimHost

from tsliced.core.actions import Action, Grant, Send
from tsliced.core.coordinator import Place
from tsliced.core.events import Event
from tsliced.core.model import GroupName, HostName, JobKey, TenancyKey

#: How long things go wrong, seconds; and how long it may take until everybody has what they want.
STORM_S, REST_S = (20.0, 90.0), 7200.0
#: No life without so many changes of whose state is on a group.
MIN_SWITCHES = 3
#: Events of a life, which are a thousand as a rule: who turns in circles has more.
MAX_EVENTS = 50_000
#: From the beginning of a phase to the fault that is to hit it, seconds at most.
AIM_S = 0.5
#: Phases that need something to go wrong first, what is done for it, and how often at most.
MAX_CAUSES = 6
CAUSES = {
    Place.TURNING_BACK: (Place.FREEZING, "call fails"),
    Place.REVIVING: (Place.FREEZING, "call fails"),
    Place.WITHDRAWING: (Place.RESTORING, "call fails"),
    Place.ASKING: (Place.SNAPSHOTTING, "daemon killed"),
}
#: Whether groups are on several hosts, and have their arbiters on different ones. Without that,
#: several hosts are several daemons that hear of each other.
SPANNING, APART = True, True
#: Phases that come to pass less often than they are aimed at, or are soon over.
WEIGHTS = {Place.WITHDRAWING: 4, Place.RESTORING: 3, Place.THAWING: 3, Place.ASKING: 2}
PHASES = tuple(place for place in Place if place is not Place.BLOCKED)


@dataclass(frozen=True, slots=True)
class Aim:
    """A fault that is to hit a tenancy in a phase of its move."""

    phase: Place
    fault: str


def all_pairs() -> Iterator[Aim]:
    """Return everything that can be aimed at."""
    return (Aim(phase, fault) for phase in PHASES for fault in FAULTS)


@dataclass(slots=True, eq=False)
class Life:
    """One life. `hits`: which phases were hit by which faults."""

    seed: int
    spanning: bool = SPANNING
    apart: bool = APART
    full_checks: bool = True
    hits: Counter[Aim] = field(default_factory=Counter)
    switches: int = 0
    cluster: Cluster = field(init=False)
    random: Random = field(init=False)
    #: What is still to be hit.
    _aims: list[Aim] = field(default_factory=list)
    #: By what is to be hit: how many times more something is done for it.
    _causes: dict[Aim, int] = field(default_factory=dict)
    _storm: bool = True
    _events: int = 0
    _places: dict[tuple[HostName, TenancyKey], Place] = field(default_factory=dict)
    _holder: dict[GroupName, JobKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster = Cluster(
            self.seed,
            spanning=self.spanning,
            apart=self.apart,
            full_checks=self.full_checks,
            after=self._after,
            watch=self._watch,
        )
        # Of its own, so that what is drawn for faults does not depend on what they do.
        self.random = Random(f"aims of {self.seed}")
        self._draw_aims()
        self.cluster.set_bad_luck(self.random.choice((0.0, 0.02, 0.1)))

    def live(self) -> None:
        """Live all three parts of the life; raises AssertionError at the first breach."""
        timeline = self.cluster.timeline
        timeline.run_until(self.random.uniform(*STORM_S))
        self._heal()
        self._come_to_rest()
        self._leave()

    # --- what happens ------------------------------------------------------------------------

    def _draw_aims(self) -> None:
        spans = any(len(hosts) > 1 for hosts in self.cluster.layout.groups.values())
        possible = [aim for aim in all_pairs() if spans or aim.fault not in OF_LINKS]
        weights = [WEIGHTS.get(aim.phase, 1) for aim in possible]
        self._aims = self.random.choices(possible, weights, k=self.random.randint(2, 6))
        self._causes = {aim: MAX_CAUSES for aim in self._aims if aim.phase in CAUSES}

    def _watch(self, _host: HostName, what: Event | Action) -> None:
        grant = what.message if isinstance(what, Send) else what
        if isinstance(grant, Grant) and grant.lease not in self.cluster.oracle.granted:
            owner = self.cluster.owner_of(grant.session)
            for group, _ in grant.tokens:
                before = self._holder.get(group)
                self.switches += before is not None and before != owner
                if owner is not None:
                    self._holder[group] = owner

    def _after(self, host: SimHost, _event: Event) -> None:
        """Notice which tenancies have come into another phase, and aim at them."""
        self._events += 1
        assert self._events < MAX_EVENTS, "it turns in circles"
        for key, tenancy in host.machine.tenancies.all.items():
            if not tenancy.led_here:
                continue
            coordinator = tenancy.coordinator
            before = self._places.get((host.host, key))
            if coordinator.place is not before:
                self._places[host.host, key] = coordinator.place
                if self._storm:
                    self._aim(host, key, coordinator.place)

    def _aim(self, host: SimHost, key: TenancyKey, phase: Place) -> None:
        for wanted, tries in self._causes.items():
            cause, fault = CAUSES[wanted.phase]
            if tries and cause is phase and wanted in self._aims:
                self._causes[wanted] -= 1
                self.cluster.note(host.host, f"cause: {fault} while {key} is {phase.value}")
                FAULTS[fault](Target(self.cluster, key, host.host))
                return
        aim = next((aim for aim in self._aims if aim.phase is phase), None)
        if aim is not None:
            delay_s = self.random.choice((0.0, self.random.random() * AIM_S))
            self.cluster.timeline.after(delay_s, partial(self._hit, aim, host, key))

    def _hit(self, aim: Aim, host: SimHost, key: TenancyKey) -> None:
        if not self._storm or aim not in self._aims:
            return
        if self._places.get((host.host, key)) is not aim.phase or not host.alive:
            return
        self.cluster.note(host.host, f"fault: {aim.fault} while {key} is {aim.phase.value}")
        if FAULTS[aim.fault](Target(self.cluster, key, host.host)):
            self.hits[aim] += 1
            self._aims.remove(aim)

    # --- everything is mended -----------------------------------------------------------------

    def _heal(self) -> None:
        self._storm = False
        self.cluster.note("all", "everything is mended")
        self.cluster.heal()
        for one in self.cluster.jobs:
            one.begin_anew()

    def _come_to_rest(self) -> None:
        """Require that everybody has enough turns, and an answer to everything."""
        timeline, cluster = self.cluster.timeline, self.cluster
        end = timeline.now + REST_S
        while not self._is_enough():
            assert timeline.now < end, f"still not at rest: {cluster.unrest()}"
            timeline.run_until(timeline.now + 20.0, done=self._is_enough)
            cluster.mend()
            for one in cluster.jobs:
                if self.switches < MIN_SWITCHES or (one.over and not one.content):
                    one.want_more()
        timeline.run_until(timeline.now + 120.0)
        cluster.mend()
        timeline.run_until(timeline.now + 120.0)
        cluster.oracle.judge_rest()
        for host in cluster.hosts:
            Oracle(world=host).judge_clocks()
            assert not host.busy_ranks, f"calls are under way on {host.host}"

    def _is_enough(self) -> bool:
        return self.switches >= MIN_SWITCHES and all(one.content for one in self.cluster.jobs)

    # --- all leave ----------------------------------------------------------------------------

    def _leave(self) -> None:
        cluster, timeline = self.cluster, self.cluster.timeline
        cluster.note("all", "everybody leaves")
        cluster.send_all_away()
        timeline.run_until(timeline.now + 60.0)
        cluster.make_up_for_lost_records()
        timeline.run_until(timeline.now + 1000.0)
        for host in cluster.hosts:
            Oracle(world=host).judge_empty()
