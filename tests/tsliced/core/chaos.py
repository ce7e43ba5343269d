"""A random life of a world: jobs, faults, deaths and restarts, from a seed.

First anything may happen; then nothing new goes wrong, and everybody who waits must get an answer;
then all leave, and nothing of them may be remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from clients import Client
from oracle import Oracle
from world import GROUPS, LIMITS, Process, World, failure, job

from tsliced.core.actions import EndProcesses, RunHooks, StartOperation
from tsliced.core.events import AcquireRequested
from tsliced.core.model import Arrival, Cause, DeviceId, LeaseId, RankState, Reason, Verb

#: For lives in which clocks run against who holds, is parked, or is left.
TIMED = replace(
    LIMITS,
    max_hold_s=30.0,
    hold_warning_s=5.0,
    idle_park_s=5.0,
    courtesy_turn_s=2.0,
    stranger_turn_s=2.0,
    orphan_s=20.0,
    on_rank_lost="kill",
    rank_lost_s=15.0,
    end_grace_s=1.0,
)

JOBS = (job("a"), job("b"), job("c"))

#: How each operation may fail.
CAUSES = {
    Verb.FREEZE: (Cause.FREEZE_TIMEOUT, Cause.FREEZE_TIMEOUT, Cause.DRIVER, Cause.STOPPED),
    Verb.SNAPSHOT: (Cause.UNSUPPORTED, Cause.DRIVER, Cause.STOPPED, Cause.FAILED),
    Verb.RESTORE: (Cause.DRIVER, Cause.STOPPED, Cause.FAILED),
    Verb.THAW: (Cause.DRIVER, Cause.FAILED),
    Verb.QUERY: (Cause.DRIVER,),
}


@dataclass(slots=True, kw_only=True)
class Chaos:
    """One life. `faults`: whether things go wrong. `timed`: whether more clocks run.

    Those against who holds, is parked, or is left, with strangers that are frozen and last turns.
    """

    seed: int
    faults: bool = True
    timed: bool = False
    steps: int = 120
    full_checks: bool = True
    random: Random = field(init=False)
    world: World = field(init=False)
    oracle: Oracle = field(init=False)
    _was_broken: bool = False
    #: Orders to end processes that were obeyed, or not.
    _ended: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.world = World(
            auto=False,
            seed=self.seed,
            limits=TIMED if self.timed else LIMITS,
            full_checks=self.full_checks,
            freeze_strangers=self.timed,
        )
        self.oracle = Oracle(world=self.world, orderly=not self.faults)
        self.world.watch = self.oracle.watch
        if self.faults:
            self.world.verdict = self._verdict
            self.world.host_memory = lambda _: self._fail(Cause.NO_HOST_MEMORY, 0.05)
            self.world.device_memory = lambda _: self._fail(Cause.NO_DEVICE_MEMORY, 0.03)
            self.world.hooks = self._hooks
            self.world.scans = lambda _: self._fail(Cause.DRIVER, 0.03)
            self.world.numbers = lambda _: self._fail(Cause.JOURNAL, 0.1)

    def live(self) -> None:
        """Live all three parts of the life."""
        for _ in range(self.steps):
            self.step()
        self.heal()
        self.leave()

    # --- anything may happen ------------------------------------------------------------------

    def step(self) -> None:
        """Let one thing happen."""
        usual: list[tuple[float, Callable[[], None]]] = [
            (10, self._go_on),
            (1, self._open),
            (4, self._acquire),
            (4, self._release),
            (2, self._context),
            (1, self.world.look),
            (1, self._pass_time),
        ]
        faults: list[tuple[float, Callable[[], None]]] = [
            (0.7, self._cancel),
            (0.5, self._die),
            (0.4, self._disconnect),
            (0.8, self._reconnect),
            (0.3, self._close),
            (0.3, self._restart),
            (0.2, self._break_journal),
            (0.6, self._mend_journal),
            (0.3, self._clear),
            (0.2, self._retry),
            (0.2, self._drain),
            (0.5, self._undrain),
            (0.1, self._stranger),
        ]
        timed: list[tuple[float, Callable[[], None]]] = [
            (1, self._beat),
            (0.7, self._last_turn),
            (0.4, self._stranger),
            (0.4, self._say_hello),
        ]
        choices = usual + faults if self.faults else usual
        choices += timed if self.timed else []
        (act,) = self.random.choices([a for _, a in choices], [weight for weight, _ in choices])
        act()
        self._obey()
        self.oracle.judge_clocks()

    def _go_on(self) -> None:
        # Several, or the world would fill with beginnings.
        for _ in range(self.random.randint(1, 4)):
            pending = len(self.world.pending)
            if self.world.inbox and (not pending or self.random.random() < 0.5):
                self.world.read()
            elif pending:
                self.world.finish(self.random.randrange(pending))

    def _open(self) -> None:
        if len(self.world.clients) < 6:
            owner = self.random.choice(JOBS)
            session = self.world.session(
                owner,
                hooks=self.random.random() < 0.2,
                heartbeat_s=10.0 if self.timed and self._rarely(0.3) else None,
            )
            self.world.clients[session].confirms = not self.faults or self.random.random() < 0.9

    def _acquire(self) -> None:
        client = self._client(lambda c: len(c.open) < 2)
        if client is None:
            return
        names = [group.name for group in GROUPS]
        count = self.random.choice((1, 1, 1, 2, 3))
        groups = [name for name in names if name in self.random.sample(names, count)]
        same_job = sum(c.job == client.job for c in self.world.clients.values())
        self.world.acquire(
            client.session,
            *groups,
            ranks=self.random.choice((1, same_job)),
            arrival=self.random.choice(list(Arrival)),
            timeout_s=self.random.choice((None, 5.0, 60.0)) if self.faults else None,
        )

    def _release(self) -> None:
        client = self._client(lambda c: bool(c.held))
        if client is not None:
            self.world.release(self.random.choice(list(client.held)))

    def _context(self) -> None:
        if len(self.world.processes) >= 8:
            return
        client = self._client(lambda c: bool(c.held) or (self.faults and self._rarely(0.1)))
        if client is None:
            return
        groups = self.world.groups_held_by(client.job)
        mine: list[DeviceId] = [d for g in GROUPS if g.name in groups for d in g.devices]
        if not mine or (self.faults and self._rarely(0.05)):
            mine = [device for group in GROUPS for device in group.devices]
        devices = self.random.sample(mine, min(len(mine), self.random.choice((1, 1, 2))))
        own = self._rarely(0.3) and client.process not in self.world.processes
        self.world.context(client.job, *devices, pid=client.process.pid if own else None)

    def _pass_time(self) -> None:
        self.world.pass_time(self.random.choice((0.1, 1.0, 20.0 if self.faults else 1.0)))

    def _cancel(self) -> None:
        client = self._client(lambda c: any(self._acquires(c)))
        if client is not None:
            asked = self.random.choice(self._acquires(client))
            self.world.cancel(LeaseId(f"{client.session}.{asked.request}"))

    def _acquires(self, client: Client) -> list[AcquireRequested]:
        return [r for r in client.open.values() if isinstance(r, AcquireRequested)]

    def _die(self) -> None:
        sessions = [client.process for client in self.world.clients.values()]
        processes = sorted({*self.world.processes, *sessions})
        if processes:
            self.world.die(self.random.choice(processes))

    def _disconnect(self) -> None:
        client = self._client(lambda c: True)
        if client is not None:
            self.world.disconnect(client.session)

    def _reconnect(self) -> None:
        away = [c for c in self.world.clients.values() if not c.connected and not c.ended]
        if away:
            self.world.reconnect(self.random.choice(away).session)

    def _close(self) -> None:
        client = self._client(lambda c: True)
        if client is not None:
            self.world.close(client.session)

    def _restart(self) -> None:
        self.world.restart(finish=lambda _: self.random.random() < 0.5)

    def _break_journal(self) -> None:
        self.world.journal_broken, self._was_broken = failure(Cause.JOURNAL), True

    def _mend_journal(self) -> None:
        self.world.journal_broken = None

    def _clear(self) -> None:
        self.world.clear(self.random.choice(JOBS))

    def _retry(self) -> None:
        self.world.retry(self.random.choice(JOBS))

    def _drain(self) -> None:
        self.world.drain(self.random.choice(GROUPS).name, park=self._rarely(0.5))

    def _undrain(self) -> None:
        self.world.undrain(self.random.choice(GROUPS).name)

    def _stranger(self) -> None:
        self.world.context(None, self.random.choice(GROUPS).devices[0])

    def _say_hello(self) -> None:
        strangers = [process for process in self.world.processes.values() if process.job is None]
        if strangers and len(self.world.clients) < 8:
            stranger = self.random.choice(strangers)
            stranger.job = self.random.choice(JOBS)
            self.world.session(stranger.job, pid=stranger.id.pid)

    def _beat(self) -> None:
        client = self._client(lambda c: True)
        if client is not None:
            self.world.beat(client.session)

    def _last_turn(self) -> None:
        client = self._client(lambda c: True)
        if client is not None:
            self.world.last_turn(client.session, leaving=self._rarely(0.5), timeout_s=20.0)

    def _obey(self) -> None:
        """Let processes end that were asked to, but for some that do not hear."""
        orders = self.world.all_of(EndProcesses)
        for order in orders[self._ended :]:
            for process in order.processes:
                if order.kill or self._rarely(0.5):
                    self.world.die(process)
        self._ended = len(orders)

    def _client(self, wanted: Callable[[Client], bool]) -> Client | None:
        fit = [c for c in self.world.clients.values() if c.connected and wanted(c)]
        return self.random.choice(fit) if fit else None

    def _rarely(self, probability: float) -> bool:
        return self.random.random() < probability

    def _fail(self, cause: Cause, probability: float) -> Reason | None:
        return failure(cause) if self._rarely(probability) else None

    def _verdict(self, verb: Verb, process: Process) -> Reason | None:
        if not self._rarely(0.08):
            return None
        return failure(self.random.choice(CAUSES[verb]), process.id)

    def _hooks(self, action: RunHooks) -> Reason | None:
        return self._fail(Cause.QUIESCE, 0.2)

    # --- nothing new goes wrong ---------------------------------------------------------------

    def heal(self) -> None:
        """Mend everything, and require that everybody gets an answer and nobody stays frozen."""
        world = self.world
        world.verdict = lambda _verb, _process: None
        world.host_memory = lambda _: None
        world.device_memory = lambda _: None
        world.hooks = lambda _: None
        world.scans = lambda _: None
        world.numbers = lambda _: None
        world.journal_broken = None
        for group in GROUPS:
            world.undrain(group.name)
        for client in list(world.clients.values()):
            client.confirms = True
            if not client.connected and not client.ended:
                world.reconnect(client.session)
        for turn in range(100):
            world.run()
            self._mend()
            waiting = [c for c in world.clients.values() if c.open]
            if not waiting and not any(c.held for c in world.clients.values()):
                break
            self._give_back()
            self._obey()
            world.pass_time(10.0 if turn < 10 else 60.0)
            if turn >= 20:
                self._give_up_gathering()
        for _ in range(3):
            # A pause before another try may have been left.
            world.pass_time(60.0)
            world.run()
            self._mend()
            world.run()
        self.oracle.judge_rest()

    def _mend(self) -> None:
        for process in list(self.world.processes.values()):
            if process.state is RankState.FAILED or process.job is None:
                self.world.die(process.id)
        for owner in JOBS:
            self.world.clear(owner)

    def _give_back(self) -> None:
        for client in list(self.world.clients.values()):
            for lease in list(client.held):
                self.world.release(lease)

    def _give_up_gathering(self) -> None:
        # Some rank of theirs has left without ever having asked.
        for client in list(self.world.clients.values()):
            for request in self._acquires(client):
                if request.ranks > 1:
                    self.world.cancel(LeaseId(f"{client.session}.{request.request}"))

    # --- all leave ----------------------------------------------------------------------------

    def leave(self) -> None:
        """Let everybody go, and require that nothing of them is remembered."""
        world = self.world
        for client in list(world.clients.values()):
            if not client.ended and self._rarely(0.5):
                world.close(client.session)
        sessions = [client.process for client in world.clients.values()]
        processes = sorted({*world.processes, *sessions})
        self.random.shuffle(processes)
        for process in processes:
            world.die(process)
        world.run()
        if self._was_broken:
            # What could not be written is made up for at the next start.
            world.restart()
            world.run()
        world.pass_time(1000.0)
        world.run()
        self.oracle.judge_empty()
        assert not [a for a in world.pending if isinstance(a, StartOperation)]
