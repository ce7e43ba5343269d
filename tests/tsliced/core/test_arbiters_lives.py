"""Lives of jobs that lease groups of several arbiters, in which links and daemons come and go.

Whatever happens, nobody is beside anybody else. And when all is mended, everybody has their turn,
all hosts agree on who moves what, and nothing is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from arbiters_lab import A, B, C, assert_at_rest, assert_safe, processes
from hosts_lab import N1, N2, N3, Lab, device
from simulated import job

from tsliced.core.events import PeerSaid
from tsliced.core.model import GroupName, HostName, LeaseId, RequestId, SessionId

LAYOUTS: dict[str, dict[GroupName, tuple[HostName, ...]]] = {
    "apart": {A: (N1,), B: (N2,), C: (N3,)},
    "across": {A: (N1, N2), B: (N2, N1)},
    "one on both": {A: (N1, N3), B: (N2, N3)},
    "in a ring": {A: (N1, N2), B: (N2, N3), C: (N3, N1)},
}


class Life:
    """Some jobs on some hosts, and what happens to them by chance."""

    def __init__(self, layout: dict[GroupName, tuple[HostName, ...]], seed: int) -> None:
        self.random = Random(seed)
        self.lab = Lab(layout)
        self.hosts, self.groups = list(self.lab.worlds), list(layout)
        self.fronts = {name: self.random.choice(self.hosts) for name in "abc"}
        self.sessions = {name: self._session(name) for name in "abc"}
        self.leases: dict[str, LeaseId] = {}
        self.lab.by_hand()

    def _session(self, name: str) -> SessionId:
        return self.lab[self.fronts[name]].session(job(name))

    def live(self, steps: int) -> None:
        """Let so many things happen."""
        chances: list[tuple[Callable[[], None], int]] = [
            (self._work, 60),
            (self._wish, 25),
            (self._look, 5),
            (self._pass_time, 5),
            (self._cut_or_join, 3),
            (self._restart, 1),
            (self._die, 1),
        ]
        acts, weights = zip(*chances, strict=True)
        for _ in range(steps):
            self.random.choices(acts, weights)[0]()
            assert_safe(self.lab)

    def mend(self) -> None:
        """Join all hosts again, and let all come to rest."""
        for host in self.hosts:
            self.lab.rejoin(host)
        self.lab.by_itself()
        for _ in range(4):
            self._rest(15.0)
        assert_at_rest(self.lab)

    def serve_all(self) -> None:
        """Let whoever holds give it back, until nobody waits."""
        for _ in self.sessions:
            for name, session in self.sessions.items():
                world = self.lab[self.fronts[name]]
                for lease in list(world.clients[session].held):
                    world.release(lease)
            self._rest(15.0)
        for name, session in self.sessions.items():
            client = self.lab[self.fronts[name]].clients[session]
            assert not client.open, f"{name} waits for ever"

    def _rest(self, seconds: float) -> None:
        for world in self.lab.worlds.values():
            world.look()
        self.lab.pass_time(seconds, step_s=1.0)

    # --- what happens -------------------------------------------------------------------------

    def _work(self) -> None:
        """Let something end or arrive, in any order but that of each link."""
        self.lab.collect()
        first: dict[tuple[HostName, HostName], int] = {}
        for index, (source, target, _) in enumerate(self.lab.wire):
            first.setdefault((source, target), index)
        ready: list[Callable[[], None]] = []
        for world in self.lab.worlds.values():
            ready += [world.read] if world.inbox else []
            ready += [partial(world.finish, index) for index in range(len(world.pending))]
        ready += [partial(self._deliver, index) for index in first.values()]
        if ready:
            self.random.choice(ready)()

    def _deliver(self, index: int) -> None:
        source, target, message = self.lab.wire[index]
        del self.lab.wire[index]
        self.lab[target].feed(PeerSaid(host=source, message=message))

    def _wish(self) -> None:
        """Let a job ask for something, give it back, take it back, or come onto a device."""
        name = self.random.choice("abc")
        session, world = self.sessions[name], self.lab[self.fronts[name]]
        client, lease = world.clients[session], self.leases.get(name)
        if lease is not None and lease in client.held:
            if self.random.random() < 0.5:
                world.release(self.leases.pop(name))
            else:
                self._come_up(name, [group for group, _ in client.held[lease]])
        elif lease is None or RequestId(int(lease.rpartition(".")[2])) not in client.open:
            wanted = self.random.sample(self.groups, self.random.randint(1, len(self.groups)))
            groups = sorted(wanted, key=self.groups.index)
            self.leases[name] = world.acquire(session, *groups)
        elif self.random.random() < 0.2:
            world.cancel(lease)

    def _come_up(self, name: str, groups: list[GroupName]) -> None:
        group = self.random.choice(groups)
        host = self.random.choice(self.lab.groups[group])
        rank = self.lab[host].context(job(name), device(host, group))
        self.lab[host].processes[rank].lawful = True

    def _look(self) -> None:
        self.lab[self.random.choice(self.hosts)].look()

    def _pass_time(self) -> None:
        for world in self.lab.worlds.values():
            world.pass_time(0.5)

    def _cut_or_join(self) -> None:
        first, second = self.random.sample(self.hosts, 2)
        if frozenset((first, second)) in self.lab.cut:
            self.lab.connect(first, second)
        else:
            self.lab.disconnect(first, second, lost=self.random.random() < 0.3)

    def _restart(self) -> None:
        finish, links = self.random.random() < 0.5, self.random.random() < 0.7
        self.lab.restart(self.random.choice(self.hosts), finish=finish, links=links)

    def _die(self) -> None:
        if there := list(processes(self.lab).items()):
            rank, (host, _) = self.random.choice(there)
            self.lab[host].die(rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_happens_nobody_is_beside_others_and_all_have_their_turn_g1(layout: str) -> None:
    for seed in range(12):
        life = Life(LAYOUTS[layout], seed)
        life.live(150)
        life.mend()
        life.serve_all()
        assert_at_rest(life.lab)
