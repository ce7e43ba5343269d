"""The blocking client against a daemon over a real socket."""

from __future__ import annotations

import functools
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from fake_daemon import LIMIT_S, Background, FakeConnection, FakeDaemon, state_of

from libtimeslice import (
    AcquireTimeout,
    ClientClosed,
    DaemonUnreachable,
    LeaseState,
    Released,
    TimeSlice,
    TimeSliceError,
    UnknownGroup,
    connect,
)
from libtimeslice.protocol import Message


@pytest.fixture
def ts(daemon: FakeDaemon) -> Iterator[TimeSlice]:
    with connect(daemon.path, job="job-a") as client:
        yield client


# -- leases


def test_a_client_connects_when_it_is_first_needed(daemon: FakeDaemon) -> None:
    with connect(daemon.path) as ts:
        assert daemon.log == []
        ts.status()
        assert [message["t"] for message in daemon.log] == ["hello", "status"]


def test_a_lease_tells_the_grant_and_ends_with_its_block(daemon: FakeDaemon, ts: TimeSlice) -> None:
    with ts.lease("n1", timeout=60, phase="rollout") as lease:
        assert list(daemon.held) == [lease.id]
        assert lease.token == 1
        assert lease.tokens == {"n1": 1}
        assert lease.groups == ("n1",)
        assert state_of(lease) is LeaseState.HELD
        assert lease.restored is True
        assert lease.switch_s == 0.25
        assert lease.waited_s >= 0
        lease.check()
    assert daemon.held == {}
    assert state_of(lease) is LeaseState.RELEASED
    asked = daemon.last("acquire")
    assert 59 < asked.pop("timeout_s") <= 60
    assert asked == {
        "t": "acquire",
        "id": 1,
        "groups": ["n1"],
        "phase": "rollout",
        "ranks": None,
        "arrive": "all",
    }
    assert daemon.last("hello")["job"] == "job-a"


def test_a_lease_of_several_groups_has_a_token_for_each(ts: TimeSlice) -> None:
    with ts.lease(["n1", "n2"]) as lease:
        assert set(lease.tokens) == {"n1", "n2"}
        with pytest.raises(ValueError, match="tokens"):
            _ = lease.token


def test_a_lease_without_a_name_takes_all_groups(daemon: FakeDaemon, ts: TimeSlice) -> None:
    with ts.lease() as lease:
        assert lease.groups == ("n1", "n2")
        with ts.lease(), ts.lease("n2"):
            assert daemon.count("acquire") == 1
    assert daemon.last("acquire")["groups"] is None


def test_role_names_are_resolved_by_the_client(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSLICE_GROUPS", "trainer=n1,n2")
    with connect(daemon.path) as ts, ts.lease("trainer") as lease:
        assert lease.groups == ("n1", "n2")


def test_acquire_and_release_are_plain_calls_and_tell_the_queue(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    first, second = ts.acquire("n1"), ts.acquire("n2")
    assert ts.release() == Released(waiters=0, deferred=True)
    assert state_of(second) is LeaseState.RELEASED
    daemon.queue_up(("n1",))
    assert ts.release(first) == Released(waiters=1, deferred=False)
    assert first.release() is None
    assert daemon.count("release") == 2
    with pytest.raises(ValueError, match="nothing was acquired"):
        ts.release()
    ts.acquire("n1")
    ts.acquire("n2").release()
    assert ts.release() == Released(waiters=1, deferred=False)


def test_leases_that_were_given_back_by_themselves_are_not_kept(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    """Also if there is always a later one that is still held, and if some of them were lost."""
    outer = ts.acquire("n2")
    for _ in range(5):
        first = ts.acquire("n1")
        later = ts.acquire("n2")
        daemon.end_lease(first.id, "revoked")
        first.release()
        outer.release()
        outer = later
    assert len(ts._plain._leases) <= 3
    ts.release()
    assert daemon.held == {}
    with pytest.raises(ValueError, match="all of it was released"):
        ts.release()


def test_a_refused_acquire_raises_by_kind_with_the_facts(ts: TimeSlice) -> None:
    with pytest.raises(UnknownGroup) as raised:
        ts.acquire("nope")
    assert raised.value.facts == {"group": "nope", "groups": ("nope",)}
    with ts.lease("n1"):
        pass


@pytest.mark.parametrize(
    "arguments",
    [{"timeout": -1}, {"timeout": float("nan")}, {"arrive": "some"}, {"phase": ""}, {"ranks": 0}],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_sent(
    daemon: FakeDaemon, ts: TimeSlice, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"must be|needs a name"):
        ts.lease("n1", **arguments)
    assert daemon.log == []


# -- waiting


def test_an_acquire_waits_its_turn(daemon: FakeDaemon, ts: TimeSlice) -> None:
    other = daemon.steal(("n1",))
    waiting = Background(lambda: ts.acquire("n1"))
    daemon.wait_until(lambda: daemon.waiting)
    assert waiting.running
    daemon.give_back(other)
    assert state_of(waiting.result()) is LeaseState.HELD


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_a_time_out_of_the_daemons_leaves_no_trace(
    daemon: FakeDaemon, ts: TimeSlice, timeout: float
) -> None:
    """G5."""
    other = daemon.steal(("n1",))
    with pytest.raises(AcquireTimeout) as raised:
        ts.acquire("n1", timeout=timeout)
    assert raised.value.code == "timeout"
    assert daemon.waiting == []
    daemon.give_back(other)
    assert daemon.held == {}


def test_a_time_out_of_the_clients_own_cancels_the_acquire(
    daemon: FakeDaemon, ts: TimeSlice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G5: the daemon does not answer in time, so the client's clock decides."""
    monkeypatch.setattr("libtimeslice.client.TIMEOUT_SLACK_S", 0.01)
    daemon.mute_timeouts = True
    other = daemon.steal(("n1",))
    with pytest.raises(AcquireTimeout):
        ts.acquire("n1", timeout=0.02)
    assert daemon.last("cancel")["acquire"] == daemon.last("acquire")["id"]
    assert daemon.waiting == []
    daemon.give_back(other)
    assert daemon.held == {}


def test_a_grant_that_crosses_the_cancel_is_handed_back(
    daemon: FakeDaemon, ts: TimeSlice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G5: the daemon grants at the very moment that it reads the cancel."""
    monkeypatch.setattr("libtimeslice.client.TIMEOUT_SLACK_S", 0.01)
    daemon.mute_timeouts = True
    other = daemon.steal(("n1",))

    def grant_on_cancel(connection: FakeConnection, message: Message) -> bool:
        if message.get("t") == "cancel":
            daemon.give_back(other)
        return False

    daemon.intercept = grant_on_cancel
    with pytest.raises(AcquireTimeout):
        ts.acquire("n1", timeout=0.02)
    daemon.wait_until(lambda: daemon.count("release") == 1)
    assert daemon.held == {}


def test_a_silent_daemon_costs_the_reply_limit_and_no_more(daemon: FakeDaemon) -> None:
    daemon.intercept = lambda _connection, message: message.get("t") == "status"
    with (
        connect(daemon.path, reply_limit_s=0.05) as ts,
        pytest.raises(DaemonUnreachable, match=r"'status' within 0\.05 s"),
    ):
        ts.status()


def test_a_grant_is_acknowledged_if_the_daemon_wants_to_know(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    ts.acquire("n1")
    daemon.ack_s = 2.0
    lease = ts.acquire("n2")
    daemon.wait_until(lambda: daemon.count("ack") == 1)
    assert daemon.last("ack")["lease"] == lease.id


def test_contention_shows_at_once_in_the_lease_and_goes_away_again(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n1") as lease:
        contended = [lease.contended]
        daemon.queue_up(("n1",))
        contended.append(lease.contended)
        daemon.clear_queue()
        contended.append(lease.contended)
    assert contended == [False, True, False]


def test_a_lease_granted_while_others_wait_starts_contended(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    daemon.queue_up(("n2",))
    with ts.lease("n1") as lease:
        assert lease.contended


def test_ranks_of_a_round_are_granted_together(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with connect(daemon.path, job="j") as rank0, connect(daemon.path, job="j") as rank1:
        first = Background(lambda: rank0.acquire("n1"))
        daemon.wait_until(lambda: daemon.waiting)
        assert daemon.held == {}
        second = rank1.acquire("n1")
        assert first.result().token == second.token
        assert daemon.last("acquire")["ranks"] == 2
        rank0.release()
        rank1.release()
        alone = rank0.acquire("n2", ranks=1)
        assert state_of(alone) is LeaseState.HELD


# -- nesting


def test_an_inner_lease_costs_no_request_and_only_the_outermost_frees(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease(["n1", "n2"]) as outer:
        with ts.lease("n2") as inner:
            assert inner.id == outer.id
            assert inner.waited_s == 0.0
        assert state_of(inner) is LeaseState.RELEASED
        assert state_of(outer) is LeaseState.HELD
        assert daemon.count("release") == 0
    assert (daemon.count("acquire"), daemon.count("release")) == (1, 1)
    assert daemon.held == {}


def test_an_outer_lease_that_ends_first_leaves_the_groups_to_the_inner_one(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    outer, inner = ts.acquire("n1"), ts.acquire("n1")
    outer.release()
    assert state_of(inner) is LeaseState.HELD
    assert daemon.held
    inner.release()
    assert daemon.held == {}


def test_an_inner_lease_of_more_groups_is_the_daemons_to_decide(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n1"), ts.lease("n2"):
        with ts.lease(["n1", "n2"]) as both:
            assert daemon.count("acquire") == 2
            assert set(both.tokens) == {"n1", "n2"}
            assert both.id.count("+") == 1
        assert len(daemon.held) == 2
    assert daemon.held == {}


# -- letting others in


def test_off_accelerators_lets_others_in_and_takes_the_devices_back(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n1") as lease, ts.lease("n1") as inner:
        before = lease.token
        with lease.off_accelerators():
            assert daemon.held == {}
            assert state_of(lease) is LeaseState.RELEASED
            with ts.lease("n1") as again:
                assert state_of(again) is LeaseState.HELD
        assert state_of(lease) is state_of(inner) is LeaseState.HELD
        assert lease.token == inner.token > before
        assert list(daemon.held) == [lease.id]
    assert daemon.held == {}


def test_off_accelerators_of_the_client_lets_go_of_everything(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n1"), ts.lease("n2"):
        with ts.off_accelerators():
            assert daemon.held == {}
        assert len(daemon.held) == 2
    assert daemon.held == {}


def test_the_devices_are_taken_back_when_the_work_outside_fails(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n1") as lease:
        with pytest.raises(ZeroDivisionError), lease.off_accelerators():
            _ = 1 / 0
        assert state_of(lease) is LeaseState.HELD


def test_a_program_that_is_being_stopped_does_not_queue_up_again(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with pytest.raises(KeyboardInterrupt), ts.lease("n1") as lease, lease.off_accelerators():
        raise KeyboardInterrupt
    assert daemon.count("acquire") == 1
    assert daemon.held == {}


def test_devices_that_cannot_be_taken_back_in_time_make_the_lease_lost(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    with ts.lease("n1") as lease:
        with pytest.raises(AcquireTimeout), lease.off_accelerators(timeout=0):
            daemon.steal(("n1",))
        assert state_of(lease) is LeaseState.LOST
        assert "taken back" in (lease.reason or "")
        with pytest.raises(TimeSliceError, match="lost"):
            lease.check()
    assert daemon.count("release") == 1


def test_a_lease_released_while_off_is_not_taken_back(daemon: FakeDaemon, ts: TimeSlice) -> None:
    lease = ts.acquire("n1")
    with lease.off_accelerators():
        ts.release(lease)
    assert daemon.count("acquire") == 1


# -- threads


def test_threads_wait_at_the_same_time_and_each_gets_its_own_answer(daemon: FakeDaemon) -> None:
    daemon.groups = tuple(f"g{number}" for number in range(8))
    with connect(daemon.path) as ts:
        others = {group: daemon.steal((group,)) for group in daemon.groups}
        waiting = {
            group: Background(functools.partial(ts.acquire, group)) for group in daemon.groups
        }
        daemon.wait_until(lambda: len(daemon.waiting) == 8)
        assert ts.status()["groups"][0]["waiters"] == 1
        for group in reversed(daemon.groups):
            daemon.give_back(others[group])
            assert waiting[group].result().groups == (group,)
        assert daemon.count("hello") == 1


def test_a_thread_that_gives_up_passes_the_reading_on(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to wait reads for all. When its time is up, another must read on."""
    monkeypatch.setattr("libtimeslice.client.TIMEOUT_SLACK_S", 0.01)
    daemon.mute_timeouts = True
    with connect(daemon.path) as ts:
        others = {group: daemon.steal((group,)) for group in ("n1", "n2")}
        first = Background(lambda: ts.acquire("n1", timeout=0.2))
        daemon.wait_until(lambda: len(daemon.waiting) == 1)
        second = Background(lambda: ts.acquire("n2"))
        daemon.wait_until(lambda: len(daemon.waiting) == 2)
        with pytest.raises(AcquireTimeout):
            first.result()
        daemon.give_back(others["n2"])
        assert second.result().groups == ("n2",)


def test_a_thread_that_asks_for_what_another_is_asking_for_joins_its_grant(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    other = daemon.steal(("n1", "n2"))
    outer = Background(lambda: ts.acquire(["n1", "n2"]))
    daemon.wait_until(lambda: daemon.waiting)
    inner = Background(lambda: ts.acquire("n2"))
    late = Background(lambda: ts.acquire("n2", timeout=0.05))
    with pytest.raises(AcquireTimeout):
        late.result()
    daemon.give_back(other)
    assert inner.result().id == outer.result().id
    assert daemon.count("acquire") == 1
    outer.result().release()
    assert state_of(inner.result()) is LeaseState.HELD
    inner.result().release()
    assert daemon.held == {}


def test_a_thread_whose_forerunner_gave_up_asks_itself(daemon: FakeDaemon, ts: TimeSlice) -> None:
    other = daemon.steal(("n1",))
    first = Background(lambda: ts.acquire("n1", timeout=0.1))
    daemon.wait_until(lambda: daemon.waiting)
    second = Background(lambda: ts.acquire("n1"))
    with pytest.raises(AcquireTimeout):
        first.result()
    daemon.wait_until(lambda: daemon.count("acquire") == 2)
    daemon.give_back(other)
    assert state_of(second.result()) is LeaseState.HELD


def test_many_threads_acquire_and_release_without_losing_an_answer(daemon: FakeDaemon) -> None:
    daemon.groups = ("n1", "n2", "n3")
    with connect(daemon.path) as ts:

        def work(group: str) -> int:
            for _ in range(30):
                with ts.lease(group, timeout=LIMIT_S):
                    ts.progress(step=1)
            return 30

        threads = [Background(functools.partial(work, group)) for group in daemon.groups * 2]
        assert [thread.result() for thread in threads] == [30] * 6
        assert daemon.held == {}


# -- what a job tells


def test_phases_progress_and_queues_are_told(daemon: FakeDaemon, ts: TimeSlice) -> None:
    class Scalar:
        def item(self) -> float:
            return 0.5

    with ts.phase("reward"):
        ts.progress(step=12, loss=Scalar(), tag="x", ok=True, huge=1 << 80)
        ts.queue("trajectories", depth=412, target=512)
    daemon.wait_until(lambda: daemon.count("phase") == 2)
    phases = [message for message in daemon.log if message["t"] == "phase"]
    assert [(phase["name"], phase["begin"]) for phase in phases] == [
        ("reward", True),
        ("reward", False),
    ]
    fields = {"step": 12, "loss": 0.5, "tag": "x", "ok": True, "huge": float(1 << 80)}
    assert daemon.last("progress")["fields"] == fields
    assert daemon.last("queue") == {
        "t": "queue",
        "name": "trajectories",
        "depth": 412,
        "target": 512,
    }


def test_signs_of_life_are_sent_as_often_as_the_promise_needs(daemon: FakeDaemon) -> None:
    with connect(daemon.path, heartbeat_s=1000) as ts:
        ts.heartbeat()
        daemon.wait_until(lambda: daemon.count("heartbeat") == 1)
        assert daemon.last("hello")["heartbeat_s"] == 1000.0
        for _ in range(1000):
            ts.heartbeat()
        ts.status()
        assert daemon.count("heartbeat") == 1
    with connect(daemon.path, heartbeat_s=0.1) as ts:
        while daemon.count("heartbeat") < 3:
            ts.heartbeat()


def test_without_a_promise_no_sign_of_life_is_sent(daemon: FakeDaemon, ts: TimeSlice) -> None:
    ts.heartbeat()
    ts.status()
    assert daemon.count("heartbeat") == 0
    assert daemon.last("hello")["heartbeat_s"] is None


def test_what_the_wire_cannot_carry_is_refused_with_its_name(ts: TimeSlice) -> None:
    with pytest.raises(TypeError, match="batch must be a number"):
        ts.progress(batch=[1, 2])
    with pytest.raises(ValueError, match="note has 2000"):
        ts.progress(note="x" * 2000)
    with pytest.raises(ValueError, match="64 fields"):
        ts.progress(**{f"f{number}": 1 for number in range(65)})
    with pytest.raises(ValueError, match="depth"):
        ts.queue("q", depth=-1)
    with pytest.raises(ValueError, match="a phase needs a name"), ts.phase(""):
        pass


def test_status_comes_from_the_daemon(ts: TimeSlice) -> None:
    assert [group["name"] for group in ts.status()["groups"]] == ["n1", "n2"]


# -- around functions


def test_on_accelerators_leases_around_each_call(daemon: FakeDaemon, ts: TimeSlice) -> None:
    @ts.on_accelerators("n1", phase="train")
    def step(value: int) -> int:
        """Trains."""
        assert len(daemon.held) == 1
        return value if value < 2 else step(value - 1)

    assert step(2) == 1
    assert step.__doc__ == "Trains."
    assert daemon.count("acquire") == 1
    assert step(1) == 1
    assert daemon.count("acquire") == 2
    assert daemon.held == {}


def test_on_accelerators_without_arguments_takes_all_groups(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    @ts.on_accelerators
    def step() -> int:
        return len(daemon.held)

    assert step() == 1
    assert daemon.last("acquire")["groups"] is None


def test_on_accelerators_is_a_context_manager_that_can_be_used_again(
    daemon: FakeDaemon, ts: TimeSlice
) -> None:
    around = ts.on_accelerators("n1")
    for _ in range(2):
        with around as lease, around:
            assert state_of(lease) is LeaseState.HELD
        assert daemon.held == {}


def test_generators_cannot_be_decorated(ts: TimeSlice) -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        ts.on_accelerators("n1")(numbers)


# -- the end


def test_closing_says_bye_and_releases(daemon: FakeDaemon) -> None:
    ts = connect(daemon.path)
    lease = ts.acquire("n1")
    ts.close()
    ts.close()
    daemon.wait_until(lambda: daemon.byes == 1 and not daemon.connections)
    assert daemon.held == {}
    assert state_of(lease) is LeaseState.RELEASED
    with pytest.raises(ClientClosed):
        ts.acquire("n1")
    assert lease.release() is None


def test_closing_ends_the_waits_of_other_threads(daemon: FakeDaemon) -> None:
    ts = connect(daemon.path)
    daemon.steal(("n1",))
    waiting = Background(lambda: ts.acquire("n1"))
    daemon.wait_until(lambda: daemon.waiting)
    ts.close()
    with pytest.raises(ClientClosed):
        waiting.result()


def test_closing_does_not_hang_on_a_daemon_that_reads_nothing(daemon: FakeDaemon) -> None:
    ts = connect(daemon.path)
    ts.status()
    with daemon.changed:  # it cannot handle anything now
        closing = Background(ts.close)
        closing.result()


def test_a_signal_handler_may_close_the_client(daemon: FakeDaemon) -> None:
    ts = connect(daemon.path)
    daemon.steal(("n1",))
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        daemon.wait_until(lambda: daemon.waiting)
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: ts.close())
    try:
        interrupter = Background(interrupt)
        with pytest.raises(ClientClosed):
            ts.acquire("n1")
        interrupter.result()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_client_that_nobody_uses_any_more_is_closed(daemon: FakeDaemon) -> None:
    ts = connect(daemon.path)
    ts.acquire("n1").release()
    gone = weakref.ref(ts)
    del ts
    gc.collect()
    assert gone() is None
    daemon.wait_until(lambda: daemon.byes == 1 and not daemon.connections)
