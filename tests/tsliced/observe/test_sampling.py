"""How busy devices are: added up, and written now and then."""

from __future__ import annotations

from collections.abc import Mapping

from in_process import D1, D2, GROUPS

from tsliced.core.model import DeviceId
from tsliced.host.devices import DeviceReading
from tsliced.host.history import Fact
from tsliced.observe.sampling import LONGEST_LOOK_S, Sampler


def reading(uuid: DeviceId, used_bytes: int = 0) -> DeviceReading:
    return DeviceReading(uuid=uuid, total_bytes=100, used_bytes=used_bytes, free_bytes=100)


def looked(
    looks: list[tuple[float, int | None]], *, interval_s: float = 10.0, used_bytes: int = 7
) -> tuple[Sampler, list[dict[str, Fact]]]:
    """Look at the first device at these times, when it is busy by so many per cent."""
    told: list[dict[str, Fact]] = []

    def write(kind: str, level: str, facts: Mapping[str, Fact]) -> None:
        assert (kind, level) == ("busy", "debug")
        told.append(dict(facts))

    sampler = Sampler(write, interval_s=lambda: interval_s)
    for now, busy_pct in looks:
        readings = {D1: reading(D1, used_bytes), D2: reading(D2)}
        sampler.add(readings, {D1: busy_pct, D2: None}, GROUPS, now)
    return sampler, told


def test_each_look_counts_for_the_time_since_the_one_before() -> None:
    sampler, told = looked([(0.0, 100), (1.0, 50), (3.0, 25), (4.0, 0)])
    totals = sampler.totals[D1]
    assert (totals.busy_s, totals.seen_s, totals.used_bytes) == (1.0, 4.0, 7)
    assert sampler.totals[D2].seen_s == 0.0, "nobody knows how busy it is"
    assert told == [
        {"device": D1, "group": "g1", "busy_s": 0.0, "span_s": 0.0, "used_bytes": 7},
        {"device": D2, "group": "g2", "busy_s": 0.0, "span_s": 0.0, "used_bytes": 0},
    ]


def test_events_come_at_intervals_and_add_up() -> None:
    sampler, told = looked([(float(second), 40) for second in range(31)])
    mine = [facts for facts in told if facts["device"] == D1]
    assert [facts["span_s"] for facts in mine] == [0.0, 10.0, 10.0, 10.0]
    assert sum(float(str(facts["busy_s"])) for facts in mine) == sampler.totals[D1].busy_s


def test_nothing_is_told_of_a_device_that_does_nothing() -> None:
    _, told = looked([(float(second), 0) for second in range(31)])
    assert len(told) == 2


def test_a_look_that_comes_late_does_not_count_for_all_of_the_time() -> None:
    sampler, _ = looked([(0.0, 100), (1000.0, 100)])
    assert sampler.totals[D1].busy_s == LONGEST_LOOK_S
