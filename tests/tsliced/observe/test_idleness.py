"""What samples of a job come to, and what sharing could give, by hand."""

from __future__ import annotations

import pytest

from tsliced.observe.idleness import (
    FIXED_SWITCH_S,
    IN_BYTES_PER_S,
    OUT_BYTES_PER_S,
    Bin,
    Idleness,
    Sample,
    Window,
    estimate_gain,
    estimate_switch,
    look_through,
)

GIB = 1 << 30


def seen(*spans: tuple[float, float], used_bytes: int = GIB) -> Idleness:
    """Look at one device that is busy by so many per cent for so many seconds, and so on."""
    samples = [Sample(at=0.0, busy_pct={"0": 0.0}, used_bytes={"0": 0})]
    for pct, seconds in spans:
        for _ in range(round(seconds * 4)):
            at = samples[-1].at + 0.25
            samples.append(Sample(at=at, busy_pct={"0": pct}, used_bytes={"0": used_bytes}))
    return look_through(samples)


def steps(count: int, *, busy_s: float, idle_s: float) -> Idleness:
    """Look at a job that is busy and then idle, over and over."""
    return seen(*[(100.0, busy_s), (0.0, idle_s)] * count)


def test_windows_are_samples_in_a_row_that_are_busy_or_idle() -> None:
    found = seen((0.0, 2.0), (80.0, 3.0), (4.0, 5.0))
    assert found.windows == (
        Window(idle=True, seconds=2.0),
        Window(idle=False, seconds=3.0),
        Window(idle=True, seconds=5.0),
    )
    assert (found.seconds, found.samples, found.busy_share) == (10.0, 41, 0.3)
    assert found.kernel_share == pytest.approx((0.8 * 3 + 0.04 * 5) / 10)
    assert (found.idle_s, found.median_idle_s) == ([2.0, 5.0], 3.5)
    assert found.peak_bytes == {"0": GIB}


def test_a_job_is_idle_when_all_of_its_devices_are() -> None:
    samples = [
        Sample(at=float(at), busy_pct={"0": zero, "1": one}, used_bytes={"0": 1, "1": 5 - at})
        for at, (zero, one) in enumerate([(0, 0), (0, 90), (90, 0), (0, 0)])
    ]
    found = look_through(samples)
    assert found.busy_share == pytest.approx(2 / 3)
    assert found.kernel_share_of == pytest.approx({"0": 0.3, "1": 0.3})
    assert found.peak_bytes == {"0": 1, "1": 4}, "of what came after the first look"


def test_the_histogram_has_each_idle_window_once() -> None:
    found = seen((0, 0.5), (9, 1), (0, 1), (9, 1), (0, 2.5), (9, 1), (0, 400))
    assert found.histogram == (
        Bin(below_s=1.0, count=1, seconds=0.5),
        Bin(below_s=3.0, count=2, seconds=3.5),
        Bin(below_s=10.0, count=0, seconds=0.0),
        Bin(below_s=30.0, count=0, seconds=0.0),
        Bin(below_s=100.0, count=0, seconds=0.0),
        Bin(below_s=300.0, count=0, seconds=0.0),
        Bin(below_s=None, count=1, seconds=400.0),
    )


def test_one_look_says_nothing() -> None:
    with pytest.raises(ValueError, match="two samples"):
        look_through([Sample(at=0.0, busy_pct={}, used_bytes={})])


def test_two_jobs_that_fit_into_each_other_are_twice_as_fast_together() -> None:
    found = steps(10, busy_s=4.0, idle_s=8.0)
    gain = estimate_gain(found, 1.0)
    assert (gain.windows, gain.usable_s, gain.usable_share) == (10, 60.0, 0.5)
    assert (gain.speedup, gain.verdict) == (2.0, "worth_it")
    # Busy for 40 of 120 s, and idle for 8 s ten times: 240 / (80 + 20 S) is 1.1 at 6.9 s, but a
    # window is given away only if it is longer than two switches.
    assert gain.break_even_s == pytest.approx(4.0, abs=0.01)


def test_switches_and_busy_time_limit_what_sharing_gives() -> None:
    found = steps(10, busy_s=6.0, idle_s=4.0)
    assert estimate_gain(found, 0.0).speedup == pytest.approx(200 / 120)
    gain = estimate_gain(found, 1.5)
    assert gain.speedup == pytest.approx(200 / (120 + 10 * 3))
    assert (gain.verdict, gain.usable_s) == ("worth_it", 10.0)
    little = estimate_gain(steps(10, busy_s=7.5, idle_s=4.0), 1.5)
    assert little.speedup == pytest.approx(230 / 180)
    assert little.verdict == "pays_a_little"
    too_long = estimate_gain(found, 2.0)
    assert (too_long.windows, too_long.speedup, too_long.verdict) == (0, 1.0, "not_worth_it")


def test_a_busy_job_is_not_worth_sharing_whatever_a_switch_costs() -> None:
    gain = estimate_gain(steps(10, busy_s=19.0, idle_s=1.0), 0.0)
    assert (gain.break_even_s, gain.verdict) == (None, "not_worth_it")
    always = estimate_gain(seen((100.0, 10.0)), 1.0)
    assert (always.windows, always.speedup, always.break_even_s) == (0, 1.0, None)


@pytest.mark.parametrize("busy_s", [1.0, 4.0, 9.0])
def test_break_even_is_where_it_pays_no_longer(busy_s: float) -> None:
    found = steps(5, busy_s=busy_s, idle_s=6.0)
    break_even_s = estimate_gain(found, 0.0).break_even_s
    assert break_even_s is not None
    assert estimate_gain(found, break_even_s - 0.01).speedup >= 1.1
    assert estimate_gain(found, break_even_s + 0.01).speedup < 1.1


def test_a_switch_is_estimated_by_the_fullest_device() -> None:
    found = seen((0.0, 1.0), used_bytes=10 * GIB)
    switch = estimate_switch(found)
    expected_s = FIXED_SWITCH_S + 10 * GIB / OUT_BYTES_PER_S + 10 * GIB / IN_BYTES_PER_S
    assert switch.seconds == pytest.approx(expected_s)
    assert (switch.source, switch.bytes_per_device) == ("estimated", 10 * GIB)
    known = estimate_switch(found, out_bytes_per_s=10e9, in_bytes_per_s=10e9)
    assert known.seconds == pytest.approx(FIXED_SWITCH_S + 2 * 10 * GIB / 10e9)
