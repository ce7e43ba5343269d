"""Sessions and what they ask for: answers, limits, clocks and ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from world import D1, G1, G2, G3, LIMITS, World, failure, job

from tsliced.core.actions import (
    ConfirmCancel,
    ConfirmRelease,
    EndSession,
    Grant,
    LeaseEndedRecord,
    LeaseRecord,
    Note,
    Refuse,
    SessionEndedRecord,
    SessionRecord,
    TellLost,
    WatchProcess,
)
from tsliced.core.events import (
    AcquireRequested,
    CancelRequested,
    GrantConfirmed,
    HostMemoryPromised,
    ReleaseRequested,
    SessionClosed,
    SessionDisconnected,
    SessionOpened,
    SessionResumed,
)
from tsliced.core.model import (
    Arrival,
    Cause,
    Counter,
    GroupName,
    LeaseId,
    ProcessId,
    RankState,
    RequestId,
    RoundId,
    SessionId,
    TenancyKey,
)

A, B, C = job("a"), job("b"), job("c")
R7 = RequestId(7)


def test_a_session_is_kept_and_its_process_watched() -> None:
    world = World()
    process = ProcessId(5, 1)
    effects = world.feed(
        SessionOpened(session=SessionId("s"), job=A, process=process, secret=b"x", groups=(G1,))
    )
    assert effects.records == (
        SessionRecord(
            session=SessionId("s"),
            job=A,
            process=process,
            secret=b"x",
            groups=(G1,),
            hooks=False,
            agent=False,
        ),
    )
    assert effects.actions == (WatchProcess(process=process),)


def test_a_lease_of_a_resident_job_is_granted_in_one_step() -> None:
    world = World()
    session = world.session(A)
    world.release(world.acquire(session))
    lease = LeaseId(f"{session}.7")
    effects = world.feed(AcquireRequested(session=session, request=R7, groups=(G1,), phase="p"))
    # Two epochs and a token went before.
    tokens = ((G1, Counter(1, 2)),)
    assert effects.records == (
        LeaseRecord(
            lease=lease,
            session=session,
            request=R7,
            round=RoundId(2),
            place=2,
            groups=(G1,),
            phase="p",
            ranks=1,
            arrival=Arrival.ALL,
            tokens=tokens,
        ),
    )
    (grant,) = effects.actions
    assert grant == Grant(
        session=session,
        request=R7,
        lease=lease,
        tokens=tokens,
        waited_s=0.0,
        restored=False,
        switch_s=0.0,
        contended=False,
        ack_s=None,
    )


def test_its_release_is_kept_before_it_is_answered() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session, request=3)
    effects = world.feed(ReleaseRequested(session=session, request=R7, lease=lease))
    assert effects.records == (
        LeaseEndedRecord(
            lease=lease,
            session=session,
            request=RequestId(3),
            slot=0,
            code="released",
            text="it was released",
            waiters=0,
            deferred=True,
        ),
    )
    note, answer = effects.actions
    assert isinstance(note, Note)
    assert note.facts["cause"] == "released"
    assert answer == ConfirmRelease(session=session, request=R7, waiters=0, deferred=True)


# --- a request that is sent again -----------------------------------------------------------------


def test_g6_an_acquire_that_is_sent_again_is_granted_again_with_the_same_token() -> None:
    world = World()
    session = world.session(A)
    world.acquire(session, request=7)
    world.acquire(session, request=7)
    first, second = world.grants()
    assert first.tokens == second.tokens
    assert len(world.machine.leasing.leases) == 1


def test_g6_one_that_waits_is_answered_once_when_it_is_granted() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    session = world.session(B)
    world.acquire(session, request=7)
    lease = world.acquire(session, request=7)
    assert world.answers(R7) == []
    world.release(holder)
    assert world.held(lease)
    assert len(world.answers(R7)) == 1


def test_g6_a_release_that_is_sent_again_gets_the_same_answer() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    world.acquire(world.session(B))
    world.release(lease, request=50)
    world.release(lease, request=50)
    first, second = world.answers(RequestId(50))
    assert first == second
    assert isinstance(first, ConfirmRelease)
    assert first.waiters == 1


def test_g6_a_cancel_that_is_sent_again_gets_the_same_answer() -> None:
    world = World()
    world.acquire(world.session(A))
    session = world.session(B)
    lease = world.acquire(session, request=7)
    answers = [world.answers(world.cancel(lease))[0] for _ in range(2)]
    assert [isinstance(a, ConfirmCancel) and a.cancelled for a in answers] == [True, True]


@pytest.mark.parametrize("restart", [False, True])
def test_g6_an_acquire_whose_lease_is_over_is_not_carried_out_again(restart: bool) -> None:
    world = World()
    session = world.session(A)
    world.release(world.acquire(session, request=7))
    if restart:
        world.restart()
    world.acquire(session, request=7)
    refusal = world.refusals()[-1]
    assert (refusal.code, refusal.text) == ("lease_ended", "it was released")
    assert world.machine.leasing.arbiters[G1].chosen is None


def test_g6_a_refusal_is_remembered_too() -> None:
    world = World()
    session = world.session(A)
    nowhere = GroupName("nowhere")
    for _ in range(2):
        world.acquire(session, nowhere, request=7)
    assert [r.code for r in world.refusals()] == ["unknown_group"] * 2
    assert "known: g1, g2, g3" in world.refusals()[0].text


# --- what is refused ------------------------------------------------------------------------------


def test_a_session_that_is_not_known_is_told_to_connect_again() -> None:
    world = World()
    session = SessionId("nobody")
    for request in (
        AcquireRequested(session=session, request=R7),
        ReleaseRequested(session=session, request=R7, lease=LeaseId("x")),
        CancelRequested(session=session, request=R7, acquire=R7),
    ):
        (answer,) = world.feed(request).actions
        assert answer == Refuse(
            session=session, request=R7, code="session_unknown", text="connect again"
        )
    for event in (
        SessionDisconnected(session=session),
        SessionResumed(session=session),
        SessionClosed(session=session),
        GrantConfirmed(session=session, lease=LeaseId("x")),
    ):
        assert world.feed(event).actions == ()


def test_g10_a_group_that_the_session_may_not_lease_is_refused() -> None:
    world = World()
    session = SessionId("s")
    world.feed(
        SessionOpened(session=session, job=A, process=ProcessId(5, 1), secret=b"", groups=(G1, G3))
    )
    world.feed(AcquireRequested(session=session, request=R7, groups=(G2,)))
    assert world.refusals()[0].code == "not_permitted"
    assert "uid 1000 may not lease group 'g2'" in world.refusals()[0].text


def test_without_groups_a_lease_is_for_all_that_the_session_may_lease() -> None:
    world = World()
    session = SessionId("s")
    opened = SessionOpened(
        session=session, job=A, process=ProcessId(5, 1), secret=b"", groups=(G1, G3)
    )
    world.feed(opened)
    world.feed(AcquireRequested(session=session, request=R7))
    assert [group for group, _ in world.grants()[0].tokens] == [G1, G3]


def test_a_session_that_may_lease_nothing_is_told_so() -> None:
    world = World()
    session = SessionId("s")
    world.feed(
        SessionOpened(session=session, job=A, process=ProcessId(5, 1), secret=b"", groups=())
    )
    world.feed(AcquireRequested(session=session, request=R7))
    assert "this session may lease no group of this host" in world.refusals()[0].text


@pytest.mark.parametrize(
    "limit",
    ["max_waiters", "max_leases_per_session", "max_leases_per_uid", "max_groups_per_lease"],
)
def test_g9_a_limit_is_a_clear_error_to_the_one_who_hit_it(limit: str) -> None:
    changed: dict[str, Any] = {limit: 2 if limit == "max_leases_per_uid" else 1}
    limits = dataclasses.replace(LIMITS, **changed)
    world = World(limits=limits)
    world.acquire(world.session(A))
    session = world.session(B)
    if limit == "max_groups_per_lease":
        refused = world.acquire(session, G1, G2)
    else:
        waiting = world.acquire(session)
        refused = world.acquire(world.session(C) if limit == "max_waiters" else session)
        assert world.waits(waiting)
    assert world.code(refused) == "would_exceed_limit"
    text = world.refusals()[0].text
    assert f"{getattr(limits, limit)} " in text
    assert f"the limit {limit}" in text, "it says what to raise"


def test_a_lease_of_another_session_cannot_be_released_nor_confirmed() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    session = world.session(A)
    world.feed(ReleaseRequested(session=session, request=R7, lease=lease))
    world.feed(GrantConfirmed(session=session, lease=lease))
    assert world.refusals()[0].code == "unknown_lease"
    assert world.held(lease)


def test_a_lease_that_is_waited_for_cannot_be_released() -> None:
    world = World()
    world.acquire(world.session(A))
    lease = world.acquire(world.session(B))
    world.release(lease)
    assert world.refusals()[0].code == "unknown_lease"
    assert world.waits(lease)


def test_a_lease_that_was_taken_away_cannot_be_released() -> None:
    world = World()
    session = world.session(A)
    world.clients[session].confirms = False
    lease = waited(world, session)
    world.pass_time(LIMITS.ack_s)
    world.release(lease)
    refusal = world.refusals()[-1]
    assert (refusal.code, refusal.text) == (
        "lease_ended",
        "its grant was not confirmed within 10.0 s",
    )


def test_a_job_that_could_not_be_parked_is_refused_until_there_is_host_memory() -> None:
    world = World()
    session = world.session(A)
    world.release(world.acquire(session))
    key = TenancyKey(A, (G1,))
    world.feed(HostMemoryPromised(tenancy=key, failure=failure(Cause.NO_HOST_MEMORY)))
    assert world.code(world.acquire(session)) == "no_host_memory"
    assert world.held(world.acquire(session, G2))
    world.feed(HostMemoryPromised(tenancy=key))
    assert world.held(world.acquire(session))
    gone = HostMemoryPromised(tenancy=TenancyKey(B, (G1,)), failure=failure(Cause.NO_HOST_MEMORY))
    assert world.feed(gone).actions == ()


@pytest.mark.parametrize("cause", [Cause.NO_HOST_MEMORY, Cause.UNSUPPORTED])
def test_g11_who_was_given_up_on_for_lack_of_host_memory_is_tried_again_when_there_is_some(
    cause: Cause,
) -> None:
    world = World(host_memory=lambda _action: failure(cause))
    session = world.session(A)
    lease = world.acquire(session)
    world.context(A, D1)
    world.look()
    world.release(lease)
    waiter = world.acquire(world.session(B))
    world.pass_time(60.0)
    assert len(world.notes("pinned")) == 1
    world.host_memory = lambda _action: None
    world.feed(HostMemoryPromised(tenancy=TenancyKey(A, (G1,))))
    assert world.held(waiter) is (cause is Cause.NO_HOST_MEMORY)


# --- cancels and time-outs ------------------------------------------------------------------------


def test_g5_a_cancelled_acquire_leaves_no_trace() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    session = world.session(B)
    lease = world.acquire(session, request=7)
    request = world.cancel(lease)
    assert world.code(lease) == "cancelled"
    assert world.answers(request) == [
        ConfirmCancel(session=session, request=request, cancelled=True)
    ]
    world.release(holder)
    assert world.machine.leasing.arbiters[G1].chosen is None


def test_a_cancel_that_comes_after_the_grant_says_so() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    (answer,) = world.answers(world.cancel(lease))
    assert isinstance(answer, ConfirmCancel)
    assert not answer.cancelled
    assert world.held(lease)


def test_a_cancel_of_an_acquire_that_never_was_says_so() -> None:
    world = World()
    session = world.session(A)
    (answer,) = world.answers(world.cancel(LeaseId(f"{session}.99")))
    assert isinstance(answer, ConfirmCancel)
    assert not answer.cancelled


def test_g5_an_acquire_that_runs_out_of_time_leaves_no_trace() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    lease = world.acquire(world.session(B), timeout_s=3.0)
    world.pass_time(2.9)
    assert world.waits(lease)
    world.pass_time(0.1)
    assert world.code(lease) == "timeout"
    assert world.refusals()[0].text == "not granted within 3.0 s"
    world.release(holder)
    assert not world.held(lease)


def test_a_grant_stops_the_clock() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    lease = world.acquire(world.session(B), timeout_s=3.0)
    world.release(holder)
    world.pass_time(100.0)
    assert world.held(lease)


def test_a_time_out_says_what_it_was_waiting_for() -> None:
    world = World()
    lease = world.acquire(world.session(A))
    world.context(A, D1)
    world.release(lease)
    world.verdict = lambda _verb, process: failure(Cause.FREEZE_TIMEOUT, process.id)
    waiter = world.acquire(world.session(B), timeout_s=1.0)
    world.pass_time(1.0)
    assert world.code(waiter) == "timeout"
    assert "simulated freeze_timeout (pid" in world.refusals()[0].text


def test_a_repeated_acquire_does_not_give_itself_more_time() -> None:
    world = World()
    world.acquire(world.session(A))
    session = world.session(B)
    world.acquire(session, request=7, timeout_s=3.0)
    world.pass_time(2.0)
    lease = world.acquire(session, request=7, timeout_s=3.0)
    world.pass_time(1.0)
    assert world.code(lease) == "timeout"


def test_g8_after_a_restart_a_repeated_acquire_gets_its_clock_back() -> None:
    world = World()
    world.acquire(world.session(A))
    lease = world.acquire(world.session(B), timeout_s=3.0)
    world.restart()
    world.pass_time(3.0)
    assert world.code(lease) == "timeout"


# --- confirmations --------------------------------------------------------------------------------


def waited(world: World, session: SessionId) -> LeaseId:
    """Let a session be granted something that it had to wait for."""
    holder = world.acquire(world.session(C))
    lease = world.acquire(session)
    world.pass_time(1.0)
    world.release(holder)
    assert world.held(lease)
    return lease


def test_g5_a_grant_that_had_to_wait_is_handed_back_unless_it_is_confirmed() -> None:
    world = World()
    session = world.session(A)
    world.clients[session].confirms = False
    lease = waited(world, session)
    assert world.grants()[-1].ack_s == LIMITS.ack_s
    world.pass_time(LIMITS.ack_s)
    assert not world.held(lease)
    assert world.all_of(TellLost) == [
        TellLost(session=session, lease=lease, text="its grant was not confirmed within 10.0 s")
    ]


def test_a_confirmed_grant_is_kept() -> None:
    world = World()
    lease = waited(world, world.session(A))
    world.pass_time(1000.0)
    assert world.held(lease)


def test_g5_a_lost_connection_holds_the_clock_for_a_confirmation() -> None:
    world = World()
    session = world.session(A)
    world.clients[session].confirms = False
    lease = waited(world, session)
    world.disconnect(session)
    world.pass_time(LIMITS.grace_s - 1)
    world.reconnect(session)
    world.pass_time(1000.0)
    # It did not ask again, so it had the grant before the connection was lost.
    assert world.held(lease)


def test_g5_who_comes_back_without_its_grant_asks_again_and_must_confirm_it() -> None:
    world = World()
    session = world.session(A)
    client = world.clients[session]
    client.confirms = False
    holder = world.acquire(world.session(C))
    lease = world.acquire(session)
    world.disconnect(session)
    world.pass_time(1.0)
    world.release(holder)
    assert world.held(lease)
    world.reconnect(session)
    assert client.held == {lease: world.grants()[-1].tokens}
    assert world.grants()[-1].ack_s == LIMITS.ack_s
    world.pass_time(LIMITS.ack_s)
    assert client.lost == [lease]


def test_g5_the_clock_for_a_confirmation_of_one_who_is_gone_by_then_does_nothing() -> None:
    limits = dataclasses.replace(LIMITS, grace_s=5.0, ack_s=5.0)
    world = World(limits=limits)
    session = world.session(A)
    world.clients[session].confirms = False
    lease = waited(world, session)
    world.disconnect(session)
    # Both come due in the same instant.
    world.pass_time(5.0)
    assert lease not in world.machine.leasing.leases


def test_g9_the_clock_for_a_confirmation_stands_still_for_a_process_that_we_hold() -> None:
    world = World()
    session = world.session(A)
    pid = world.process_of(session).pid
    lease = world.acquire(session, G2)
    world.context(A, world.groups[1].devices[0], pid=pid)
    world.release(lease)
    assert world.held(world.acquire(world.session(B), G2))
    world.clients[session].confirms = False
    lease = waited(world, session)
    world.pass_time(5 * LIMITS.ack_s)
    assert world.held(lease)


# --- connections and ends -------------------------------------------------------------------------


def test_g8_a_client_that_comes_back_in_time_keeps_its_lease_and_its_place() -> None:
    world = World()
    sessions = [world.session(owner) for owner in (A, B)]
    held, waiting = (world.acquire(session) for session in sessions)
    for session in sessions:
        world.disconnect(session)
    world.pass_time(LIMITS.grace_s - 0.1)
    for session in sessions:
        world.reconnect(session)
    world.pass_time(1000.0)
    assert world.held(held)
    assert world.waits(waiting)


def test_a_client_that_stays_away_loses_what_it_held_and_its_place() -> None:
    world = World()
    first, second, third = (world.session(owner) for owner in (A, B, C))
    world.acquire(first)
    world.acquire(second)
    lease = world.acquire(third)
    for session in (first, second):
        world.disconnect(session)
    world.pass_time(LIMITS.grace_s)
    assert world.held(lease)
    text = "its connection was gone for 10.0 s"
    assert world.all_of(EndSession) == [
        EndSession(session=first, text=text),
        EndSession(session=second, text=text),
    ]


def test_g9_no_clock_runs_against_a_waiter_whose_rank_is_parked() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    world.context(A, D1, pid=world.process_of(session).pid)
    world.release(lease)
    holder = world.acquire(world.session(B))
    again = world.acquire(session)
    world.disconnect(session)
    world.pass_time(100 * LIMITS.grace_s)
    assert world.waits(again)
    world.reconnect(session)
    world.release(holder)
    assert world.held(again)


def test_but_a_holder_that_stays_away_keeps_nobody_waiting() -> None:
    world = World()
    session = world.session(A)
    lease = world.acquire(session)
    rank = world.context(A, D1, pid=world.process_of(session).pid)
    world.release(lease)
    world.acquire(world.session(B))
    assert world.state(rank) is RankState.PARKED
    held = world.acquire(session, G2)
    world.disconnect(session)
    waiter = world.acquire(world.session(C), G2)
    assert world.held(held)
    world.pass_time(LIMITS.grace_s)
    assert world.held(waiter)


def test_a_session_ends_with_its_goodbye_and_whoever_waits_comes_on() -> None:
    world = World()
    session = world.session(A)
    world.acquire(session)
    world.acquire(session, G2)
    waiters = [world.acquire(world.session(owner), group) for owner, group in ((B, G1), (C, G2))]
    effects = world.feed(SessionClosed(session=session))
    assert SessionEndedRecord(session=session) in effects.records
    assert all(world.held(waiter) for waiter in waiters)
    assert not [r for r in world.journal.values() if getattr(r, "session", None) == session]


def test_g3_a_dead_holder_is_fenced_at_once_and_what_it_left_is_moved_off() -> None:
    world = World()
    session = world.session(A)
    world.acquire(session)
    rank = world.context(A, D1)
    waiter = world.acquire(world.session(B))
    world.die(world.process_of(session))
    assert world.held(waiter)
    assert world.state(rank) is RankState.PARKED


def test_g3_a_dead_waiter_is_out_of_the_queue_at_once() -> None:
    world = World()
    holder = world.acquire(world.session(A))
    session = world.session(B)
    world.acquire(session)
    waiter = world.acquire(world.session(C))
    world.die(world.process_of(session))
    world.release(holder)
    assert world.held(waiter)


def test_nothing_is_granted_to_a_session_that_is_ending() -> None:
    world = World()
    session = world.session(A)
    world.acquire(session)
    world.acquire(session)
    granted = len(world.grants())
    world.close(session)
    assert len(world.grants()) == granted
    assert not world.machine.leasing.rounds


def test_all_sessions_of_a_process_end_with_it() -> None:
    world = World()
    sessions = [world.session(A, pid=77) for _ in range(2)]
    world.feed(SessionClosed(session=sessions[0]))
    third = world.session(A, pid=77)
    world.die(ProcessId(77, 1))
    assert [end.session for end in world.all_of(EndSession)] == [sessions[0], sessions[1], third]
    assert not world.machine.leasing.sessions


def test_the_death_of_an_unknown_process_means_nothing() -> None:
    world = World()
    world.die(ProcessId(12345, 1))
    assert world.done == []
