"""Groups over several hosts: who is let on, moved, and told, wherever it is."""

from __future__ import annotations

import pytest
from hosts_lab import (
    N1,
    N2,
    N3,
    G,
    Lab,
    ask,
    assert_alone,
    come_up,
    held,
    hold,
    pair,
    release,
    session_of,
    states,
)
from oracle import Oracle
from simulated import Process, failure, job

from tsliced.core.actions import (
    RunHooks,
    TellContended,
    TellRankLost,
    TellStalled,
)
from tsliced.core.coordinator import Place
from tsliced.core.events import HostMemoryPromised
from tsliced.core.model import (
    Cause,
    GroupName,
    HostName,
    LeaseId,
    RankId,
    RankState,
    Reason,
    TenancyKey,
    Verb,
)

RUNNING, PARKED, FROZEN = RankState.RUNNING, RankState.PARKED, RankState.FROZEN


def fail_once(lab: Lab, host: HostName, verb: Verb, cause: Cause = Cause.DRIVER) -> None:
    """Let the next call of a kind on a host fail."""
    left = [verb]

    def verdict(called: Verb, process: Process) -> Reason | None:
        if called in left:
            left.remove(called)
            rank = RankId(host, process.id)
            return Reason(cause=cause, text=f"simulated {cause.value}", rank=rank)
        return None

    lab[host].verdict = verdict


# --- moves ----------------------------------------------------------------------------------------


def test_a_job_with_ranks_on_two_hosts_leaves_and_comes_back_on_both() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    second = ask(lab, "b", N2)
    assert held(lab, first, N1)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    release(lab, first)
    assert held(lab, second, N2)
    assert states(lab, ranks) == [PARKED, PARKED]
    others = [come_up(lab, "b", host) for host in (N1, N2)]
    again = lab[N1].acquire(session_of(first), G)
    lab.run()
    assert not held(lab, again, N1)
    release(lab, second, N2)
    assert held(lab, again, N1)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert states(lab, others) == [PARKED, PARKED]


def test_a_job_without_a_rank_on_a_host_leaves_nothing_behind_there_g9() -> None:
    lab = pair()
    first = ask(lab, "a")
    rank = come_up(lab, "a", N1)
    second = ask(lab, "b", N1)
    release(lab, first)
    assert held(lab, second, N1)
    assert lab[N1].state(rank) is PARKED
    assert not lab[N2].machine.tenancies.all
    assert not [key for key in lab[N2].journal if key[0] == "tenancy"]


def test_an_arbiter_knows_of_no_client_where_nothing_of_its_job_is_left_g9() -> None:
    lab = pair()
    first = ask(lab, "a")
    come_up(lab, "a", N1)
    ask(lab, "b")
    lab.by_hand()
    lab[N1].release(first)
    while not lab[N2].pending:
        lab.step()
    # It comes while its host looks whether there is anything of its job that has to leave.
    session = lab[N2].session(job("a"))
    lab.by_itself()
    lab[N2].close(session)
    lab.run()
    assert not any(lab[N1].machine.remains.clients_abroad.values())


def test_a_driver_on_a_host_outside_of_the_group_gets_it_for_ranks_elsewhere() -> None:
    lab = Lab({G: (N1, N2), GroupName("other"): (N3,)})
    first, ranks = hold(lab, "a", N3)
    second = ask(lab, "b", N3)
    assert not held(lab, second, N3)
    release(lab, first, N3)
    assert held(lab, second, N3)
    assert states(lab, ranks) == [PARKED, PARKED]
    assert not lab[N3].machine.tenancies.all


@pytest.mark.parametrize("host", [N1, N2])
@pytest.mark.parametrize("verb", [Verb.FREEZE, Verb.SNAPSHOT])
def test_what_cannot_leave_on_one_host_is_turned_back_on_all_and_the_waiter_keeps_its_place_g1(
    host: HostName, verb: Verb
) -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    second, third = ask(lab, "b", N2), ask(lab, "c", N1)
    fail_once(lab, host, verb)
    release(lab, first)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert not held(lab, second, N2)
    assert lab[N2].all_of(TellStalled)[-1].reason.rank is not None
    lab.pass_time(5.0)
    assert held(lab, second, N2)
    assert states(lab, ranks) == [PARKED, PARKED]
    release(lab, second, N2)
    assert held(lab, third, N1)


def test_what_cannot_come_back_on_one_host_is_withdrawn_from_all() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    release(lab, first)
    second = ask(lab, "b", N2)
    again = lab[N1].acquire(session_of(first), G)
    fail_once(lab, N2, Verb.RESTORE)
    release(lab, second, N2)
    assert states(lab, ranks) == [PARKED, PARKED]
    assert lab[N1].code(again) == "refused"


def test_a_thaw_that_fails_on_one_host_is_tried_again_until_all_run() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    release(lab, first)
    second = ask(lab, "b", N2)
    again = lab[N1].acquire(session_of(first), G)
    fail_once(lab, N2, Verb.THAW)
    release(lab, second, N2)
    assert states(lab, ranks) == [RUNNING, FROZEN]
    assert not held(lab, again, N1)
    lab.pass_time(5.0)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert held(lab, again, N1)


def test_a_rank_that_breaks_on_one_host_blocks_a_move_whose_calls_elsewhere_go_on_g11() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    second = ask(lab, "b", N2)
    release(lab, first)
    again = lab[N1].acquire(session_of(first), G)
    lab.run()
    lab[N1].auto = False
    fail_once(lab, N2, Verb.RESTORE, Cause.FAILED)
    release(lab, second, N2)
    for _ in range(3):
        # What b has on the first host leaves; what of a comes back there is still to be looked for.
        lab[N1].finish()
        lab.run()
    tenancy = lab[N1].machine.tenancies.all[TenancyKey(job("a"), (G,))]
    assert tenancy.coordinator.place is Place.BLOCKED
    assert tenancy.participant.busy
    lab[N1].auto = True
    lab.run()
    assert lab[N1].code(again) == "blocked"
    assert states(lab, ranks) == [PARKED, RankState.FAILED]
    lab[N2].die(ranks[1])
    lab.run()
    after = lab[N1].acquire(session_of(first), G)
    lab.run()
    assert held(lab, after, N1)
    assert lab[N1].state(ranks[0]) is RUNNING


def test_a_rank_that_comes_up_on_the_other_host_while_its_job_leaves_leaves_too_g1() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    second = ask(lab, "b", N2)
    lab.by_hand()
    release(lab, first)
    while FROZEN not in states(lab, ranks):
        lab.step()
    late = lab[N2].context(job("a"), *lab[N2].groups[0].devices)
    lab.by_itself()
    assert lab[N2].state(late) is PARKED
    assert held(lab, second, N2)


def test_a_rank_on_another_host_alone_keeps_others_out_until_it_is_off_g1() -> None:
    lab = pair()
    rank = come_up(lab, "a", N2)
    lease = ask(lab, "b", N1)
    assert held(lab, lease, N1)
    assert lab[N2].state(rank) is PARKED


def test_the_clients_of_a_job_on_both_hosts_are_one_round() -> None:
    lab = pair()
    sessions = [(host, lab[host].session(job("a"))) for host in (N1, N2)]
    leases: list[tuple[HostName, LeaseId]] = []
    for host, session in sessions:
        assert not any(held(lab, lease, at) for at, lease in leases)
        leases.append((host, lab[host].acquire(session, G, ranks=2)))
        lab.run()
    assert all(held(lab, lease, host) for host, lease in leases)
    other = ask(lab, "b", N2)
    release(lab, leases[0][1], N1)
    assert not held(lab, other, N2)
    release(lab, leases[1][1], N2)
    assert held(lab, other, N2)
    assert_alone(lab)


def test_callbacks_of_a_client_are_called_on_its_own_host() -> None:
    lab = pair()
    session = lab[N2].session(job("a"), hooks=True)
    lease = lab[N2].acquire(session, G)
    lab.run()
    for host in (N1, N2):
        come_up(lab, "a", host)
    ask(lab, "b", N1)
    release(lab, lease, N2)
    assert [run.quiesce for run in lab[N2].ended(RunHooks)] == [True]
    assert not lab[N1].ended(RunHooks)


# --- what is told ---------------------------------------------------------------------------------


def test_a_holder_is_told_by_its_front_that_others_wait() -> None:
    lab = pair()
    lease = ask(lab, "a", N2)
    ask(lab, "b", N1)
    told = lab[N2].all_of(TellContended)[-1]
    assert (told.lease, told.waiters) == (lease, 1)


@pytest.mark.parametrize("client", [N1, N2])
@pytest.mark.parametrize("dead", [N1, N2])
def test_a_job_is_told_of_a_dead_rank_wherever_it_was(client: HostName, dead: HostName) -> None:
    lab = pair()
    lease, ranks = hold(lab, "a", client)
    gone = ranks[0] if dead == N1 else ranks[1]
    lab[dead].die(gone)
    lab.run()
    told = lab[client].all_of(TellRankLost)[-1]
    assert (told.lease, told.pid) == (lease, gone.pid)
    assert (f"on {dead}" in told.text) == (dead != N1), "as the arbiter, n1, says it"


def test_those_that_a_dead_rank_leaves_on_other_hosts_are_known_as_survivors() -> None:
    lab = pair()
    _, ranks = hold(lab, "a")
    lab[N1].die(ranks[0])
    lab.run()
    assert list(lab[N2].machine.remains.jobs[job("a")].survivors) == [ranks[1]]
    assert lab[N2].notes("rank_lost")[-1].facts["host"] == N1
    lab[N2].die(ranks[1])
    lab.run()
    assert not lab[N2].machine.remains.jobs
    assert not lab[N1].machine.tenancies.abroad


# --- memory ---------------------------------------------------------------------------------------


def promise(lab: Lab, name: str, failed: Reason | None) -> None:
    """Let the second host know whether a job could be parked there."""
    key = TenancyKey(job(name), (G,))
    lab[N2].feed(HostMemoryPromised(tenancy=key, failure=failed))
    lab.run()


def test_a_job_that_could_not_be_parked_on_another_host_is_refused_until_it_could() -> None:
    lab = pair()
    first, _ = hold(lab, "a")
    release(lab, first)
    promise(lab, "a", failure(Cause.NO_HOST_MEMORY))
    again = lab[N1].acquire(session_of(first), G)
    lab.run()
    assert lab[N1].code(again) == "no_host_memory"
    promise(lab, "a", None)
    again = lab[N1].acquire(session_of(first), G)
    lab.run()
    assert held(lab, again, N1)


def test_a_job_given_up_on_for_memory_of_another_host_leaves_when_there_is_some() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    second = ask(lab, "b")
    promise(lab, "a", failure(Cause.NO_HOST_MEMORY))
    lab[N2].host_memory = lambda _action: failure(Cause.NO_HOST_MEMORY)
    release(lab, first)
    lab.pass_time(30.0)
    assert states(lab, ranks) == [RUNNING, RUNNING]
    assert lab[N1].notes("pinned")
    lab[N2].host_memory = lambda _action: None
    promise(lab, "a", None)
    assert held(lab, second, N1)
    assert states(lab, ranks) == [PARKED, PARKED]


# --- who is who -----------------------------------------------------------


def test_a_process_that_turns_out_to_be_of_another_job_is_of_that_job_everywhere() -> None:
    lab = pair()
    for world in lab.worlds.values():
        world.freeze_strangers = world.machine.tenancies.freeze = True
    pid = 4711
    lab[N2].context(None, *lab[N2].groups[0].devices, pid=pid)
    lab[N2].look()
    lab.run()
    assert {key.job.id for key in lab[N1].machine.tenancies.abroad.values()} == {"stranger-4711-n2"}
    lab[N2].session(job("a"), pid=pid)
    lab.run()
    assert {key.job for key in lab[N1].machine.tenancies.abroad.values()} == {job("a")}


def test_an_operation_that_ends_after_its_process_is_told_as_the_end_of_a_rank() -> None:
    lab = pair()
    first, ranks = hold(lab, "a")
    second = ask(lab, "b", N2)
    lab.by_hand()
    release(lab, first)
    while not any(getattr(a, "verb", None) is Verb.FREEZE for a in lab[N2].pending):
        lab.step()
    lab[N2].die(ranks[1])
    assert ranks[1] in lab[N2].machine.tenancies.home, "its call has not come back"
    lab.by_itself()
    assert not lab[N1].machine.tenancies.abroad
    assert held(lab, second, N2)
    assert lab[N1].state(ranks[0]) is PARKED


@pytest.mark.parametrize("client", [N1, N2])
def test_of_jobs_that_are_gone_nothing_is_left_on_any_host_g9(client: HostName) -> None:
    lab = pair()
    first, ranks = hold(lab, "a", client)
    second = ask(lab, "b", N2)
    release(lab, first, client)
    release(lab, second, N2)
    for host, rank in zip((N1, N2), ranks, strict=True):
        lab[host].die(rank)
    lab[client].close(session_of(first))
    lab[N2].close(session_of(second))
    lab.pass_time(1000.0, step_s=100.0)
    for world in lab.worlds.values():
        Oracle(world=world).judge_empty()
