"""The judgement of histories finds what must not happen, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Host, until
from history import Recorder, start_time
from judging import CLOCKS_APART_S, Judged, judge

OWN = os.getpid()
DEAD = 1 << 22  # more than the kernel gives out


class Story:
    """Histories of several clients, with times of its own; those that are `dead` have ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "log"
        self._leases = 0

    def client(self, job: str, *lines: dict[str, Any], dead: int = 0) -> None:
        begin = {
            "at": 0.0,
            "what": "begin",
            "pid": DEAD + dead if dead else OWN,
            "start_time": 1 if dead else start_time(OWN),
        }
        self._leases += 1
        path = self._directory / f"{self._leases}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (begin, *lines)))

    def log(self, at: float, kind: str, lease: str, facts: str = "") -> None:
        clock = time.time() - time.monotonic() + at
        local = time.strftime("%H:%M:%S", time.localtime(clock))
        with self._log.open("a") as file:
            head = f"{local}.{int(clock % 1 * 1000):03d} INFO   "
            file.write(f"{head} {kind} job=0/x groups=g1 lease={lease} {facts}\n")

    def judge(self, **options: Any) -> Judged:
        return judge(self._directory, logs=[self._log], **options)

    def rules(self, **options: Any) -> list[str]:
        return [violation.rule for violation in self.judge(**options).violations]


def turn(
    job: str,
    asked: float,
    got: float | None,
    gave: float | None = None,
    *,
    token: int = 1,
    lease: str = "",
    groups: tuple[str, ...] = ("g1",),
    ranks: int = 1,
) -> list[dict[str, Any]]:
    lease = lease or f"{job}.{token}"
    number = int(asked * 1000)
    lines = [
        {"at": asked, "what": "invoke", "n": number, "job": job, "groups": groups, "ranks": ranks}
    ]
    if got is not None:
        tokens = dict.fromkeys(groups, token)
        ok = {"what": "ok", "n": number, "job": job, "lease": lease, "tokens": tokens}
        lines.append({"at": got, **ok})
    if gave is not None:
        lines.append({"at": gave, "what": "release", "lease": lease})
    return lines


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_turns_one_after_the_other_are_in_order(story: Story) -> None:
    story.client("a", *turn("a", 1, 2, 3, token=1), *turn("a", 3.1, 5, 6, token=3))
    story.client("b", *turn("b", 2, 3.2, 4.9, token=2), *turn("b", 7, 8, token=4))
    assert story.rules() == []


def test_two_jobs_that_hold_one_group_at_once_are_found_g1(story: Story) -> None:
    story.client("a", *turn("a", 1, 2, 5, token=1))
    story.client("b", *turn("b", 1, 4.9, 6, token=2))
    assert story.rules() == ["two jobs hold it"]


def test_one_that_holds_for_long_is_found_behind_others_that_came_between_g1(story: Story) -> None:
    story.client("a", *turn("a", 1, 2, 9, token=1))
    story.client("b", *turn("b", 1, 3, 4, token=2))
    story.client("c", *turn("c", 1, 5, 6, token=3))
    assert story.rules() == ["two jobs hold it"] * 2


def test_two_ranks_of_one_job_may_hold_together_with_one_token(story: Story) -> None:
    story.client("a", *turn("a", 1, 2, 5, token=1, lease="s.1", ranks=2))
    story.client("a", *turn("a", 1, 2.1, 6, token=1, lease="t.1", ranks=2))
    assert story.rules() == []


def test_a_hold_ends_with_its_process_and_no_sooner_g1(story: Story) -> None:
    story.client("a", *turn("a", 1, 2, token=1), dead=1)
    story.client("b", *turn("b", 1, 4, token=2), dead=2)
    story.client("c", *turn("c", 1, 5, token=3))
    assert story.rules() == [], "nobody knows that they lived any longer"
    killed = {"what": "killed", "pid": DEAD + 1, "at": 4.5}
    story.client("test", killed)
    assert story.rules() == ["two jobs hold it"]


def test_a_hold_ends_when_it_is_taken_back(story: Story) -> None:
    story.client("a", *turn("a", 1, 2, token=1))
    story.client("b", *turn("b", 1, 4, token=2))
    assert story.rules() == ["two jobs hold it"]
    story.log(3, "released", "a.1", "cause=lease_ended")
    judged = story.judge()
    assert judged.violations == []
    assert [acquire.taken_back for acquire in judged.acquires] == [True, False]


def test_a_hold_ends_when_the_daemon_s_memory_is_lost(story: Story) -> None:
    story.client("a", *turn("a", 1, 2, 5, token=1))
    story.client("b", *turn("b", 1, 4, token=2))
    assert story.rules() == ["two jobs hold it"]
    story.client("test", {"at": 3, "what": "forgotten"})
    assert story.rules() == []


def test_who_sees_a_grant_after_it_was_taken_back_has_not_held_it(story: Story) -> None:
    story.client("a", *turn("a", 1, 6, token=1))
    story.client("b", *turn("b", 1, 4, token=2))
    assert story.rules() == ["two jobs hold it", "the token does not rise"]
    story.log(3, "released", "a.1", "cause=lease_ended")
    assert story.rules() == []


@pytest.mark.parametrize("second", [1, 2])
def test_a_token_that_does_not_rise_is_found_g2(story: Story, second: int) -> None:
    story.client("a", *turn("a", 1, 2, 3, token=2, lease="a.1"))
    story.client("b", *turn("b", 2, 4, 5, token=second, lease="b.1"))
    assert story.rules() == ["the token does not rise"]


def test_the_same_token_for_two_turns_of_one_job_is_found_g2(story: Story) -> None:
    story.client("a", *turn("a", 1, 2, 3, lease="a.1"), *turn("a", 4, 5, 6, lease="a.2"))
    assert story.rules() == ["the token does not rise"]


def test_who_came_later_and_goes_first_is_found_g4(story: Story) -> None:
    story.client("a", *turn("a", 1, 8, 9, token=3))
    story.client("b", *turn("b", 2, 3, 4, token=1), *turn("b", 5, 6, 7, token=2))
    assert story.rules() == [], "nobody knows that it was queued"
    story.log(1.5, "queued", "a.3")
    assert story.rules(passes=2) == []
    assert story.rules(passes=1) == ["passed over 2 times, 1 allowed"]
    assert story.rules(passes=0) == ["passed over 2 times, 0 allowed"]
    story.client("test", {"at": 2.5, "what": "forgotten"})
    assert story.rules(passes=1) == [], "a daemon that lost its memory lost the places in it"
    assert story.rules() == [], "and so for all that came before"


def test_a_waiter_that_never_gets_its_turn_is_passed_over_too_g4(story: Story) -> None:
    story.client("x", *turn("0/x", 1, None))
    story.client("b", *turn("b", 2, 3, 4))
    story.log(1.5, "queued", "x.1")
    assert story.rules() == ["passed over 1 times, 0 allowed"]
    assert [acquire.job for acquire in story.judge().pending()] == ["0/x"]


def test_nobody_knows_when_one_that_was_refused_has_left_its_queue(story: Story) -> None:
    story.client(
        "x", *turn("0/x", 1, None), {"at": 6, "what": "fail", "n": 1000, "code": "timeout"}
    )
    story.client("b", *turn("b", 2, 3, 4))
    story.log(1.5, "queued", "x.1")
    assert story.rules() == []


def test_one_that_is_stopped_does_not_hear_of_its_end(story: Story) -> None:
    story.client("x", *turn("0/x", 1, None))
    story.client("b", *turn("b", 2, 3, 4))
    story.log(1.5, "queued", "x.1")
    assert story.rules() == ["passed over 1 times, 0 allowed"]
    story.client("test", {"at": 2.5, "what": "stopped", "pid": OWN})
    assert story.rules() == []


def test_one_that_hung_up_does_not_either(story: Story) -> None:
    story.client("x", *turn("0/x", 1, None), {"at": 2.5, "what": "left"})
    story.client("b", *turn("b", 2, 3, 4))
    story.log(1.5, "queued", "x.1")
    assert story.rules() == []


def test_one_that_is_set_aside_is_passed_over_only_when_it_is_back(story: Story) -> None:
    story.client("a", *turn("a", 1, 20, 21, token=3, groups=("g1", "g2")))
    story.client("b", *turn("b", 3, 4, 5, token=1), *turn("b", 10, 11, 12, token=2))
    story.log(1.5, "queued", "a.3")
    assert story.rules() == ["passed over 2 times, 0 allowed"]
    story.log(2, "set_aside", "a.3")
    assert story.rules() == []
    story.log(8, "queued_again", "a.3")
    assert story.rules() == ["passed over 1 times, 0 allowed"]


def test_a_lease_of_several_groups_has_its_place_in_the_first_of_them(story: Story) -> None:
    story.client("a", *turn("a", 1, 6, 7, token=9, groups=("g1", "g2")))
    story.client("b", *turn("b", 2, 3, 4, groups=("g2",)))
    story.log(1.5, "queued", "a.9")
    assert story.rules(order=("g1", "g2")) == []
    assert story.rules(order=("g2", "g1")) == ["passed over 1 times, 0 allowed"]


def test_a_lease_that_is_nested_in_another_is_no_grant(story: Story) -> None:
    outer = turn("a", 1, 2, 9, token=1, lease="s.1")
    inner = turn("a", 3, 4, 5, token=1, lease="s.1")
    story.client("a", *outer[:-1], *inner, outer[-1])
    story.client("b", *turn("b", 2, 10, 11, token=2))
    story.log(2.5, "queued", "b.2")
    assert story.rules() == []
    story.client("c", *turn("c", 6, 8, 8.5, token=2, lease="c.1"))
    assert "two jobs hold it" in story.rules(), "the outer one lasts"


def test_what_is_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.invoke("a", ["g1"])
    (path,) = tmp_path.glob("*.jsonl")
    path.write_text(path.read_text() + '{"at": 1, "wha')
    judged = judge(tmp_path)
    assert [str(acquire.job) for acquire in judged.pending()] == ["a"]


# --- daemons that break a promise


def start(softcuda_build: Path, broken: str) -> Host:
    host = Host(softcuda_build, settings={"daemon": {"backend": f"broken_grants:{broken}"}})
    host.start_daemon()
    return host


def pass_time() -> None:
    """Lets more time pass than the times of a log may be wrong by."""
    end = time.monotonic() + 20 * CLOCKS_APART_S
    until(lambda: time.monotonic() > end, "it is later")


def test_a_daemon_that_grants_twice_fails_every_test_g1(softcuda_build: Path) -> None:
    host = start(softcuda_build, "SecondHolder")
    first, second = host.rank("a"), host.rank("b")
    first.do("acquire", groups="g1")
    second.do("acquire", groups="g1", timeout=0.2)
    pass_time()
    with pytest.raises(AssertionError, match="two jobs hold it on g1"):
        host.close()


def test_a_daemon_that_gives_a_token_twice_fails_every_test_g2(softcuda_build: Path) -> None:
    host = start(softcuda_build, "SameToken")
    for job in "ab":
        rank = host.rank(job)
        rank.do("acquire", groups="g1")
        rank.do("release")
    with pytest.raises(AssertionError, match="the token does not rise on g1"):
        host.close()


def test_a_daemon_that_turns_its_queue_over_fails_every_test_g4(softcuda_build: Path) -> None:
    host = start(softcuda_build, "LastFirst")
    holder, *waiters = (host.rank(job) for job in "abc")
    holder.do("acquire", groups="g1")
    asked = []
    for number, waiter in enumerate(waiters, 1):
        asked.append(waiter.start("acquire", groups="g1", timeout=20))
        until(lambda n=number: host.group()["waiters"] == n, "it waits")  # type: ignore[misc]
        pass_time()
    holder.do("release")
    asked[1].wait()
    waiters[1].do("release")
    asked[0].wait()
    pass_time()
    with pytest.raises(AssertionError, match="passed over 1 times, 0 allowed on g1"):
        host.close()


def test_a_daemon_that_forgets_an_answer_fails_every_test(softcuda_build: Path) -> None:
    host = start(softcuda_build, "Silent")
    host.rank("a").start("acquire", groups="g1")
    until(lambda: host.group()["state"] == "held", "it is granted")
    with pytest.raises(AssertionError, match="waiters are lost"):
        host.close(answer_limit_s=1.0)
