"""What jobs tell of themselves: kept, bounded, and written without losing what counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tsliced.host.history import Fact
from tsliced.observe.told import Told, ToldLimits, Value

JOB, PID = "1000/a", 4711


@dataclass(slots=True)
class Story:
    """What was told, at which time, and what was written of it."""

    limits: ToldLimits = field(default_factory=ToldLimits)
    now: float = 100.0
    written: list[tuple[str, dict[str, Fact]]] = field(default_factory=list)
    told: Told = field(init=False)

    def __post_init__(self) -> None:
        self.told = Told(self.limits, self._write)

    def _write(self, kind: str, _level: str, facts: Mapping[str, Fact]) -> None:
        self.written.append((kind, dict(facts)))

    def progress(self, **fields: Value) -> None:
        self.told.on_progress(JOB, fields, self.now)

    def queue(self, name: str, depth: float) -> None:
        self.told.on_queue(JOB, name, depth, None, self.now)

    def phase(self, name: str, seconds: float, *, pid: int = PID) -> None:
        self.told.on_phase_begun(JOB, pid, name, self.now)
        self.now += seconds
        self.told.on_phase_ended(JOB, pid, name, self.now)

    def let_pass(self, seconds: float) -> None:
        """Let time pass, and what is due be written."""
        end = self.now + seconds
        while (due := self.told.write_due(self.now)) is not None and due <= end:
            assert due > self.now, "it is not asked for over and over"
            self.now = due
        self.now = end
        self.told.write_due(self.now)

    def facts(self, kind: str) -> list[dict[str, Fact]]:
        return [facts for written, facts in self.written if written == kind]


def test_what_comes_slowly_is_written_as_it_comes() -> None:
    story = Story()
    story.progress(step=1, reward=0.5, done=False, note="warm")
    story.queue("trajectories", 12.0)
    story.phase("reward", 3.0)
    assert story.written == [
        ("progress", {"job": JOB, "step": 1, "reward": 0.5, "done": False, "note": "warm"}),
        ("queue", {"job": JOB, "name": "trajectories", "depth": 12.0, "target": None}),
        ("phase", {"job": JOB, "pid": PID, "name": "reward", "begin": True}),
        (
            "phase",
            {"job": JOB, "pid": PID, "name": "reward", "begin": False, "times": 1, "seconds": 3.0},
        ),
    ]
    assert story.told.write_due(story.now) is None


def test_what_comes_too_fast_is_put_together_and_the_last_values_are_written() -> None:
    story = Story(ToldLimits(max_events_per_s=1.0))
    for step in range(1, 1001):
        story.progress(step=step, tokens=10, reward=step / 1000)
        story.queue("a", step)
        story.now += 0.001
    assert len(story.written) <= 12
    story.let_pass(5.0)
    assert len(story.written) <= 16
    last = story.facts("progress")[-1]
    assert (last["step"], last["reward"]) == (1000, 1.0)
    assert sum(int(str(facts["tokens"])) for facts in story.facts("progress")) == 10_000
    assert story.facts("queue")[-1]["depth"] == 1000


def test_short_phases_keep_their_number_and_their_length() -> None:
    story = Story(ToldLimits(max_events_per_s=1.0))
    for _ in range(500):
        story.phase("tool", 0.002)
        story.phase("tool", 0.001, pid=PID + 1)
    story.let_pass(10.0)
    ends = [facts for facts in story.facts("phase") if not facts["begin"]]
    assert len(ends) < 20
    for pid, seconds in ((PID, 1.0), (PID + 1, 0.5)):
        mine = [facts for facts in ends if facts["pid"] == pid]
        assert sum(int(str(facts["times"])) for facts in mine) == 500
        assert sum(float(str(facts["seconds"])) for facts in mine) == pytest.approx(seconds)
    begun = [facts for facts in story.facts("phase") if facts["begin"]]
    assert len(begun) <= len(ends), "none is left open"


def test_one_job_that_tells_much_takes_nothing_from_others() -> None:
    story = Story(ToldLimits(max_events_per_s=1.0))
    for _ in range(1000):
        story.progress(step=1)
    before = len(story.written)
    story.told.on_progress("1000/b", {"step": 7}, story.now)
    assert story.written[before:] == [("progress", {"job": "1000/b", "step": 7})]


def test_a_job_has_so_many_names_and_is_told_once_that_there_are_more() -> None:
    story = Story(ToldLimits(max_names=3, max_events_per_s=1000.0))
    for number in range(10):
        story.progress(**{f"f{number}": number, f"g{number}": number})
        story.queue(f"q{number}", 1.0)
        story.phase(f"p{number}", 0.0)
    told = story.told.jobs[JOB]
    assert list(told.figures) == ["f0", "g0", "f1"]
    assert (list(told.queues), sorted(told.phases)) == (["q0", "q1", "q2"], ["p0", "p1", "p2"])
    reasons = [str(facts["reason"]) for facts in story.facts("too_many_names")]
    assert [reason.split("; ")[0] for reason in reasons] == [
        "it has more than 3 names of figures",
        "it has more than 3 names of queues",
        "it has more than 3 names of phases",
    ]
    story.progress(f0=5)
    assert told.figures["f0"] == 5, "those that it has go on"


def test_only_the_latest_jobs_are_kept_and_what_they_told_is_written() -> None:
    story = Story(ToldLimits(max_jobs=2, max_events_per_s=0.1))
    for _ in range(2):
        story.progress(step=1)
    story.progress(step=2)
    for job in ("b", "c"):
        story.now += 1
        story.told.on_progress(job, {"step": 1}, story.now)
    assert list(story.told.jobs) == ["b", "c"]
    assert [f["step"] for f in story.facts("progress") if f["job"] == JOB][-1] == 2


def test_what_is_left_when_a_job_or_the_daemon_ends_is_written() -> None:
    story = Story(ToldLimits(max_events_per_s=0.1))
    for step in range(5):
        story.progress(step=step)
        story.told.on_progress("1000/b", {"step": step}, story.now)
    story.told.on_job_over(JOB)
    assert story.facts("progress")[-1] == {"job": JOB, "step": 4}
    story.told.on_job_over(JOB)
    story.told.close()
    assert story.facts("progress")[-1] == {"job": "1000/b", "step": 4}
    assert story.told.jobs == {}
    assert story.told.write_due(story.now) is None


def test_the_phases_of_a_process_end_with_it() -> None:
    story = Story()
    story.told.on_phase_begun(JOB, PID, "reward", story.now)
    story.told.on_phase_begun(JOB, PID + 1, "reward", story.now)
    story.now += 2.0
    story.told.on_process_gone(JOB, PID, story.now)
    (end,) = [facts for facts in story.facts("phase") if not facts["begin"]]
    assert (end["pid"], end["seconds"]) == (PID, 2.0)
    story.told.on_process_gone("1000/unknown", PID, story.now)
    story.told.on_phase_ended(JOB, PID, "reward", story.now)
    assert len(story.facts("phase")) == 3, "what never began does not end"


def test_steps_and_tokens_have_a_pace_by_the_hour() -> None:
    story = Story()
    story.progress(step=100, tokens=5000)
    told = story.told.jobs[JOB]
    assert told.steps.per_hour(story.now) is None
    for step in range(101, 161):
        story.now += 60.0
        story.progress(step=step, tokens=5000)
    assert told.steps.per_hour(story.now) == pytest.approx(60.0)
    assert told.tokens.per_hour(story.now) == pytest.approx(300_000.0)
    story.now += 3600.0
    assert told.steps.per_hour(story.now) == pytest.approx(30.0)
    # From a checkpoint, twice as fast: those that come again are steps too, the way back is none.
    story.progress(step=120)
    for step in range(121, 241):
        story.now += 30.0
        story.progress(step=step)
    assert told.steps.per_hour(story.now) == pytest.approx(120.0, rel=0.02)


def test_numbers_that_are_none_are_kept_as_they_are_and_written_as_text() -> None:
    story = Story()
    story.progress(loss=math.nan, reward=math.inf, tokens=math.nan, step=True)
    story.queue("q", math.inf)
    kept = story.told.jobs[JOB].figures["loss"]
    assert isinstance(kept, float)
    assert math.isnan(kept)
    assert story.facts("progress") == [
        {"job": JOB, "loss": "nan", "reward": "inf", "tokens": "nan", "step": True}
    ]
    assert story.facts("queue")[0]["depth"] == "inf"
    assert story.told.jobs[JOB].steps.per_hour(story.now + 10.0) is None
