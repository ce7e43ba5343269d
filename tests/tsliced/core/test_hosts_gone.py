"""An operator's word that a host is dead: whom it reaches, and how long it stands."""

from __future__ import annotations

from hosts_lab import N1, N2, N3, G, Lab, ask, come_up, held, pair, release

from tsliced.core.actions import Effects, HostRecord
from tsliced.core.events import HostDied, PeerSaid
from tsliced.core.messages import HostGone
from tsliced.core.model import GroupName, HostName

N4 = HostName("n4")


def three() -> Lab:
    """Return three hosts that share a group."""
    return Lab({G: (N1, N2, N3)})


def declare(lab: Lab, dead: HostName, at: HostName) -> None:
    """Let an operator say at one host that another one is dead."""
    lab[at].feed(HostDied(host=dead, by="root"))
    lab.run()


def dead_for(lab: Lab, host: HostName) -> dict[HostName, str]:
    """Return whom a host takes to be dead, and on whose word."""
    return dict(lab[host].machine.hosts.links.dead)


def forget(lab: Lab, other: HostName, at: HostName) -> None:
    """Let a host be as if another one had never been there."""
    links = lab[at].machine.hosts.links
    del links.boots[other], links.incarnations[other]


def test_the_word_reaches_all_hosts_and_nobody_waits_for_the_dead_one() -> None:
    lab = three()
    lease = ask(lab, "a", N3)
    come_up(lab, "a", N2)
    lab.isolate(N3, lost=True)
    waiter = ask(lab, "b", N2)
    declare(lab, N3, N2)
    assert dead_for(lab, N1) == dead_for(lab, N2) == {N3: "root at n2"}
    assert "n3 is gone, says root at n2" in str(lab[N1].notes("host_died")[0].facts["reason"])
    assert lease not in lab[N1].machine.leasing.leases
    assert held(lab, waiter, N2)


def test_the_word_reaches_hosts_that_have_no_link_with_the_one_where_it_was_said() -> None:
    groups: dict[GroupName, tuple[HostName, ...]] = {
        GroupName("g"): (N1, N2),
        GroupName("h"): (N2, N3),
        GroupName("i"): (N3, N4),
    }
    lab = Lab(groups)
    lab.disconnect(N1, N3)
    lab.isolate(N4, lost=True)
    declare(lab, N4, N1)
    assert dead_for(lab, N3) == {N4: "root at n1"}


def test_the_word_outlives_a_restart() -> None:
    lab = three()
    lab.isolate(N3, lost=True)
    declare(lab, N3, N1)
    lab.restart(N1, links=False)
    lab.connect(N1, N2)
    lab.run()
    assert dead_for(lab, N1) == {N3: "root at n1"}
    assert held(lab, ask(lab, "a"), N1)


def test_after_a_restart_nobody_waits_for_a_host_that_is_dead() -> None:
    lab = pair()
    lab.isolate(N2, lost=True)
    declare(lab, N2, N1)
    first = ask(lab, "a")
    rank = come_up(lab, "a", N1)
    second = ask(lab, "b")
    lab.restart(N1, links=False)
    assert held(lab, first, N1)
    release(lab, first)
    assert held(lab, second, N1)
    assert lab[N1].state(rank).value == "parked"


def test_a_host_that_was_away_is_told_when_it_is_back() -> None:
    lab = three()
    lab.isolate(N3, lost=True)
    lab.disconnect(N1, N2)
    declare(lab, N3, N1)
    assert dead_for(lab, N2) == {}
    lab.connect(N1, N2)
    lab.run()
    assert dead_for(lab, N2) == {N3: "root at n1"}


def test_a_host_that_has_never_seen_the_dead_one_takes_the_word() -> None:
    lab = three()
    lab.isolate(N3, lost=True)
    lab.disconnect(N1, N2)
    declare(lab, N3, N1)
    forget(lab, N3, N2)
    lab.connect(N1, N2)
    lab.run()
    assert dead_for(lab, N2) == {N3: "root at n1"}


def test_an_old_word_about_a_host_that_has_been_back_since_is_not_taken() -> None:
    lab = three()
    lab.isolate(N3, lost=True)
    lab.disconnect(N1, N2)
    declare(lab, N3, N1)
    lab.restart(N3, links=False)
    lab.connect(N2, N3)
    lab.run()
    lab.disconnect(N2, N3, lost=True)
    lab.connect(N1, N2)
    lab.run()
    assert dead_for(lab, N2) == {}
    (note,) = lab[N2].notes("host_alive")
    assert (
        note.facts["reason"] == "root at n1 said at n1 that it is gone, but it has been back since"
    )


def test_what_is_connected_is_not_dead_whoever_says_so() -> None:
    lab = three()
    lab.disconnect(N1, N3, lost=True)
    declare(lab, N3, N1)
    assert dead_for(lab, N1) == {N3: "root at n1"}
    assert dead_for(lab, N2) == {}
    assert [note.facts["host"] for note in lab[N2].notes("host_alive")] == [N3]
    # And the host itself knows best.
    lab.connect(N1, N3)
    lab.run()
    assert dead_for(lab, N1) == {}


def test_an_old_word_about_a_host_that_is_connected_means_nothing() -> None:
    lab = three()
    lab.isolate(N3, lost=True)
    lab.disconnect(N1, N2)
    declare(lab, N3, N1)
    lab.restart(N3, links=False)
    lab.connect(N2, N3)
    lab.connect(N1, N2)
    lab.run()
    assert dead_for(lab, N2) == {}
    assert lab[N2].notes("host_alive") == []


def test_a_host_hears_that_it_is_taken_for_dead_elsewhere() -> None:
    lab = three()
    word = HostGone(host=N3, by="root at n1", incarnation=None)
    lab[N3].feed(PeerSaid(host=N1, message=word))
    assert [note.facts["host"] for note in lab[N3].notes("host_alive")] == [N3]


def test_to_say_it_again_changes_nothing() -> None:
    lab = three()
    lab.isolate(N3, lost=True)
    declare(lab, N3, N1)
    assert lab[N1].feed(HostDied(host=N3, by="somebody")) == Effects()


def test_the_word_is_over_when_the_host_is_back() -> None:
    lab = three()
    lab.isolate(N3, lost=True)
    declare(lab, N3, N1)
    lab.connect(N2, N3)
    lab.connect(N1, N3)
    lab.run()
    assert dead_for(lab, N1) == dead_for(lab, N2) == {}
    record = lab[N1].journal["host", N3]
    assert isinstance(record, HostRecord)
    assert record.dead_by is None
    begun = len(lab.said)
    lab.disconnect(N1, N2)
    lab.connect(N1, N2)
    lab.run()
    assert HostGone not in {type(message) for _, _, message in lab.said[begun:]}


def test_a_host_that_was_never_there_can_be_declared_dead() -> None:
    lab = three()
    lab.isolate(N3)
    for host in (N1, N2):
        forget(lab, N3, host)
    declare(lab, N3, N1)
    record = lab[N1].journal["host", N3]
    assert record == HostRecord(host=N3, boot="", incarnation="", dead_by="root at n1")
    assert held(lab, ask(lab, "a"), N1)
    lab.restart(N1, links=False)
    assert dead_for(lab, N1) == {N3: "root at n1"}
