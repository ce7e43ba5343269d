"""What the core says, as the client library reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from libtimeslice.errors import error_from
from libtimeslice.protocol import FrameReader, Message, encode
from libtimeslice.session import Ask, Session
from tsliced.core import sessions as core_sessions
from tsliced.core.actions import (
    ClientAction,
    ConfirmCancel,
    ConfirmRelease,
    EndSession,
    Grant,
    Refuse,
    TellContended,
    TellLost,
    TellRankLost,
    TellStalled,
)
from tsliced.core.fronting import ForeignLease
from tsliced.core.model import (
    Arrival,
    Cause,
    Counter,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RankId,
    Reason,
    RequestId,
    RoundId,
    SessionId,
)
from tsliced.net.replies import MESSAGES, held_leases, job_message

SESSION, LEASE = SessionId("s"), LeaseId("s.1")
G1, G2 = GroupName("g1"), GroupName("g2")
JOB = JobKey("west", 1000, "a")
GRANT = Grant(
    session=SESSION,
    request=RequestId(1),
    lease=LEASE,
    tokens=((G1, Counter(3, 7)), (G2, Counter(3, 8))),
    waited_s=1.5,
    restored=True,
    switch_s=0.5,
    contended=True,
    ack_s=10.0,
)


def sent(action: ClientAction) -> Message:
    """Return what a client reads for an action of the core."""
    (message,) = FrameReader().feed(encode(MESSAGES[type(action)](action)))
    return message


def test_every_action_for_clients_has_a_message_but_the_end_of_a_session() -> None:
    assert {*MESSAGES, EndSession} == set(get_args(ClientAction))


def test_a_grant_becomes_a_lease_in_the_client() -> None:
    message = sent(GRANT)
    assert message["re"] == 1
    lease = Session().granted(Ask(), 1, message, holder=object())
    assert lease.lease == "s.1"
    assert lease.groups == ("g1", "g2")
    assert lease.tokens == {"g1": 3 << 32 | 7, "g2": 3 << 32 | 8}
    assert (lease.waited_s, lease.restored, lease.switch_s) == (1.5, True, 0.5)
    assert (lease.waiters, lease.ack_s) == (1, 10.0)


def test_tokens_of_a_new_generation_are_higher_than_all_before_g2() -> None:
    older = sent(replace(GRANT, tokens=((G1, Counter(3, (1 << 32) - 1)),)))
    newer = sent(replace(GRANT, tokens=((G1, Counter(4, 0)),)))
    assert newer["tokens"]["g1"] > older["tokens"]["g1"]


def test_a_refusal_carries_its_code_and_reason() -> None:
    refused = Refuse(session=SESSION, request=RequestId(4), code="pinned", text="it cannot move")
    message = sent(refused)
    assert message["re"] == 4
    error = error_from(message["err"])
    assert (error.code, error.message) == ("pinned", "it cannot move")


@pytest.mark.parametrize("waiters", [0, 2])
def test_releases_and_cancels_are_confirmed(waiters: int) -> None:
    released = ConfirmRelease(
        session=SESSION, request=RequestId(2), waiters=waiters, deferred=not waiters
    )
    assert sent(released) == {"re": 2, "waiters": waiters, "deferred": waiters == 0}
    cancelled = ConfirmCancel(session=SESSION, request=RequestId(3), cancelled=True)
    assert sent(cancelled) == {"re": 3, "cancelled": True}


def test_news_of_a_lease_names_it() -> None:
    contended = TellContended(session=SESSION, lease=LEASE, groups=(G1,), waiters=2)
    assert sent(contended) == {"t": "contended", "lease": "s.1", "groups": ["g1"], "waiters": 2}
    lost = TellLost(session=SESSION, lease=LEASE, text="not confirmed")
    assert sent(lost) == {"t": "lost", "lease": "s.1", "reason": "not confirmed"}
    rank = TellRankLost(session=SESSION, lease=LEASE, pid=12, text="rank 12 ended")
    assert sent(rank) == {"t": "rank_lost", "lease": "s.1", "pid": 12, "reason": "rank 12 ended"}


def test_who_waits_is_told_who_is_in_the_way_and_why() -> None:
    rank = RankId(HostName("n1"), ProcessId(12, 1))
    reason = Reason(cause=Cause.UNSUPPORTED, text="managed memory", rank=rank)
    message = sent(TellStalled(session=SESSION, lease=LEASE, job=JOB, reason=reason))
    assert message == {
        "t": "stalled",
        "lease": "s.1",
        "job": {"cluster": "west", "uid": 1000, "id": "a"},
        "cause": "unsupported",
        "reason": "managed memory (pid 12 on n1)",
    }


def test_a_job_is_told_by_its_whole_key() -> None:
    assert job_message(JOB) == {"cluster": "west", "uid": 1000, "id": "a"}


def test_a_client_that_comes_back_is_told_what_it_holds_here_and_elsewhere_g8() -> None:
    """One that only waits is not listed."""
    group = GroupName("far")
    session = core_sessions.Session(
        id=SESSION,
        job=JobKey("", 1000, "a"),
        process=ProcessId(1, 1),
        secret=b"",
        groups=(group,),
    )
    for number, tokens in ((1, ((GroupName("near"), Counter(1, 2)),)), (2, ())):
        session.leases[RequestId(number)] = core_sessions.Lease(
            id=LeaseId(f"s.{number}"),
            session=SESSION,
            request=RequestId(number),
            round=RoundId(1),
            groups=(GroupName("near"),),
            phase="",
            ranks=1,
            arrival=Arrival.ALL,
            asked_at=0.0,
            state=core_sessions.LeaseState.HELD if tokens else core_sessions.LeaseState.WAITING,
            tokens=tokens,
        )
    far = ForeignLease(
        id=LeaseId("s.3"),
        session=SESSION,
        request=RequestId(3),
        arbiter=HostName("n2"),
        tokens=((group, Counter(1, 3)),),
    )
    assert held_leases(session, [far]) == [
        {"lease": "s.1", "groups": ["near"], "tokens": {"near": Counter(1, 2).as_int()}},
        {"lease": "s.3", "groups": ["far"], "tokens": {"far": Counter(1, 3).as_int()}},
    ]
