"""Every way in which a switch over several hosts can go: ``make explore``.

From where a scene begins, everything that may happen next is tried, in every order: a host hears
what was said first on a link, an operation ends, a host counts another one as lost, a link is
mended. Besides that, as often as the budget has it, something goes wrong. What must always hold is
judged in every state (`judge.py`), and from each the search goes on without any fault until all is
at rest: so from wherever it is, a good end can be reached.

States are found once, however they come about, and a host's part of a state is worked out once
(`stills.py`). Where nothing can go wrong any more, steps of which nobody could tell the order are
taken in one order only (`_apart`).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

from judge import Judge, Wrong
from scenes import SCENES, Scene
from simulate import with_fixed_hashes
from space import Budget, Edges, Numbered, Space, State
from still import VALUES
from stills import Label, Pending, Stills
from transcript import describe
from wires import Wires

from tsliced.core.model import Cause, JobKey, RankState

#: How a freeze ends of which the rank waits for a parked one.
SPUN = Cause.FREEZE_TIMEOUT.value


#: Faults after which whoever waits may be refused, or be gone.
EXCUSES = ("failures", "reboots", "acts")


class Step(NamedTuple):
    """What happens: to a host, or to its link with another one."""

    host: int
    label: Label


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong, and how it came about."""

    text: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        return "\n    ".join([self.text, *self.steps])


@dataclass(slots=True)
class Search:
    """All states that can be reached from where a scene begins."""

    scene: Scene
    budget: Budget
    #: No more states than that are looked at.
    limit: int = 1_000_000
    max_findings: int = 1
    #: Which faults there may be, of those in the budget.
    may: Callable[[Step], bool] = lambda _step: True
    #: Steps whose order nobody can tell are taken in one order only.
    reduced: bool = True
    stills: list[Stills] = field(init=False)
    wires: Wires = field(init=False)
    judge: Judge = field(init=False)
    states: Space = field(init=False)
    findings: dict[str, Finding] = field(default_factory=dict)
    steps: int = 0
    #: All states that can be reached have been looked at.
    complete: bool = False
    #: By state: from which other one it was reached first, ...
    _origins: array[int] = field(default_factory=lambda: array("I"))
    #: ... and by which step.
    _came: array[int] = field(default_factory=lambda: array("I"))
    _steps: Numbered[Step | None] = field(default_factory=Numbered)
    #: From which state to which a step without a fault leads.
    _edges: Edges = field(default_factory=Edges)
    #: From where all comes to rest: by everything but the budget.
    _restful: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        worlds = self.scene.worlds
        names = sorted(worlds)
        self.stills = [Stills.of(worlds[name], self.scene.acts[name]) for name in names]
        self.wires, self.judge = Wires(names), Judge(self.stills)
        self.states = Space(len(names))

    def run(self) -> None:
        """Look at all states, or as many as allowed."""
        first = self._first()
        self._enter(first, self.states.key(first), 0, None)
        # As they come: their numbers are their order.
        for number in itertools.count():
            if number == len(self.states):
                break
            state = self.states[number]
            for step, budget in self._apart(state) or self._possible(state):
                self.steps += 1
                try:
                    after = self.go(state, step, budget)
                except Wrong as wrong:
                    self.find(str(wrong), number, [step])
                    continue
                key = self.states.key(after)
                known = self.states.number_of(key)
                if known is None:
                    known = self._enter(after, key, number, step)
                if budget is state.budget:
                    self._edges.add(known)
            self._edges.close()
            if len(self.states) >= self.limit or len(self.findings) >= self.max_findings:
                return
        self.complete = True
        # Else a step that is put off because its order does not matter may be put off for ever.
        assert not self.reduced or self._edges.are_acyclic(), "steps may be put off for ever"

    def _first(self) -> State:
        count = len(self.stills)
        queues: list[tuple[int, ...]] = [()] * count**2
        for source, target, message in self.scene.wire:
            one, other = self.wires.index_of(source), self.wires.index_of(target)
            direction = self.wires.direction(one, other)
            said = self.wires.said(one, VALUES.of(message))
            queues[direction] = (*queues[direction], said)
        return State((0,) * count, tuple(queues), frozenset(), (0,) * count, self.budget)

    def _enter(self, state: State, key: bytes, origin: int, step: Step | None) -> int:
        number = self.states.add(key)
        self._origins.append(origin)
        self._came.append(self._steps.of(step))
        self._come_to_rest(state, number)
        return number

    def is_over(self, state: State) -> bool:
        """Whether nothing more may happen."""
        return next(self._possible(state), None) is None

    # --- what may happen ----------------------------------------------------------------------

    def _possible(self, state: State) -> Iterator[tuple[Step, Budget]]:
        """Yield all that may happen next, each with what may go wrong after that."""
        for host in range(len(self.stills)):
            for step in self._own_steps(state, host):
                yield step, state.budget
        for direction in sorted(state.cut):
            one, other = divmod(direction, len(self.stills))
            if one < other:
                yield Step(one, Label("is joined with", self.wires.names[other])), state.budget
        for kind in Budget._fields:
            if (left := state.budget.less(kind)) is not None:
                for step in self._faults(state, kind):
                    if self.may(step):
                        yield step, left

    def _faults(self, state: State, kind: str) -> Iterator[Step]:
        if kind == "cuts":
            for one, other in combinations(range(len(self.stills)), 2):
                if self.wires.direction(one, other) not in state.cut:
                    yield Step(one, Label("is cut off from", self.wires.names[other]))
            return
        for host, number in enumerate(state.hosts):
            facts = self.stills[host].facts[number]
            match kind:
                case "failures":
                    for index, pending in enumerate(facts.pending):
                        for cause in pending.failures:
                            yield Step(host, Label("ends", index, cause.value))
                case "kills":
                    yield Step(host, Label("is killed", 0, "its calls end"))
                    if facts.pending:
                        yield Step(host, Label("is killed", 0, "its calls have not begun"))
                case "reboots":
                    yield Step(host, Label("reboots"))
                case "clocks":
                    for index, clock in enumerate(facts.clocks):
                        yield Step(host, Label("strikes", index, clock.kind.value))
                case _:
                    for act in facts.acts:
                        yield Step(host, Label("sees", act))

    def _own_steps(self, state: State, host: int) -> list[Step]:
        """Return what a host may do without any fault."""
        facts = self.stills[host].facts[state.hosts[host]]
        labels = self.wires.hearings(state.queues, host)
        labels += self._endings(state, host)
        for other in self.wires.others(host):
            name = self.wires.names[other]
            if name not in facts.up and name not in facts.lost:
                labels.append(Label("loses", name))
        return [Step(host, label) for label in labels]

    def _endings(self, state: State, host: int) -> list[Label]:
        """Return how what is pending on a host ends without any fault."""
        return [
            Label("ends", index, SPUN if self._spins(state, pending.freezes) else "")
            for index, pending in enumerate(self._pending(state, host))
        ]

    def _pending(self, state: State, host: int) -> tuple[Pending, ...]:
        return self.stills[host].facts[state.hosts[host]].pending

    def _spins(self, state: State, job: JobKey | None) -> bool:
        """Whether a job's ranks wait for one that is parked, and so cannot be frozen."""
        if job is None:
            return False
        processes = self.judge.processes(state.hosts)
        return any(p.job == job and p.state is RankState.PARKED for p in processes)

    # --- what does not matter -----------------------------------------------------------------

    def _apart(self, state: State) -> list[tuple[Step, Budget]]:
        """Return all that one host may do, where it makes no difference when it does that.

        So it is if nothing may go wrong any more, if nothing that others do lets the host do
        anything else, and if none of it changes what is judged. Empty: it does matter.
        """
        if not self.reduced or any(state.budget):
            return []
        parted = {host for direction in state.cut for host in divmod(direction, len(self.stills))}
        own = [self._own_steps(state, host) for host in range(len(self.stills))]
        for host, steps in enumerate(own):
            # What a link does that comes back, its hosts notice.
            if not steps or host in parted or not self._is_unseen(state, steps):
                continue
            if any(pending.freezes for pending in self._pending(state, host)):
                # How that ends depends on where the job is on other hosts.
                continue
            others = self.wires.others(host)
            idle = not state.cut and not any(own[other] for other in others)
            if idle or self._is_left_alone(state, host):
                return [(step, state.budget) for step in steps]
        return []

    def _is_left_alone(self, state: State, host: int) -> bool:
        others = self.wires.others(host)
        # What comes behind something else that is to be heard is heard later anyhow.
        return all(
            state.queues[self.wires.direction(other, host)]
            or not self.wires.may_speak(state.queues, other, host)
            for other in others
        )

    def _is_unseen(self, state: State, steps: list[Step]) -> bool:
        for host, label in steps:
            outcome = self.stills[host].after(state.hosts[host], label)
            if not self.judge.is_unseen(host, state.hosts[host], outcome):
                return False
        return True

    # --- what becomes of a state --------------------------------------------------------------

    def go(self, state: State, step: Step, budget: Budget) -> State:
        """Return the state after a step; raises `Wrong` if that must not be."""
        host, label = step
        queues = list(state.queues)
        match label.kind:
            case "is cut off from":
                return self._cut(state, queues, host, label, budget)
            case "is joined with":
                return self._join(state, queues, host, label)
            case _:
                outcome = self.stills[host].after(state.hosts[host], label)
        if isinstance(outcome, str):
            raise Wrong(outcome)
        boots = state.boots
        if label.kind in ("hears", "hears nothing of"):
            self.wires.take_off(queues, host, label)
        elif label.kind in ("is killed", "reboots"):
            boots = tuple(
                count + (one == host and label.kind == "reboots") for one, count in enumerate(boots)
            )
            self._start_anew(state, queues, host, boots)
        hosts = (*state.hosts[:host], outcome.state, *state.hosts[host + 1 :])
        self.wires.send(queues, state.cut, host, label, outcome)
        self.judge.judge(state.hosts, hosts, host, outcome)
        return State(hosts, tuple(queues), state.cut, boots, budget)

    def _knows(self, state: State, host: int, other: int) -> bool:
        """Whether a host believes to be connected with another one."""
        name = self.wires.names[other]
        return name in self.stills[host].facts[state.hosts[host]].up

    def _start_anew(
        self, state: State, queues: list[tuple[int, ...]], host: int, boots: tuple[int, ...]
    ) -> None:
        for other in self.wires.others(host):
            self.wires.part(queues, host, other, (False, self._knows(state, other, host)))
            if self.wires.direction(host, other) not in state.cut:
                self.wires.join(queues, host, other, boots)

    def _directions(self, one: int, other: int) -> frozenset[int]:
        return frozenset((self.wires.direction(one, other), self.wires.direction(other, one)))

    def _cut(
        self, state: State, queues: list[tuple[int, ...]], one: int, label: Label, budget: Budget
    ) -> State:
        other = self.wires.index_of(label.what)
        up = self._knows(state, one, other), self._knows(state, other, one)
        self.wires.part(queues, one, other, up)
        cut = state.cut | self._directions(one, other)
        return state._replace(queues=tuple(queues), cut=cut, budget=budget)

    def _join(self, state: State, queues: list[tuple[int, ...]], one: int, label: Label) -> State:
        other = self.wires.index_of(label.what)
        self.wires.join(queues, one, other, state.boots)
        return state._replace(queues=tuple(queues), cut=state.cut - self._directions(one, other))

    # --- whether it comes to rest -------------------------------------------------------------

    def _come_to_rest(self, state: State, number: int) -> None:
        """Go on in one way without any fault until all is at rest; find what keeps it from that."""
        passed: dict[bytes, None] = {}
        steps: list[Step] = []
        mended = False
        # Nobody was let down by its own doing, so who waited gets what it waits for.
        unhurt = all(getattr(state.budget, k) == getattr(self.budget, k) for k in EXCUSES)
        while (key := self.states.key(state, mended, unhurt)) not in self._restful:
            if key in passed:
                self.find("it goes round for ever", number, steps, onward=True)
                break
            passed[key] = None
            step = self._next(state)
            waiter = self.scene.waiter if unhurt else None
            if step is None and (unrest := self.judge.unrest(state.hosts, waiter)) is None:
                break
            if step is None:
                step = self._strike_next(state) or self._give_back(state)
            try:
                if step is not None:
                    state = self.go(state, step, state.budget)
                    steps.append(step)
                elif not mended:
                    mended, state = True, self._mend(state)
                else:
                    self.find(f"it stands still: {unrest}", number, steps, onward=True)
                    break
            except Wrong as wrong:
                self.find(str(wrong), number, [*steps, *([step] if step else [])], onward=True)
                break
        # If it was found not to, this has been told.
        self._restful.update(passed)

    def _next(self, state: State) -> Step | None:
        """Return what happens next by itself, in no time."""
        for direction in sorted(state.cut):
            one, other = divmod(direction, len(self.stills))
            return Step(one, Label("is joined with", self.wires.names[other]))
        for host in range(len(self.stills)):
            for label in (
                *self.wires.hearings(state.queues, host),
                *self._endings(state, host),
            ):
                return Step(host, label)
        return None

    def _strike_next(self, state: State) -> Step | None:
        """Return the next clock to strike."""
        clocks = [
            (facts.clocks[0].left_s, host)
            for host, number in enumerate(state.hosts)
            if (facts := self.stills[host].facts[number]).clocks
        ]
        return Step(min(clocks)[1], Label("strikes", 0)) if clocks else None

    def _give_back(self, state: State) -> Step | None:
        """Return how a holder gives back what others may wait for."""
        for host, number in enumerate(state.hosts):
            for act in self.stills[host].facts[number].acts:
                if act.endswith("release"):
                    return Step(host, Label("sees", act))
        return None

    def _mend(self, state: State) -> State:
        for host in range(len(self.stills)):
            state = self.go(state, Step(host, Label("is mended")), state.budget)
        return state

    # --- findings -----------------------------------------------------------------------------

    def find(self, text: str, number: int, steps: list[Step], *, onward: bool = False) -> None:
        """Keep what is wrong, with the shortest way to it."""
        if text in self.findings:
            return
        way: list[Step] = []
        while (came := self._steps.all[self._came[number]]) is not None:
            way.append(came)
            number = self._origins[number]
        told = [self._tell(step) for step in reversed(way)]
        told += ["then without any fault:"] if onward else []
        self.findings[text] = Finding(text, (*told, *map(self._tell, steps)))

    def _tell(self, step: Step) -> str:
        name, (kind, what, how) = self.wires.names[step.host], step.label
        match kind:
            case "hears":
                return f"{name} hears {describe(VALUES.all[int(what)])}"
            case "ends" | "strikes":
                return f"{name}: what is pending ({what}) {kind} {how}"
            case _:
                return f"{name} {kind} {what or ''} {how}".rstrip()


def budgets(faults: int) -> list[Budget]:
    """Return the budgets with so many faults, of each kind and in all combinations of kinds."""
    return [
        Budget(**{kind: kinds.count(kind) for kind in Budget._fields})
        for kinds in combinations_with_replacement(Budget._fields, faults)
    ]


def explore(task: tuple[str, Budget, int, bool]) -> tuple[bool, str]:
    """Search a scene with a budget; return whether nothing is wrong, and what there is to say."""
    name, budget, limit, reduced = task
    began_at = time.monotonic()
    search = Search(SCENES[name](), budget, limit=limit, reduced=reduced)
    search.run()
    seconds = time.monotonic() - began_at
    ending = "complete" if search.complete else "not complete"
    own = " + ".join(str(len(stills.facts)) for stills in search.stills)
    lines = [
        f"{name:8} {budget!s:24} {len(search.states):9,} states, {search.steps:10,} steps, "
        f"{own} of single hosts, {seconds:6.1f} s, {ending}",
        *(f"WRONG: {finding}" for finding in search.findings.values()),
    ]
    return not search.findings, "\n".join(lines)


def main() -> int:
    """Do as the command line says."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--scene", choices=[*SCENES], help="only this one")
    arguments.add_argument("--faults", type=int, help="so many; otherwise none, one, and two")
    arguments.add_argument("--limit", type=int, default=1_000_000, help="states of a search")
    arguments.add_argument(
        "--full", action="store_true", help="all orders, also where none matters"
    )
    arguments.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = arguments.parse_args()
    counts = range(3) if options.faults is None else (options.faults,)
    scenes = [options.scene] if options.scene else [*SCENES]
    tasks = [
        (scene, budget, options.limit, not options.full)
        for count in counts
        for scene in scenes
        for budget in budgets(count)
    ]
    fine = True
    # One process for each search, so that what it has found does not stay in memory.
    with multiprocessing.get_context("fork").Pool(options.workers, maxtasksperchild=1) as pool:
        for is_fine, told in pool.imap(explore, tasks, chunksize=1):
            print(told, flush=True)
            fine &= is_fine
    return not fine


if __name__ == "__main__":
    with_fixed_hashes()
    sys.exit(main())
