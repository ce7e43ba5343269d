"""The client's books, without any I/O."""

from __future__ import annotations

from typing import Any

import pytest

from libtimeslice.errors import ProtocolError
from libtimeslice.session import Ask, LeaseState, Session

ASK = Ask(groups=("n1",))


def welcome(session: str = "s1", *, resumed: bool = False, leases: tuple[str, ...] = ()) -> Any:
    return {
        "t": "welcome",
        "session": session,
        "secret": b"x",
        "resumed": resumed,
        "grace_s": 7.0,
        "host": "h",
        "job": {"id": "j"},
        "groups": ["n1", "n2"],
        "leases": [{"lease": lease} for lease in leases],
    }


def answer(lease: str = "l1", *groups: str, **fields: Any) -> dict[str, Any]:
    named = list(groups or ("n1",))
    return {"re": 1, "lease": lease, "groups": named, "tokens": dict.fromkeys(named, 5), **fields}


def connected() -> Session:
    session = Session()
    assert session.welcomed(welcome()) == ()
    return session


def test_a_resumed_session_keeps_the_leases_that_the_daemon_lists_and_loses_the_others() -> None:
    session = connected()
    kept = session.granted(ASK, 1, answer("l1"), "holder")
    gone = session.granted(ASK, 2, answer("l2", "n2"), "holder")
    session.disconnected(now=10.0)
    assert kept.state is gone.state is LeaseState.UNCERTAIN
    assert session.give_up_at == 17.0
    assert session.welcomed(welcome(resumed=True, leases=("l1",))) == (gone,)
    assert (kept.state, gone.state) == (LeaseState.HELD, LeaseState.LOST)
    assert gone.reason == "it ended while the connection was down"
    assert session.give_up_at is None


def test_a_new_session_has_none_of_the_old_leases_and_questions() -> None:
    session = connected()
    grant = session.granted(ASK, 1, answer(), "holder")
    session.release(session.granted(ASK, 2, answer("l2"), "holder"))
    session.disconnected(now=10.0)
    assert session.unsettled
    assert session.welcomed(welcome("s2")) == (grant,)
    assert grant.reason == "the daemon lost the session"
    assert session.resend() == []


def test_the_instant_of_the_first_loss_counts() -> None:
    session = connected()
    session.disconnected(now=10.0)
    session.disconnected(now=12.0)
    assert session.give_up_at == 17.0


def test_a_session_that_never_was_is_not_resumed() -> None:
    session = Session()
    session.disconnected(now=10.0)
    assert session.give_up_at is None
    hello = session.hello(client="c", role="client", job=None, caps=(), ranks=None)
    assert (hello["session"], hello["secret"]) == (None, None)


def test_what_was_said_of_a_lease_before_its_grant_was_looked_at_is_not_forgotten() -> None:
    session = connected()
    session.receive({"t": "contended", "lease": "l1", "groups": ["n1"], "waiters": 3})
    assert session.granted(ASK, 1, answer("l1"), "holder").waiters == 3
    session.receive({"t": "lost", "lease": "l2", "reason": "operator"})
    lost = session.granted(ASK, 2, answer("l2"), "holder")
    assert (lost.state, lost.reason) == (LeaseState.LOST, "operator")
    assert list(session.grants) == ["l1"]


def test_early_notices_are_bounded() -> None:
    session = connected()
    for number in range(1000):
        session.receive({"t": "contended", "lease": f"l{number}", "waiters": 1})
    assert session.granted(ASK, 1, answer("l0"), "holder").waiters == 0
    assert session.granted(ASK, 2, answer("l999"), "holder").waiters == 1
    assert len(session._early) <= 64


def test_a_grant_that_crosses_a_cancel_is_released() -> None:
    session = connected()
    acquire = ASK.message(next(session.ids))
    cancel = session.abandon(acquire)
    assert (cancel["t"], cancel["acquire"]) == ("cancel", 1)
    assert [message["t"] for message in session.resend()] == ["cancel", "acquire", "cancel"]
    (release,) = session.receive(answer("l1")).send
    assert (release["t"], release["lease"]) == ("release", "l1")
    assert session.resend() == [release]
    assert session.receive({"re": release["id"], "waiters": 0}).send == ()
    assert session.resend() == []


def test_a_cancelled_acquire_is_settled() -> None:
    session = connected()
    session.abandon(ASK.message(next(session.ids)))
    assert session.receive({"re": 1, "err": {"code": "cancelled", "message": "m"}}).send == ()
    assert session.resend() == []


def test_a_request_that_no_client_answers_is_refused_and_a_notice_ignored() -> None:
    session = connected()
    (refusal,) = session.receive({"t": "quiesce", "id": 4, "groups": []}).send
    assert (refusal["re"], refusal["err"]["code"]) == (4, "unknown_request")
    assert session.receive({"t": "weather", "sunny": True}).send == ()
    assert session.receive({"re": 99}).send == ()


def test_groups_are_covered_by_one_or_several_grants_or_not_at_all() -> None:
    session = connected()
    assert session.covering(("n1",)) == ()
    first = session.granted(ASK, 1, answer("l1", "n1"), "holder")
    assert session.covering(("n1",)) == (first,)
    assert session.covering(("n1", "n2")) == ()
    assert session.covering(None) == ()
    second = session.granted(ASK, 2, answer("l2", "n2"), "holder")
    assert session.covering(("n2", "n1")) == (first, second)
    assert session.covering(None) == (first, second)
    session.release(first)
    assert session.covering(("n1",)) == ()


def test_a_wider_question_in_flight_is_worth_waiting_for() -> None:
    session = connected()
    assert not session.is_asking(("n1",))
    session.asking["a"] = ("n1", "n2")
    assert session.is_asking(("n1",))
    assert session.is_asking(None)
    assert not session.is_asking(("n1", "n3"))
    session.asking["a"] = None
    assert session.is_asking(("n3",))


def test_releasing_twice_sends_one_request() -> None:
    session = connected()
    grant = session.granted(ASK, 1, answer(), "holder")
    assert session.release(grant) is not None
    assert session.release(grant) is None
    assert grant.state is LeaseState.RELEASED


def test_a_grant_without_lease_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        connected().granted(ASK, 1, {"re": 1, "lease": "l", "groups": None}, "holder")
