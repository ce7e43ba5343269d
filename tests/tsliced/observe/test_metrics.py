"""The page of metrics: its parts, and what it knows of the time before it began."""

from __future__ import annotations

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from tsliced.observe.accounts import Spread
from tsliced.observe.metrics import CHUNK, _histogram, _Only, _rendered


def test_a_large_family_comes_in_parts_that_make_the_whole() -> None:
    family = GaugeMetricFamily("tsliced_job_step", "Its step.", labels=["job"])
    for number in range(2 * CHUNK + 7):
        family.add_metric([f'odd "{number}"\n\\'], number)
    parts = list(_rendered(family))
    assert len(parts) == 3
    assert b"".join(parts) == generate_latest(_Only(family))
    assert max(part.count(b"\n") for part in parts) == CHUNK + 2


def test_a_family_without_samples_is_named_all_the_same() -> None:
    (part,) = _rendered(GaugeMetricFamily("tsliced_x", "Nothing.", labels=["job"]))
    assert part == b"# HELP tsliced_x Nothing.\n# TYPE tsliced_x gauge\n"


def test_a_histogram_counts_what_is_up_to_each_bound() -> None:
    spread = Spread((1.0, 2.0))
    for seconds, times in ((0.5, 1), (1.0, 1), (1.5, 3), (9.0, 2)):
        spread.add(seconds, times)
    text = b"".join(_rendered(_histogram("tsliced_x", "X.", [(["g"], spread)], "group")))
    assert text.decode().splitlines()[2:] == [
        'tsliced_x_bucket{group="g",le="1.0"} 2.0',
        'tsliced_x_bucket{group="g",le="2.0"} 5.0',
        'tsliced_x_bucket{group="g",le="+Inf"} 7.0',
        'tsliced_x_count{group="g"} 7.0',
        'tsliced_x_sum{group="g"} 24.0',
    ]
