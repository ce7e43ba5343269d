"""Event histories as a daemon writes them: two jobs that take turns on one group, for any time.

Each iteration is a rollout on the devices, a reward on the host, and training on the devices. One
job waits while the other holds; state is moved whenever the holder changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tsliced.host.history import Event, Fact

BEGIN = 1_700_000_000.0
GIB = 1 << 30
DEVICES = ("GPU-0", "GPU-1")


@dataclass
class Shape:
    """How long the parts of one job's iterations are, in seconds, and what it tells."""

    rollout_s: float = 40.0
    reward_s: float = 70.0
    training_s: float = 20.0
    ranks: int = 2
    state_bytes: int = 60 * GIB
    freeze_s: float = 0.4
    snapshot_s: float = 6.0
    restore_s: float = 3.0
    tokens: int = 80_000


@dataclass
class _Job:
    name: str
    shape: Shape
    ready_at: float
    phase: str = "rollout"
    step: int = 0
    pids: tuple[int, ...] = ()


@dataclass
class Recording:
    """Writes events in the order of their times."""

    seed: int = 1
    group: str = "trainer"
    written: list[tuple[float, int, str, dict[str, Fact]]] = field(default_factory=list)
    _order: count[int] = field(default_factory=count)
    _tokens: count[int] = field(default_factory=lambda: count(1))
    _epochs: count[int] = field(default_factory=lambda: count(1))

    def note(self, at: float, kind: str, /, **facts: Fact) -> None:
        self.written.append((at, next(self._order), kind, facts))

    def events(self) -> list[Event]:
        numbered = enumerate(sorted(self.written, key=lambda each: each[:2]), start=1)
        return [
            {"seq": seq, "at": at, "kind": kind, "level": "info", **facts}
            for seq, (at, _, kind, facts) in numbered
        ]

    def share(self, jobs: Sequence[str], hours: float, shape: Shape | None = None) -> Recording:
        """Lets jobs take turns for so long."""
        rng, shape = random.Random(self.seed), shape or Shape()
        states = [
            _Job(name, shape, BEGIN + 5.0 * n, pids=tuple(range(100 * n, 100 * n + shape.ranks)))
            for n, name in enumerate(jobs)
        ]
        free_at, resident = BEGIN, None
        end = BEGIN + 3600 * hours
        while free_at < end:
            job = min(states, key=lambda each: each.ready_at)
            free_at = self._turn(job, resident, max(free_at, job.ready_at), rng)
            resident = job
        at = BEGIN
        while (at := at + 10.0) < end:
            for device in DEVICES:
                busy = min(10.0, max(0.0, rng.gauss(6.0, 2.0)))
                self.note(at, "busy", device=device, group=self.group, busy_s=busy, span_s=10.0)
        return self

    def _turn(self, job: _Job, resident: _Job | None, at: float, rng: random.Random) -> float:
        shape, common = job.shape, {"job": job.name, "groups": self.group}
        switched_at = at
        leases = [f"{job.name}.{job.step}.{job.phase}.{rank}" for rank in range(shape.ranks)]
        moves = resident is not None and resident is not job
        if moves or job.ready_at < at:
            for lease in leases:
                self.note(job.ready_at, "queued", **common, lease=lease, round="queued")
        if moves:
            assert resident is not None
            at = self._move(resident, at, "evicted", rng)
            if job.step or job.phase != "rollout":
                at = self._move(job, at, "admitted", rng)
        token, end = next(self._tokens), at
        for lease in leases:
            self.note(
                at,
                "granted",
                **common,
                lease=lease,
                token=token,
                phase=job.phase,
                waited_s=at - job.ready_at,
                restored=moves,
                switch_s=at - switched_at,
            )
        seconds = shape.rollout_s if job.phase == "rollout" else shape.training_s
        end = at + seconds * rng.uniform(0.9, 1.1)
        for lease in leases:
            self.note(end, "released", **common, lease=lease, held_s=end - at, cause="released")
        if job.phase == "rollout":
            self.note(end, "queue", job=job.name, name="trajectories", depth=480, target=512)
            self.note(end, "phase", job=job.name, pid=7, name="reward", begin=True)
            job.ready_at, job.phase = end + shape.reward_s * rng.uniform(0.9, 1.1), "training"
            self.note(
                job.ready_at,
                "phase",
                job=job.name,
                pid=7,
                name="reward",
                begin=False,
                times=1,
                seconds=job.ready_at - end,
            )
        else:
            job.step += 1
            self.note(
                end,
                "progress",
                job=job.name,
                step=job.step,
                tokens=shape.tokens,
                reward=1 - 1 / (1 + 0.01 * job.step) + rng.gauss(0, 0.02),
                loss=2 / (1 + 0.02 * job.step),
            )
            job.ready_at, job.phase = end + 1.0, "rollout"
        return end

    def _move(self, job: _Job, at: float, kind: str, rng: random.Random) -> float:
        shape, began_at, epoch = job.shape, at, next(self._epochs)
        copy = "snapshot" if kind == "evicted" else "restore"
        copy_s = shape.snapshot_s if kind == "evicted" else shape.restore_s
        steps = {copy: copy_s * rng.uniform(0.9, 1.2)}
        steps |= {"freeze": shape.freeze_s} if kind == "evicted" else {"thaw": 0.05}
        order = ("freeze", "snapshot", "restore", "thaw")
        for verb in (verb for verb in order if verb in steps):
            at += steps[verb]
            for rank in range(shape.ranks):
                self.note(
                    at,
                    "operation",
                    job=job.name,
                    groups=self.group,
                    rank=f"n1:{job.pids[rank]}",
                    epoch=epoch,
                    verb=verb,
                    state="parked",
                    seconds=steps[verb],
                    bytes=shape.state_bytes // shape.ranks if verb == copy else 0,
                    cause=None,
                    reason=None,
                )
        names = {f"{verb}_s": seconds for verb, seconds in steps.items()}
        self.note(
            at, kind, job=job.name, groups=self.group, epoch=epoch, seconds=at - began_at, **names
        )
        return at


def shared(hours: float, jobs: Iterable[str] = ("1000/a", "1000/b"), **shape: float) -> list[Event]:
    """Returns the history of two jobs that share a group."""
    return Recording().share(tuple(jobs), hours, Shape(**shape)).events()  # type: ignore[arg-type]  # whole numbers are numbers


def alone(hours: float, job: str = "1000/a") -> list[Event]:
    """Returns the history of one job that has a group to itself."""
    return Recording(seed=2).share((job,), hours).events()
