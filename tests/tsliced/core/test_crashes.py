"""Crash everywhere: the daemon is killed after each record and each action of each scenario.

Whatever was kept until then, and whether what was in flight still ended in the world or was never
begun, the next daemon must come to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from oracle import Oracle
from world import D1, D2, G1, G2, Crash, Process, World, failure, job

from tsliced.core.model import Cause, LeaseId, RankState, Reason, SessionId, Verb

A, B = job("a"), job("b")
RUNNING, FROZEN, PARKED = RankState.RUNNING, RankState.FROZEN, RankState.PARKED

#: What a scenario does, one after the other; the daemon may be killed in any of them.
Steps = list[Callable[[], object]]


@dataclass(slots=True)
class Scenario:
    """A world and a story in it; `setup` happens before anything may go wrong."""

    world: World
    sessions: list[SessionId] = field(default_factory=list)
    leases: list[LeaseId] = field(default_factory=list)

    def setup(self) -> None:
        raise NotImplementedError

    def steps(self) -> Steps:
        raise NotImplementedError

    def check(self) -> None:
        """Say what must be true in the end."""
        raise NotImplementedError

    def acquire(self, session: int, *groups: object, **more: int) -> None:
        """Ask with a session, by number; the lease is the next in `leases`."""
        number = next(self.world.requests)
        self.leases.append(LeaseId(f"{self.sessions[session]}.{number}"))
        self.world.acquire(self.sessions[session], *groups, request=number, **more)  # type: ignore[arg-type]

    def release(self, lease: int) -> None:
        """Give a lease back if its client holds it."""
        held = [name for client in self.world.clients.values() for name in client.held]
        if self.leases[lease] in held:
            self.world.release(self.leases[lease])

    def held(self, lease: int) -> bool:
        """Whether a client believes to hold a lease, and the daemon agrees."""
        believed = [n for client in self.world.clients.values() for n in client.held]
        assert (self.leases[lease] in believed) == self.world.held(self.leases[lease])
        return self.world.held(self.leases[lease])

    def states(self) -> list[RankState]:
        return [process.state for process in self.world.processes.values()]


class Switch(Scenario):
    """b is parked; a hands over to it."""

    def setup(self) -> None:
        self.sessions = [self.world.session(A), self.world.session(B)]
        self.acquire(1)
        self.world.context(B, D1)
        self.release(0)
        self.acquire(0)
        self.world.context(A, D1)
        self.world.look()

    def steps(self) -> Steps:
        return [lambda: self.acquire(1, G1), lambda: self.release(1)]

    def check(self) -> None:
        assert self.held(2)
        assert not self.held(1)
        assert self.states() == [RUNNING, PARKED]


class FailedFreeze(Switch):
    """The first freeze times out; the next one works."""

    def steps(self) -> Steps:
        fail_once(self.world, Verb.FREEZE, Cause.FREEZE_TIMEOUT)
        return super().steps()


class FailedSnapshot(Switch):
    """The first snapshot fails and is turned back."""

    def steps(self) -> Steps:
        fail_once(self.world, Verb.SNAPSHOT, Cause.DRIVER)
        return super().steps()


class FailedRestore(Switch):
    """b can't be restored: its lease is refused, and the group is empty."""

    def steps(self) -> Steps:
        self.world.verdict = lambda verb, process: (
            failure(Cause.DRIVER, process.id) if verb is Verb.RESTORE else None
        )
        return super().steps()

    def check(self) -> None:
        # A crash in the middle of the eviction may bring a back, and then a is at fault instead.
        assert not self.held(2)
        assert not self.held(1)
        assert self.world.code(self.leases[2]) in ("refused", "job_faulted", "lease_ended")
        assert set(self.states()) == {PARKED}


class TwoGroups(Scenario):
    """a and b hold one group each; both are given to c, whose rank is on both."""

    def setup(self) -> None:
        self.sessions = [self.world.session(owner) for owner in (A, B, job("c"))]
        self.acquire(2, G1, G2)
        self.world.context(job("c"), D1, D2)
        self.release(0)
        self.acquire(0, G1)
        self.acquire(1, G2)
        self.world.context(A, D1)
        self.world.context(B, D2)
        self.world.look()

    def steps(self) -> Steps:
        return [
            lambda: self.acquire(2, G1, G2),
            lambda: self.release(1),
            lambda: self.release(2),
        ]

    def check(self) -> None:
        assert self.held(3)
        assert self.states() == [RUNNING, PARKED, PARKED]


class Round(Scenario):
    """Two ranks of b ask for a round together."""

    def setup(self) -> None:
        self.sessions = [self.world.session(owner) for owner in (A, B, B)]
        self.acquire(0)
        self.world.context(A, D1)
        self.world.look()

    def steps(self) -> Steps:
        return [
            lambda: self.acquire(1, G1, ranks=2),
            lambda: self.acquire(2, G1, ranks=2),
            lambda: self.release(0),
        ]

    def check(self) -> None:
        assert self.held(1)
        assert self.held(2)
        leases = self.world.machine.leasing.leases
        assert leases[self.leases[1]].tokens == leases[self.leases[2]].tokens
        assert self.states() == [PARKED]


class RoundWithADeath(Scenario):
    """A rank of b that has been in a round before dies before it has asked for the next one."""

    def setup(self) -> None:
        self.sessions = [self.world.session(owner) for owner in (A, B, B)]
        self.acquire(1, G1, ranks=2)
        self.acquire(2, G1, ranks=2)
        self.release(0)
        self.release(1)
        self.acquire(0)
        self.world.context(A, D1)
        self.world.look()

    def steps(self) -> Steps:
        victim = self.world.process_of(self.sessions[2])
        return [
            lambda: self.acquire(1, G1, ranks=2),
            lambda: self.world.die(victim),
            lambda: self.release(2),
        ]

    def check(self) -> None:
        assert self.held(3)
        assert self.states() == [PARKED]


class Cancelled(Switch):
    """b does not want it any more while a is being moved off."""

    def steps(self) -> Steps:
        return [lambda: self.acquire(1, G1), lambda: self.release(1), self.cancel]

    def cancel(self) -> None:
        self.world.cancel(self.leases[2])

    def check(self) -> None:
        client = self.world.clients[self.sessions[1]]
        assert not client.open
        for lease in list(client.held):
            self.world.release(lease)
        assert not self.world.machine.leasing.leases
        assert FROZEN not in self.states()


def fail_once(world: World, verb: Verb, cause: Cause) -> None:
    left = [1]

    def verdict(what: Verb, process: Process) -> Reason | None:
        if what is verb and left:
            left.pop()
            return failure(cause, process.id)
        return None

    world.verdict = verdict


SCENARIOS = [
    Switch,
    FailedFreeze,
    FailedSnapshot,
    FailedRestore,
    TwoGroups,
    Round,
    RoundWithADeath,
    Cancelled,
]


def live(kind: type[Scenario], fuse: int | None, *, finish: bool, step_by_step: bool) -> bool:
    """Live a scenario with a crash after so many records and actions; return whether it came."""
    scenario = kind(World())
    world = scenario.world
    scenario.setup()
    oracle = Oracle(world=world)
    world.watch = oracle.watch
    world.auto = not step_by_step
    world.fuse = fuse
    crashed = False
    for step in scenario.steps():
        crashed |= survive(world, step, finish=finish)
        # In the middle of what that began, the next step comes.
        for _ in range(3 if step_by_step else 0):
            crashed |= survive(world, lambda: go_on(world), finish=finish)
    crashed |= survive(world, world.run, finish=finish)
    world.fuse = None
    world.auto = True
    world.run()
    world.pass_time(300.0)
    scenario.check()
    oracle.judge_rest()
    return crashed


def go_on(world: World) -> None:
    if world.pending:
        world.finish()


def survive(world: World, act: Callable[[], object], *, finish: bool) -> bool:
    """Do something; if the daemon is killed in it, start the next one. Return whether it was."""
    auto = world.auto
    try:
        act()
    except Crash:
        world.auto = auto
        world.restart(finish=finish)
        return True
    return False


def crashes(kind: type[Scenario], *, finish: bool, step_by_step: bool) -> Iterator[int]:
    """Crash at every point; yield each."""
    for fuse in range(1, 1000):
        try:
            if not live(kind, fuse, finish=finish, step_by_step=step_by_step):
                return
        except Exception as exc:
            raise AssertionError(f"{kind.__name__}, crash {fuse}: {exc!r}") from exc
        yield fuse
    raise AssertionError("the scenario never ends")


@pytest.mark.parametrize("step_by_step", [False, True], ids=["to rest", "in the middle"])
@pytest.mark.parametrize("finish", [True, False], ids=["calls end", "calls never began"])
@pytest.mark.parametrize("kind", SCENARIOS)
def test_g8_wherever_the_daemon_is_killed_the_next_one_comes_to_the_same_end(
    kind: type[Scenario], finish: bool, step_by_step: bool
) -> None:
    points = list(crashes(kind, finish=finish, step_by_step=step_by_step))
    # Records and actions both, so there are many.
    assert len(points) > 10


@pytest.mark.parametrize("kind", SCENARIOS)
def test_without_a_crash_each_scenario_comes_to_its_end(kind: type[Scenario]) -> None:
    for step_by_step in (False, True):
        assert not live(kind, None, finish=True, step_by_step=step_by_step)
