"""What a host may say, and what changes nothing because it may not (G10)."""

from __future__ import annotations

import pytest
from hosts_lab import (
    N1,
    N2,
    N3,
    G,
    Lab,
    ask,
    come_up,
    held,
    hold,
    pair,
    release,
    say,
    session_of,
    states,
)
from simulated import failure, job

from tsliced.core.actions import EndProcesses, TellRankLost
from tsliced.core.coordinator import Place
from tsliced.core.events import (
    AcquireRequested,
    KillRequested,
    PeerSaid,
    ReleaseRequested,
    SessionClosed,
    SessionOpened,
)
from tsliced.core.messages import EndJob, Presence, PresentRank, RankGone
from tsliced.core.model import (
    Cause,
    CoreLimits,
    Counter,
    Goal,
    GroupName,
    HostName,
    ProcessId,
    RankId,
    RankState,
    RequestId,
    SessionId,
    Stamp,
    TenancyKey,
)
from tsliced.core.signals import Order, Report

RUNNING, PARKED = RankState.RUNNING, RankState.PARKED
OTHER = GroupName("other")
A = TenancyKey(job("a"), (G,))
LATE = Stamp(0, Counter(99, 99), 0)


def three() -> Lab:
    """Return hosts of which the third has no part in the group of the first two."""
    return Lab({G: (N1, N2), OTHER: (N3,)})


# --- orders and reports ---------------------------------------------------------------------------


@pytest.mark.parametrize("goal", Goal)
def test_only_the_arbiter_of_a_group_has_anything_moved_there_g10(goal: Goal) -> None:
    lab = three()
    _, ranks = hold(lab, "a")
    for target, source in ((N2, N3), (N1, N2), (N1, N3)):
        order = Order(host=target, tenancy=A, stamp=LATE, goal=goal)
        say(lab, source, target, order)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert lab[N1].machine.tenancies.all[A].coordinator.stamp != LATE
    assert lab[N2].machine.tenancies.all[A].coordinator.stamp != LATE


@pytest.mark.parametrize("goal", [Goal.OFF, Goal.ON, Goal.QUERY])
def test_an_order_for_a_job_with_no_process_here_moves_nothing_and_is_forgotten_g10(
    goal: Goal,
) -> None:
    """A host that booted anew, for example, is only asked what it has of a job."""
    lab = pair()
    _, ranks = hold(lab, "a")
    order = Order(host=N2, tenancy=TenancyKey(job("b"), (G,)), stamp=LATE, goal=goal)
    say(lab, N1, N2, order)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert list(lab[N2].machine.tenancies.all) == [A]


@pytest.mark.parametrize("what", ["group", "host"])
def test_an_order_for_a_group_or_host_that_is_not_here_is_nothing_g10(what: str) -> None:
    lab = pair()
    _, ranks = hold(lab, "a")
    key = TenancyKey(job("a"), (GroupName("nowhere"),)) if what == "group" else A
    host = N2 if what == "group" else HostName("n9")
    say(lab, N1, N2, Order(host=host, tenancy=key, stamp=LATE, goal=Goal.OFF))
    assert states(lab, ranks) == [RUNNING, RUNNING]


def test_an_order_of_an_earlier_epoch_is_refused() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    release(lab, first)
    ask(lab, "b")
    assert states(lab, ranks) == [PARKED, PARKED]
    old = Stamp(0, Counter(0, 1), 0)
    say(lab, N1, N2, Order(host=N2, tenancy=A, stamp=old, goal=Goal.RESTORED))
    assert lab[N2].state(ranks[1]) is PARKED


@pytest.mark.parametrize("source", [N2, N3])
def test_a_host_reports_only_for_itself_and_only_where_it_takes_part_g10(source: HostName) -> None:
    lab = three()
    first, ranks = hold(lab, "a")
    ask(lab, "b")
    lab.by_hand()
    lab[N1].release(first)
    coordinator = lab[N1].machine.tenancies.all[A].coordinator
    assert coordinator.place is Place.FREEZING
    host = N1 if source == N2 else N3
    report = Report(
        host=host, tenancy=A, stamp=coordinator.stamp, failure=failure(Cause.DRIVER), states=()
    )
    lab[N1].feed(PeerSaid(host=source, message=report))
    assert coordinator.place is Place.FREEZING
    gone = TenancyKey(job("gone"), (G,))
    unknown = Report(host=N2, tenancy=gone, stamp=LATE, failure=None, states=())
    lab[N1].feed(PeerSaid(host=N2, message=unknown))
    lab.by_itself()
    assert states(lab, ranks) == [PARKED, PARKED]


# --- presence -------------------------------------------------------------------------------------


def presence(group: GroupName) -> Presence:
    rank = PresentRank(
        process=ProcessId(4711, 1),
        job=job("x"),
        state=RUNNING,
        device_bytes=1,
        groups=(group,),
        lead=N1,
        term=0,
    )
    return Presence(group=group, ranks=(rank,), clients=(job("x"),), shortages=())


def test_a_host_has_nobody_on_groups_that_it_has_no_part_in_g10() -> None:
    lab = three()
    say(lab, N3, N1, presence(G))
    say(lab, N1, N2, presence(G))
    assert not lab[N1].machine.tenancies.abroad
    assert not lab[N2].machine.tenancies.abroad


def test_ranks_of_other_groups_in_a_presence_are_left_out() -> None:
    lab = pair()
    said = presence(GroupName("elsewhere"))
    say(lab, N2, N1, Presence(group=G, ranks=said.ranks, clients=(), shortages=()))
    assert not lab[N1].machine.tenancies.abroad


def test_only_who_leads_a_job_tells_others_of_its_dead_g10() -> None:
    lab = three()
    _, ranks = hold(lab, "a")
    gone = RankGone(job=job("a"), groups=(G,), rank=RankId(N3, ProcessId(1, 1)))
    say(lab, N3, N2, gone)
    say(lab, N3, N1, gone)
    say(lab, N1, N2, RankGone(job=job("a"), groups=(OTHER,), rank=gone.rank))
    say(lab, N1, N2, RankGone(job=job("b"), groups=(G,), rank=gone.rank))
    assert not lab[N2].machine.remains.jobs
    assert not lab[N1].all_of(TellRankLost)
    assert states(lab, ranks) == [RUNNING, RUNNING]


# --- sessions -------------------------------------------------------------------------------------


def test_a_host_speaks_only_for_its_own_clients_g10() -> None:
    lab = three()
    lease = ask(lab, "a", N2)
    session = session_of(lease)
    client = lab[N2].clients[session]
    own = ask(lab, "a", N1)
    for source, of in ((N3, lease), (N2, own), (N3, own)):
        victim = session_of(of)
        for message in (
            SessionOpened(
                session=victim, job=job("x"), process=client.process, secret=b"", groups=(G,)
            ),
            ReleaseRequested(session=victim, request=RequestId(90), lease=of),
            SessionClosed(session=victim),
        ):
            say(lab, source, N1, message)
    assert held(lab, lease, N2)
    assert lab[N1].machine.leasing.sessions[session].job == job("a")
    assert session_of(own) in lab[N1].machine.leasing.sessions


def test_a_request_of_a_session_that_was_not_introduced_leases_nothing() -> None:
    lab = pair()
    request = AcquireRequested(session=SessionId("new"), request=RequestId(1), groups=(G,))
    say(lab, N2, N1, request)
    assert not lab[N1].machine.leasing.leases


def test_an_introduction_that_is_said_again_changes_nothing() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    session = lab[N1].machine.leasing.sessions[session_of(lease)]
    again = SessionOpened(
        session=session.id,
        job=job("x"),
        process=session.process,
        secret=b"",
        groups=(),
    )
    say(lab, N2, N1, again)
    assert lab[N1].machine.leasing.sessions[session.id] is session
    assert session.job == job("a")


# --- the end of jobs ------------------------------------------------------------------------------


def ended(lab: Lab, host: HostName) -> list[ProcessId]:
    """Return who was asked to end on a host."""
    return [process for action in lab[host].all_of(EndProcesses) for process in action.processes]


@pytest.mark.parametrize("by", [N1, N2, N3])
def test_a_job_is_ended_on_all_its_hosts_wherever_that_is_asked_for(by: HostName) -> None:
    lab = three()
    lease, ranks = hold(lab, "a", N3)
    before = len(lab.said)
    lab[by].feed(KillRequested(job=job("a"), by="root", grace_s=5.0))
    lab.run()
    assert ranks[0] in ended(lab, N1)
    assert ranks[1] in ended(lab, N2)
    assert lab[N3].process_of(session_of(lease)) in ended(lab, N3)
    ends = [message for *_, message in lab.said[before:] if isinstance(message, EndJob)]
    assert len(ends) <= 3, "nobody tells it on and on"


def test_a_job_may_be_ended_on_one_host_alone() -> None:
    lab = three()
    _lease, ranks = hold(lab, "a", N3)
    lab[N1].feed(KillRequested(job=job("a"), by="root", grace_s=5.0, onward=False))
    lab.run()
    assert ended(lab, N1) == [ranks[0]]
    assert ended(lab, N2) == ended(lab, N3) == []


def test_a_host_that_has_no_part_in_a_job_ends_nothing_of_it_g10() -> None:
    lab = three()
    hold(lab, "a")
    end = EndJob(job=job("a"), text="ha", grace_s=0.0, onward=True)
    for target in (N1, N2):
        say(lab, N3, target, end)
        assert not ended(lab, target)


def test_a_job_that_is_not_known_is_ended_nowhere() -> None:
    lab = pair()
    say(lab, N1, N2, EndJob(job=job("a"), text="", grace_s=0.0, onward=True))
    assert not ended(lab, N2)


# --- whose clients are where ----------------------------------------------------------------------


@pytest.mark.parametrize("client", [N1, N2])
def test_a_job_with_a_client_on_any_host_is_no_orphan_and_without_one_it_is(
    client: HostName,
) -> None:
    lab = pair()
    session = lab[client].session(job("a"))
    for host in (N1, N2):
        come_up(lab, "a", host)
    lab.pass_time(10.0)
    assert not lab[N1].notes("orphaned")
    lab[client].close(session)
    lab.pass_time(5.0)
    assert lab[N1].notes("orphaned")
    assert not lab[N2].notes("orphaned"), "where it is led from, all its clients are known"
    lab[client].session(job("a"))
    lab.run()
    assert not lab[N1].machine.remains.is_orphaned(job("a"))


def test_a_client_that_asks_through_its_front_makes_a_job_no_orphan_any_more() -> None:
    lab = three()
    for host in (N1, N2):
        come_up(lab, "a", host)
    session = lab[N1].session(job("a"))
    lab[N1].close(session)
    lab.pass_time(5.0)
    assert lab[N1].machine.remains.is_orphaned(job("a"))
    lease = ask(lab, "a", N3)
    assert held(lab, lease, N3)
    assert not lab[N1].machine.remains.is_orphaned(job("a"))


def test_an_orphan_is_ended_on_all_its_hosts() -> None:
    lab = pair(CoreLimits(orphan_s=60.0))
    session = lab[N2].session(job("a"))
    ranks = [come_up(lab, "a", host) for host in (N1, N2)]
    lab[N2].close(session)
    lab.pass_time(65.0, step_s=1.0)
    assert ended(lab, N1)[:1] == ranks[:1]
    assert ended(lab, N2)[:1] == ranks[1:]
