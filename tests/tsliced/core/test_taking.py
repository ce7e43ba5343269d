"""What a host takes that others have ceded to it."""

from __future__ import annotations

from arbiters_lab import A, B, ask, come_up, key, leads
from hosts_lab import N1, N2, Lab
from simulated import job

from tsliced.core.events import PeerSaid
from tsliced.core.messages import Ceded, CededTenancy, HandOver
from tsliced.core.model import Counter, RoundId, Stamp


def test_what_a_host_moves_beside_it_by_later_orders_does_not_keep_it_from_taking_the_rest() -> (
    None
):
    lab = Lab({A: (N1,), B: (N2, N1)})
    ask(lab, "a", N2, B)
    come_up(lab, "a", B, host=N1)
    ask(lab, "a", N1, A)
    come_up(lab, "a", A)
    assert leads(lab, N1) == {(A,): N1, (B,): N2}
    lab[N1].machine.tenancies.all[key(A)].coordinator.exceed(99)
    stamp = Stamp(5, Counter(0, 0), 0)
    part = CededTenancy(tenancy=key(A, B), stamp=stamp, on=True, pinned=None, ranks=())
    lab.by_hand()
    for message in (
        HandOver(tenancy=part.tenancy, stamp=stamp, to=N1),
        Ceded(round=RoundId(99), job=job("a"), tenancies=(part,)),
    ):
        lab[N1].feed(PeerSaid(host=N2, message=message))
    assert leads(lab, N1) == {(A, B): N1}
