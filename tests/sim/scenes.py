"""Where a search begins: jobs on hosts, one of which holds and gives back, and one that waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hosts_lab import N1, N2, N3, HostWorld, Lab, device
from simulated import job
from still import Still
from stills import Act

from tsliced.core.messages import PeerMessage
from tsliced.core.model import CoreLimits, GroupName, HostName, JobKey, LeaseId, SessionId

G, H = GroupName("g"), GroupName("h")
A, B = job("a"), job("b")

#: Numbers never run out, and nobody is let on for being parked long. Kinds are known.
LIMITS = CoreLimits(
    block=1 << 20, max_answers=4, max_evict_tries=3, idle_park_s=None, qualify=False
)

Groups = dict[GroupName, tuple[HostName, ...]]


@dataclass(frozen=True, slots=True)
class Scene:
    """Hosts, what is under way between them, and what clients may do, by host and name."""

    worlds: dict[HostName, HostWorld]
    wire: list[tuple[HostName, HostName, PeerMessage]]
    acts: dict[HostName, dict[str, Act]]
    #: Who waits for what was given back.
    waiter: JobKey


def switch(groups: Groups, limits: CoreLimits = LIMITS) -> Scene:
    """Let a job give its groups back, for which another one waits that was parked for it.

    Both lease all groups, `a` at the first host and `b` at the second, and have a rank on each
    device.
    """
    lab, wants = Lab(groups, limits=limits), tuple(groups)
    b = lab[N2].session(B)
    parked = lab[N2].acquire(b, *wants)
    lab.run()
    _come_up(lab, B)
    a = lab[N1].session(A)
    held = lab[N1].acquire(a, *wants)
    lab.run()
    lab[N2].release(parked)
    lab.run()
    _come_up(lab, A)
    waits = lab[N2].acquire(b, *wants)
    lab.run()
    assert held in lab[N1].clients[a].held
    assert waits in lab[N2].machine.fronting.leases
    for world in lab.worlds.values():
        world.auto = False
    lab[N1].release(held)
    lab.collect()
    acts: dict[HostName, dict[str, Act]] = {host: {} for host in lab.worlds}
    acts[N1] = _of_client("a", a, wants) | _of_ranks("a")
    acts[N2] = _of_client("b", b, wants) | _of_ranks("b") | _of_ranks("a")
    acts[N2]["b cancel"] = Act(
        lambda world: b in world.clients and world.clients[b].open.keys() >= {_request_of(waits)},
        lambda world: world.cancel(waits),
    )
    return Scene(worlds=dict(lab.worlds), wire=list(lab.wire), acts=acts, waiter=B)


def _come_up(lab: Lab, owner: JobKey) -> None:
    """Let a job make a context on each device."""
    for group, hosts in lab.groups.items():
        for host in hosts:
            lab[host].context(owner, device(host, group))
            lab[host].look()
            lab.run()


def _request_of(lease: LeaseId) -> int:
    return int(lease.rpartition(".")[2])


def _of_client(name: str, session: SessionId, wants: tuple[GroupName, ...]) -> dict[str, Act]:
    """Return what a client may do: give back, ask again, die."""

    def held(world: Still) -> list[LeaseId]:
        return list(world.clients[session].held) if session in world.clients else []

    def is_idle(world: Still) -> bool:
        client = world.clients.get(session)
        return client is not None and not (client.ended or client.held or client.open)

    return {
        f"{name} release": Act(
            lambda world: bool(held(world)), lambda world: world.release(held(world)[0])
        ),
        f"{name} ask again": Act(is_idle, lambda world: world.acquire(session, *wants)),
        f"the client of {name} die": Act(
            lambda world: session in world.clients,
            lambda world: world.die(world.clients[session].process),
        ),
    }


def _of_ranks(name: str) -> dict[str, Act]:
    """Return how a rank of a job may die."""

    def die(world: Still) -> None:
        world.die(next(id_ for id_, process in world.processes.items() if process.job == job(name)))

    return {
        f"a rank of {name} die": Act(
            lambda world: any(process.job == job(name) for process in world.processes.values()), die
        )
    }


SCENES: dict[str, Callable[[], Scene]] = {
    "switch": lambda: switch({G: (N1, N2)}),
    "switch3": lambda: switch({G: (N1, N2, N3)}),
    #: The one who leaves comes back before.
    "first": lambda: switch({G: (N1, N2)}, replace(LIMITS, qualify=True)),
    "joint": lambda: switch({G: (N1,), H: (N2,)}),
}
