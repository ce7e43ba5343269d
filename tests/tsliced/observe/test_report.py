"""What reports work out and say, and that what others typed cannot act in them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from recordings import BEGIN, GIB, alone, shared

from tsliced.host.history import Event
from tsliced.observe import timeline
from tsliced.observe.accounts import Accounts
from tsliced.observe.report.drawing import MOST_BARS, Bar, drawing, thinned
from tsliced.observe.report.figures import Figures, figures, percentile, stats, typical, union
from tsliced.observe.report.page import backlogs, report
from tsliced.observe.report.verdict import Tone, verdict
from tsliced.observe.timeline import Timeline

HOSTILE = '1000/</script><img src=x onerror="document.title=1">&\u2028<!--'


def figured(events: list[Event], *solo: list[Event]) -> tuple[Figures, Timeline]:
    line = timeline.read(events)
    return figures(events, line, [timeline.read(each) for each in solo]), line


def said(events: list[Event], *solo: list[Event]) -> str:
    found, line = figured(events, *solo)
    return "\n".join(sentence.text for sentence in verdict(found, backlogs(line)))


def test_sums_are_those_of_the_accounts() -> None:
    events = shared(2.0)
    found, line = figured(events)
    accounts = Accounts(line.begin).add_all(events)
    (group,) = found.groups
    assert group.duty == accounts.duty("trainer", line.end)
    for job in found.jobs:
        account = accounts.jobs[job.job]
        assert job.useful_s == pytest.approx(account.useful_s, rel=0.01)
        assert (job.switch_s, job.moved_bytes) == (account.switch_s, account.moved_bytes)
        assert job.waits is not None
        held = sum(stage.seconds for stage in job.stages if stage.kind == "held")
        assert held == pytest.approx(account.useful_s, rel=0.01)


def test_parts_of_a_jobs_time_are_all_of_it() -> None:
    for job in figured(shared(2.0))[0].jobs:
        assert sum(stage.share for stage in job.stages) == pytest.approx(1.0, abs=0.01)


def test_what_a_job_takes_alone_is_its_time_without_waits_and_a_recording_says_the_same() -> None:
    events = shared(3.0)
    guessed = figured(events)[0].jobs[0]
    recorded = figured(events, alone(2.0))[0].jobs[0]
    assert (guessed.recorded, recorded.recorded) == (False, True)
    # It is the same job, with noise of its own.
    assert guessed.alone_s == pytest.approx(recorded.alone_s, rel=0.05)
    assert guessed.alone_step_s == pytest.approx(recorded.alone_step_s, rel=0.05)
    assert guessed.step_s is not None
    assert guessed.alone_step_s is not None
    assert guessed.step_s > guessed.alone_step_s


def test_sharing_gains_what_one_after_the_other_would_take_more() -> None:
    (group,) = figured(shared(3.0))[0].groups
    assert group.gain == pytest.approx(group.serial_s / group.span_s)
    assert 1.5 < group.gain < 2.0
    assert group.before.useful < group.duty.useful <= group.duty.held <= 1.0
    assert group.before.kernel is not None
    assert group.duty.kernel is not None
    assert group.before.kernel * group.gain == pytest.approx(group.duty.kernel, rel=0.02)


def test_a_switch_is_off_and_on_and_says_how_long_a_phase_should_be() -> None:
    switch = figured(shared(2.0))[0].switch
    assert switch is not None
    assert switch.off_s == pytest.approx(0.4 + 6.0 * 1.05, rel=0.1)
    assert switch.on_s == pytest.approx(0.05 + 3.0 * 1.05, rel=0.1)
    assert switch.bytes == 60 * GIB
    assert switch.seconds / (switch.seconds + switch.shortest_phase_s) == pytest.approx(0.1)


def test_phases_that_are_mostly_switches_are_named() -> None:
    text = said(shared(2.0))
    assert re.search(
        r"a gives the devices back too often\. .*: training \(\d\d\.\ds, 3\d% sw", text
    )
    assert "Sharing pays. On trainer, a and b together took 2h01m" in text
    assert "they would take, worked out from their waits, " in text
    recorded = said(shared(2.0), alone(1.0), alone(1.0, "1000/b"))
    assert "they would take 3h" in recorded
    coarse = said(shared(6.0, rollout_s=1800.0, training_s=900.0, reward_s=3600.0))
    assert "too often" not in coarse


def test_what_limits_a_job_is_its_longest_stage_with_its_queue_and_tokens() -> None:
    text = said(shared(2.0))
    assert re.search(r"a is limited by reward, 4\d% of its time, which needs no devices", text)
    assert re.search(r"it makes 5\d\d tokens per second", text)
    assert "its queue trajectories is full" in text
    held = said(shared(2.0, reward_s=5.0))
    assert re.search(r"a is limited by rollout, .* with kernels running for \d\d% of it", held)


def test_where_sharing_does_not_pay_it_says_so() -> None:
    events = shared(2.0, rollout_s=10.0, training_s=5.0, reward_s=1.0, snapshot_s=60.0)
    found, line = figured(events)
    first = verdict(found, backlogs(line))[0]
    assert first.tone is Tone.BAD
    assert first.text.startswith("Sharing does not pay.")


def test_idle_windows_count_by_their_length() -> None:
    (job, _) = figured(shared(2.0))[0].jobs
    assert job.idle is not None
    # There are as many of one second, between two steps.
    assert job.idle_window_s == pytest.approx(70.0, rel=0.1)


def test_one_job_that_nobody_disturbed_is_told_as_that() -> None:
    text = said(alone(1.0))
    assert "No state was moved" in text
    assert "one after the other" not in text


def test_percentiles_and_unions() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert stats([]) is None
    assert typical([]) is None
    assert typical([1.0] * 9 + [10.0]) == 10.0
    assert union([(3.0, 4.0), (0.0, 2.0), (1.0, 3.5), (9.0, 9.0)]) == [(0.0, 4.0)]


# --- the page -------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects what a browser would take for elements, and the text of blocks."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.blocks: dict[str, str] = {}
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        self._in = f"{tag} {dict(attrs).get('id', '')}".strip()

    def handle_data(self, data: str) -> None:
        if self._in.startswith(("script", "style")):
            self.blocks[self._in] = self.blocks.get(self._in, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


def made(events: list[Event], *solo: list[Event]) -> str:
    return report(events, timeline.read(events), [timeline.read(each) for each in solo])


def test_names_of_jobs_phases_groups_queues_and_figures_are_only_ever_text() -> None:
    good = Tags(made(shared(0.3)))
    events = [
        {k: HOSTILE if k in ("phase", "name", "device", "group") and v else v for k, v in e.items()}
        | ({"job": HOSTILE} if "job" in e else {})
        | ({"groups": HOSTILE.replace(",", "")} if "groups" in e else {})
        | ({HOSTILE: 1.0} if e["kind"] == "progress" else {})
        for e in shared(0.3)
    ]
    bad = Tags(made(events, events))
    assert set(bad.names) <= set(good.names)
    assert bad.names.count("script") == good.names.count("script") == 2
    assert not [name for name, _ in bad.attributes if name.startswith("on")]
    drawn = json.loads(bad.blocks["script data"])
    assert drawn["jobs"] == [HOSTILE.rpartition("/")[2]], "and nothing of it is lost"


def test_only_its_own_script_and_style_may_run_and_nothing_is_loaded() -> None:
    page = made(shared(0.3))
    tags = Tags(page)
    contents = [value or "" for name, value in tags.attributes if name == "content"]
    policy = next(value for value in contents if value.startswith("default-src"))
    assert policy.startswith("default-src 'none'")
    for block in ("script", "style"):
        digest = hashlib.sha256(tags.blocks[block].encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert not [value for name, value in tags.attributes if name in ("src", "href", "style")]


def test_a_day_of_two_jobs_is_less_than_two_megabytes_also_with_much_to_tell() -> None:
    events = shared(24.0)
    last = events[-1]["at"]
    assert isinstance(last, float)
    # As often as a job may tell something, and short leases besides.
    told: list[Event] = [
        {"seq": 1, "at": BEGIN + n / 2, "kind": "progress", "level": "info", "job": "1000/a",
         "step": n, "reward": n * 0.77123456789, "loss": 1 / (n + 1)}
        for n in range(2 * 86_400)
    ]  # fmt: skip
    page = made(sorted([*events, *told], key=lambda event: float(str(event["at"]))))
    assert len(page.encode()) < 2_000_000


def test_what_could_not_be_told_apart_becomes_one_bar() -> None:
    bars = [Bar(n * 1.0, n + 0.5, n % 2, "x") for n in range(3 * MOST_BARS)]
    thin = thinned(bars, 3.0 * MOST_BARS)
    assert len(thin) <= MOST_BARS
    assert min(bar.begin for bar in thin) == 0.0
    assert max(bar.end for bar in thin) == bars[-1].end
    assert thinned(bars[:10], 10.0) == bars[:10]


def test_peaks_of_curves_are_kept() -> None:
    events = shared(0.2)
    events += [
        {"seq": n, "at": BEGIN + n, "kind": "queue", "level": "info", "job": "1000/a",
         "name": "q", "depth": 999.0 if n == 4321 else 1.0, "target": None}
        for n in range(1, 9000)
    ]  # fmt: skip
    events.sort(key=lambda event: float(str(event["at"])))
    line = timeline.read(events)
    drawn = drawing(line, figures(events, line).jobs, [])
    (queue,) = [chart for chart in drawn["charts"] if chart["title"] == "Queue q"]
    (curve,) = queue["curves"]
    assert len(curve["x"]) <= 1500
    assert max(curve["y"]) == 999.0


def test_the_library_keeps_its_notice_and_its_licence_lies_beside_it() -> None:
    from importlib.resources import files

    assets = files("tsliced.observe.report").joinpath("assets")
    assert "uPlot (v1.6" in made(shared(0.1))
    assert "MIT License" in assets.joinpath("uPlot.LICENSE").read_text()
