"""The driver: what it does for the core, in which order, and what it does when that fails."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
from in_process import (
    D1,
    D2,
    G1,
    G2,
    HOST,
    LIMIT_S,
    MIB,
    FakeClients,
    FakeDevices,
    Inside,
    inside,
    job,
    process_of,
    until,
)

from tsliced.core.actions import (
    ClientAction,
    ConfirmRelease,
    EndProcesses,
    EndSession,
    Grant,
    LeaseRecord,
    RankRecord,
    Record,
    Refuse,
    TellStalled,
)
from tsliced.core.events import (
    Event,
    GrantConfirmed,
    GroupsObserved,
    RankRegistered,
    TimePassed,
)
from tsliced.core.model import (
    Cause,
    DeviceId,
    FoundRank,
    LeaseId,
    ProcessId,
    RankId,
    RankState,
    Reason,
    SessionId,
)
from tsliced.host.backends.base import Outcome
from tsliced.host.devices import DeviceError, DeviceReading, DevicesError
from tsliced.host.history import Fact
from tsliced.host.journal import JournalError
from tsliced.host.journal_error import JournalCode
from tsliced.host.processes import identify

Story: TypeAlias = Callable[[Inside], Awaitable[None]]


def tell(tmp_path: Path, story: Story, *, devices: FakeDevices | None = None) -> None:
    """Run a story on a fresh driver, within a limit."""

    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), inside(tmp_path, devices=devices) as daemon:
            await story(daemon)

    asyncio.run(run())


def full_disk() -> JournalError:
    return JournalError(JournalCode.FULL, "no room on the disk")


def is_grant(record: Record) -> bool:
    return isinstance(record, LeaseRecord) and bool(record.tokens)


class Writes:
    """Stands before a journal's `write`; notes what clients had been told at each."""

    def __init__(self, daemon: Inside) -> None:
        self._journal = daemon.driver.around.journal
        self._clients = daemon.clients
        self._write = self._journal.write
        self._journal.write = self  # type: ignore[method-assign]  # that is what it is for
        self.batches: list[tuple[Record, ...]] = []
        #: How much had been said when each batch was written.
        self.said_before: list[int] = []
        #: Which records find no room on the disk.
        self.refused: Callable[[Record], bool] = lambda _record: False

    def __call__(self, records: Sequence[Record]) -> None:
        if any(map(self.refused, records)):
            raise full_disk()
        self.batches.append(tuple(records))
        self.said_before.append(len(self._clients.said))
        self._write(records)


# --- order


def test_a_grant_is_sent_only_after_it_is_written_down(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        writes = Writes(daemon)
        await daemon.grant(daemon.open("a"))
        granted = next(
            number for number, batch in enumerate(writes.batches) if any(map(is_grant, batch))
        )
        said = daemon.clients.said[: writes.said_before[granted]]
        assert not any(isinstance(action, Grant) for action in said)

    tell(tmp_path, story)


def test_all_events_of_a_turn_share_one_write(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        await until(lambda: daemon.machine.numbers.left(), "numbers are reserved")
        writes = Writes(daemon)
        for name in "abcde":
            daemon.ask(daemon.open(name))
        await asyncio.sleep(0)
        assert len(writes.batches) == 1
        assert len(writes.batches[0]) >= 10

    tell(tmp_path, story)


def test_a_switch_takes_one_job_off_and_brings_the_next_one_back(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank, process_of("b") as other:
            first, second = daemon.open("a", rank), daemon.open("b", other)
            lease = await daemon.grant(first)
            daemon.devices.put(rank, 40 * MIB)
            daemon.release(first, lease.lease)
            lease = await daemon.grant(second)
            assert daemon.devices.used[D1] == {}
            daemon.devices.put(other, 50 * MIB)
            daemon.release(second, lease.lease)
            assert (await daemon.grant(first)).restored
            assert daemon.devices.used[D1] == {rank.pid: 40 * MIB}
            verbs = ["freeze", "snapshot"]
            assert daemon.backend.calls == [
                *(f"{verb} {rank.pid}" for verb in verbs),
                *(f"{verb} {other.pid}" for verb in verbs),
                f"restore {rank.pid}",
                f"thaw {rank.pid}",
            ]
            assert {rank, other} <= daemon.backend.prepared, "workers were told early"
            events = daemon.driver.around.history.since(0, 100).events
            moved = [e["bytes"] for e in events if e.get("verb") in ("snapshot", "restore")]
            assert moved == [40 * MIB, 50 * MIB, 40 * MIB], "as NVML saw it beforehand"

    tell(tmp_path, story)


def test_time_passes_by_itself(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        await daemon.grant(daemon.open("a"))
        answer = await daemon.answer(daemon.ask(daemon.open("b"), timeout_s=0.05))
        assert isinstance(answer, Refuse)
        assert answer.code == "timeout"

    tell(tmp_path, story)


def test_the_death_of_a_process_ends_its_sessions_and_is_told_to_the_backend_g3(
    tmp_path: Path,
) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as holder:
            await daemon.grant(daemon.open("a", holder))
            waiting = daemon.ask(daemon.open("b"))
            os.kill(holder.pid, signal.SIGKILL)
            assert isinstance(await daemon.answer(waiting), Grant)
            assert [end.session for end in daemon.clients.of(EndSession)] == ["session-a"]
            assert daemon.backend.forgotten == {holder}

    tell(tmp_path, story)


# --- when something fails


def test_a_grant_that_cannot_be_written_down_is_refused_and_the_next_one_works_g2(
    tmp_path: Path,
) -> None:
    async def story(daemon: Inside) -> None:
        first = daemon.open("a")
        await daemon.grant(first, G2)
        writes = Writes(daemon)
        writes.refused = is_grant
        answer = await daemon.answer(daemon.ask(first))
        assert isinstance(answer, Refuse)
        assert answer.code == "unavailable"
        assert "no room on the disk" in answer.text
        assert "no room on the disk" in daemon.log.getvalue()
        writes.refused = lambda _record: False
        await daemon.grant(first)

    tell(tmp_path, story)


def test_a_rank_is_not_touched_when_that_cannot_be_written_down(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            daemon.devices.put(rank, MIB)
            lease = await daemon.grant(session := daemon.open("a", rank))
            other = daemon.open("b")
            await until(lambda: other in daemon.machine.leasing.sessions, "it is there")
            writes = Writes(daemon)
            daemon.release(session, lease.lease)
            await until(lambda: len(writes.batches) == 1, "the release is written")
            writes.refused = lambda record: isinstance(record, RankRecord)
            request = daemon.ask(other)
            stalled = await until(lambda: daemon.clients.of(TellStalled), "it fails")
            assert stalled[0].reason.cause is Cause.JOURNAL
            assert daemon.backend.calls == []
            writes.refused = lambda _record: False
            assert isinstance(await daemon.answer(request), Grant)
            assert daemon.backend.calls == [f"freeze {rank.pid}", f"snapshot {rank.pid}"]

    tell(tmp_path, story)


def test_a_backend_that_raises_has_failed_at_one_operation_and_the_daemon_goes_on(
    tmp_path: Path,
) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            daemon.devices.put(rank, MIB)
            session = daemon.open("a", rank)
            daemon.release(session, (await daemon.grant(session)).lease)
            daemon.backend.instead["freeze"] = RuntimeError("out of luck")
            request = daemon.ask(daemon.open("b"))
            stalled = await until(lambda: daemon.clients.of(TellStalled), "it fails")
            assert "out of luck" in str(stalled[0].reason)
            del daemon.backend.instead["freeze"]
            assert isinstance(await daemon.answer(request), Grant)

    tell(tmp_path, story)


def test_host_memory_that_cannot_be_read_is_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(daemon: Inside) -> None:
        def fail(*_: object) -> None:
            raise OSError(24, "Too many open files")

        with process_of("a") as rank:
            daemon.devices.put(rank, MIB)
            session = daemon.open("a", rank)
            daemon.release(session, (await daemon.grant(session)).lease)
            monkeypatch.setattr(daemon.driver.around.ledgers.host, "reserve", fail)
            daemon.ask(daemon.open("b"))
            stalled = await until(lambda: daemon.clients.of(TellStalled), "it fails")
            assert stalled[0].reason.cause is Cause.NO_HOST_MEMORY
            assert "Too many open files" in str(stalled[0].reason)
            assert daemon.backend.calls == []

    tell(tmp_path, story)


def test_without_room_on_the_devices_nothing_is_restored(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            first = await daemon.make_room("a", rank, 40 * MIB)
            # Memory that NVML counts and ascribes to nobody.
            daemon.devices.used[D1][0] = 30 * MIB
            answer = await daemon.answer(daemon.ask(first))
            assert isinstance(answer, Refuse)
            assert answer.code == "no_device_memory"
            assert "(40 MiB) needed, 35,651,584 bytes (34 MiB) available" in answer.text
            assert f"restore {rank.pid}" not in daemon.backend.calls

    tell(tmp_path, story)


def test_room_that_was_made_since_the_devices_were_read_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            first = await daemon.make_room("a", rank, 40 * MIB)
            daemon.devices.used[D1][0] = 30 * MIB
            scanner = daemon.driver.around.scanner
            recent, was_read = scanner.recent, []

            def recent_and_leave(
                uuids: Collection[DeviceId],
            ) -> Mapping[DeviceId, DeviceReading] | None:
                was_read.append(recent(uuids))
                daemon.devices.used[D1].pop(0, None)
                return was_read[-1]

            monkeypatch.setattr(scanner, "recent", recent_and_leave)
            assert (await daemon.grant(first)).restored
            assert any(was_read)

    tell(tmp_path, story)


@pytest.mark.parametrize(
    ("error", "stale_s", "told"),
    [
        (DeviceError(D1, "fell off the bus"), 0.0, "fell off the bus"),
        (DevicesError("NVML is closed"), 0.0, "NVML is closed"),
        (None, 3.0, "3.0 s old"),
    ],
)
def test_devices_that_cannot_be_looked_at_let_nobody_in_until_they_can_g1(
    tmp_path: Path, error: DevicesError | None, stale_s: float, told: str
) -> None:
    async def story(daemon: Inside) -> None:
        devices = daemon.devices
        with process_of("a") as rank:
            devices.put(rank, MIB)
            session = daemon.open("a", rank)
            daemon.release(session, (await daemon.grant(session)).lease)
            devices.error, devices.stale_s = error, stale_s
            request = daemon.ask(daemon.open("b"))
            stalled = await until(lambda: daemon.clients.of(TellStalled), "it fails")
            assert told in str(stalled[0].reason)
            assert daemon.backend.calls == []
            devices.error, devices.stale_s = None, 0.0
            assert isinstance(await daemon.answer(request), Grant)

    tell(tmp_path, story)


def test_devices_that_cannot_be_looked_at_are_named_once(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        daemon.devices.error = DeviceError(D1, "fell off the bus")
        looking = asyncio.create_task(daemon.driver.observe_for_ever(lambda: 0.001))

        def told() -> int:
            daemon.driver.around.log.flush()
            return daemon.log.getvalue().count("fell off the bus")

        await until(told, "it is told")
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert told() == 1
        daemon.devices.error = None
        await until(lambda: len(daemon.driver.around.scanner.readings) == 2, "all are read")
        daemon.devices.error = DeviceError(D1, "fell off the bus")
        await until(lambda: told() == 2, "it is told when it happens again")
        looking.cancel()

    tell(tmp_path, story)


def test_a_stranger_on_the_devices_is_noted_once(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        # Nothing in this process's surroundings says to which job it belongs.
        daemon.devices.used[D2][os.getpid()] = MIB
        looking = asyncio.create_task(daemon.driver.observe_for_ever(lambda: 0.001))

        def strangers() -> list[object]:
            events = daemon.driver.around.history.since(0, 100).events
            return [event["pid"] for event in events if event["kind"] == "stranger"]

        await until(strangers, "it is seen")
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert strangers() == [os.getpid()]
        looking.cancel()

    tell(tmp_path, story)


def test_a_process_that_cannot_be_watched_is_named(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            watch = daemon.driver._watch
            watch._limit = len(watch)
            found = FoundRank(process=rank, job=job("a"), devices=frozenset({D1}), device_bytes=MIB)
            daemon.driver.post(RankRegistered(job=job("a"), found=found, groups=(G1,)))

            def told() -> bool:
                daemon.driver.around.log.flush()
                return "unwatched" in daemon.log.getvalue()

            await until(told, "it is told")
            assert f"pid={rank.pid}" in daemon.log.getvalue()

    tell(tmp_path, story)


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose end is seen as it was."""
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        yield sleeper
        sleeper.kill()


@pytest.mark.parametrize(("kill", "number"), [(False, signal.SIGTERM), (True, signal.SIGKILL)])
def test_processes_are_ended_and_never_their_successors(
    tmp_path: Path, kill: bool, number: signal.Signals
) -> None:
    async def story(daemon: Inside) -> None:
        with sleeping() as sleeper, sleeping() as other:
            process, kept = identify(sleeper.pid), identify(other.pid)
            assert process is not None
            assert kept is not None
            stale = ProcessId(other.pid, kept.start_time - 1)
            action = EndProcesses(processes=(stale, process), kill=kill)
            daemon.driver._carry_out([], [action])
            assert sleeper.wait(LIMIT_S) == -number
            assert other.poll() is None

    tell(tmp_path, story)


def test_a_process_that_cannot_be_signalled_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pidfd: int, _number: int) -> None:
        # What a daemon without rights over a user's process gets; as root nothing real gets it.
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
            action = EndProcesses(processes=(rank,), kill=False)
            daemon.driver._carry_out([], [action])
            daemon.driver.write_notes()
            line = daemon.log.getvalue()
            assert f"pid={rank.pid}" in line
            assert "SIGTERM could not be sent: Operation not permitted" in line

    tell(tmp_path, story)


@pytest.mark.parametrize("where", ["the core", "an action"])
def test_a_broken_state_is_told_with_its_story_and_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async def story(daemon: Inside) -> None:
        await daemon.grant(daemon.open("a"))

        def fail(*_: object, **__: object) -> None:
            raise AssertionError("two holders")

        if where == "the core":
            monkeypatch.setattr(daemon.machine, "check_invariants", fail)
        else:
            monkeypatch.setattr(daemon.clients, "deliver", fail)
        daemon.ask(daemon.open("b"), G2)
        await daemon.broken.wait()
        log = daemon.log.getvalue()
        assert "broken_invariant" in log
        assert "two holders" in log
        assert "AcquireRequested" in log, "the events that led to it"
        assert isinstance(daemon.driver.broken, AssertionError)
        said = len(daemon.clients.said)
        daemon.driver.post(TimePassed())
        await asyncio.sleep(0.01)
        assert len(daemon.clients.said) == said, "nothing is done from such a state"

    tell(tmp_path, story)


def test_trouble_with_storing_the_history_is_told_once(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        await until(daemon.machine.numbers.left, "numbers are reserved")
        daemon.driver.around.journal.background_error = full_disk()
        flushing = asyncio.create_task(daemon.driver.flush_history_for_ever(lambda: 0.001))

        def told() -> int:
            daemon.driver.around.log.flush()
            return daemon.log.getvalue().count("no room on the disk")

        await until(told, "it is told")
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert told() == 1
        flushing.cancel()

    tell(tmp_path, story)


def test_after_a_restart_from_the_journal_what_was_parked_is_parked(tmp_path: Path) -> None:
    devices = FakeDevices()
    with process_of("a") as rank, process_of("b") as other:

        async def before(daemon: Inside) -> None:
            daemon.devices.put(rank, 40 * MIB)
            first = daemon.open("a", rank)
            daemon.release(first, (await daemon.grant(first)).lease)
            lease = await daemon.grant(daemon.open("b", other))
            daemon.driver.post(GrantConfirmed(session=lease.session, lease=lease.lease))
            parked.update(daemon.backend.parked)

        async def after(daemon: Inside) -> None:
            daemon.backend.parked = parked
            daemon.backend.states[rank] = RankState.PARKED
            (key,) = daemon.machine.tenancies.by_job[job("a")]
            (known,) = daemon.machine.tenancies.ranks_of(key)
            assert known.id == RankId(HOST, rank)
            await until(lambda: known.state is RankState.PARKED, "the backend was asked")
            assert daemon.machine.leasing.arbiters[G1].chosen is not None, "b holds"

        parked: dict[ProcessId, dict[DeviceId, int]] = {}
        tell(tmp_path, before, devices=devices)
        tell(tmp_path, after, devices=devices)


def test_what_a_failed_operation_left_counts_not_what_was_wanted(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            daemon.devices.put(rank, MIB)
            session = daemon.open("a", rank)
            daemon.release(session, (await daemon.grant(session)).lease)
            reason = Reason(cause=Cause.DRIVER, text="no answer")
            daemon.backend.instead["snapshot"] = Outcome(observed=RankState.RUNNING, failure=reason)
            daemon.ask(daemon.open("b"))
            await until(lambda: daemon.clients.of(TellStalled), "it fails")
            assert f"thaw {rank.pid}" not in daemon.backend.calls, "it runs already"

    tell(tmp_path, story)


def test_a_driver_without_clients_goes_on(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        daemon.driver.clients = None
        daemon.ask(daemon.open("a"))
        await until(lambda: daemon.machine.leasing.leases, "it is granted")

    tell(tmp_path, story)


def test_clients_have_their_answers_a_turn_before_the_lines_about_them(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        history = daemon.driver.around.history
        known_next_turn: list[Fact] = []

        def look() -> None:
            known_next_turn.extend(event["kind"] for event in history.since(None, 1000).events)

        class Clients(FakeClients):
            def deliver(self, action: ClientAction) -> None:
                super().deliver(action)
                asyncio.get_running_loop().call_soon(look)

        session = daemon.open("a")
        grant = await daemon.grant(session)
        daemon.driver.clients = clients = Clients()
        daemon.release(session, grant.lease)
        await until(lambda: "released" in daemon.log.getvalue(), "it is in the log")
        assert clients.of(ConfirmRelease)
        assert "granted" in known_next_turn
        assert "released" not in known_next_turn
        assert history.since(None, 1).events[0]["kind"] == "released"

    tell(tmp_path, story)


def test_lines_that_are_due_when_the_driver_closes_are_not_lost(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        daemon.driver.note("first", "info")
        daemon.driver.close()
        assert "first" in daemon.log.getvalue()
        daemon.driver.note("second", "info")
        assert "second" in daemon.log.getvalue()

    tell(tmp_path, story)


def test_of_leases_that_nobody_waits_for_all_is_told_to_a_reader_and_at_the_end(
    tmp_path: Path,
) -> None:
    async def story(daemon: Inside) -> None:
        def latest() -> tuple[Fact, Fact]:
            (event,) = daemon.driver.around.history.since(None, 1).events
            return event["kind"], event["lease"]

        session = daemon.open("a")
        daemon.release(session, (await daemon.grant(session)).lease)
        over = (await daemon.grant(session)).lease
        daemon.release(session, over)
        await until(lambda: not daemon.machine.leasing.leases, "it is over")
        daemon.driver.catch_up()
        assert latest() == ("held", over)
        held = (await daemon.grant(session)).lease
        daemon.driver.close()
        assert latest() == ("granted", held)

    tell(tmp_path, story)


def test_lines_that_cannot_be_made_end_the_daemon(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        daemon.driver.note("wrong", "no such level")
        await asyncio.wait_for(daemon.broken.wait(), LIMIT_S)
        assert isinstance(daemon.driver.broken, KeyError)

    tell(tmp_path, story)


def test_after_a_request_the_loop_stays_awake_for_a_moment_and_no_longer(tmp_path: Path) -> None:
    async def cost_of(post: Callable[[Event], None]) -> float:
        before = time.process_time()
        post(GrantConfirmed(session=SessionId("nobody"), lease=LeaseId("nothing")))
        await asyncio.sleep(0.1)
        return time.process_time() - before

    async def story(daemon: Inside) -> None:
        daemon.driver._linger_s = 0.2
        asleep = await cost_of(daemon.driver.post)
        awake = await cost_of(daemon.driver.post_request)
        assert awake > 3 * asleep
        await until(lambda: daemon.driver._linger_until == 0, "it goes to sleep")

    tell(tmp_path, story)


def test_a_job_that_grew_beyond_the_host_and_shrank_again_is_let_in_again(tmp_path: Path) -> None:
    async def story(daemon: Inside) -> None:
        with process_of("a") as rank:
            session = daemon.open("a", rank)

            async def is_seen_with(size: int) -> Reason | None:
                found = FoundRank(
                    process=rank, job=job("a"), devices=frozenset({D1}), device_bytes=size
                )
                daemon.driver.post(GroupsObserved(found=(found,)))
                await asyncio.sleep(0)
                daemon.driver.promise_host_memory()
                await asyncio.sleep(0)
                (tenancy,) = daemon.machine.tenancies.all.values()
                return tenancy.participant.shortage

            assert await is_seen_with(MIB) is None
            assert await is_seen_with(1 << 60) is not None
            refused = await daemon.answer(daemon.ask(session))
            assert isinstance(refused, Refuse)
            assert refused.code == "no_host_memory"
            assert await is_seen_with(MIB) is None
            await daemon.grant(session)

    tell(tmp_path, story)
