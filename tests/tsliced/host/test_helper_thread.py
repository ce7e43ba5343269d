"""The thread that waits for the disk."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tsliced.host.helper_thread import HelperThread
from tsliced.host.journal_error import JournalCode, JournalError

LIMIT_S = 10.0


def test_jobs_run_in_order_in_one_other_thread() -> None:
    helper = HelperThread("helper", max_jobs=100)
    ran: list[int] = []

    def note(number: int) -> int:
        ran.append(number)
        return threading.get_ident()

    futures = [helper.submit(partial(note, number)) for number in range(50)]
    idents = {future.result(LIMIT_S) for future in futures}
    assert ran == list(range(50))
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    assert helper.stop(timeout_s=LIMIT_S)


def test_an_exception_goes_to_whoever_waits_and_the_next_job_runs() -> None:
    helper = HelperThread("helper", max_jobs=100)
    failing = helper.submit(lambda: 1 // 0)
    assert helper.submit(lambda: "next").result(LIMIT_S) == "next"
    assert isinstance(failing.exception(LIMIT_S), ZeroDivisionError)
    assert helper.stop(timeout_s=LIMIT_S)


def test_more_than_the_limit_is_refused_until_there_is_room() -> None:
    helper = HelperThread("helper", max_jobs=3)
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert go_on.wait(LIMIT_S)

    helper.submit(wait)
    assert started.wait(LIMIT_S)
    waiting = [helper.submit(lambda: None) for _ in range(3)]
    with pytest.raises(JournalError) as caught:
        helper.submit(lambda: None)
    assert caught.value.code is JournalCode.BUSY
    go_on.set()
    waiting[-1].result(LIMIT_S)
    helper.submit(lambda: None).result(LIMIT_S)
    assert helper.stop(timeout_s=LIMIT_S)


def test_a_cancelled_job_does_not_run() -> None:
    helper = HelperThread("helper", max_jobs=10)
    go_on = threading.Event()
    ran: list[int] = []
    helper.submit(lambda: go_on.wait(LIMIT_S))
    cancelled = helper.submit(lambda: ran.append(1))
    assert cancelled.cancel()
    go_on.set()
    helper.submit(lambda: ran.append(2)).result(LIMIT_S)
    assert ran == [2]
    assert helper.stop(timeout_s=LIMIT_S)


def test_stopping_lets_queued_jobs_end_and_gives_up_on_one_that_hangs() -> None:
    helper = HelperThread("helper", max_jobs=10)
    go_on = threading.Event()
    helper.submit(lambda: go_on.wait(LIMIT_S))
    last = helper.submit(lambda: "done")
    assert not helper.stop(timeout_s=0.01)
    go_on.set()
    assert last.result(LIMIT_S) == "done"
    assert helper.stop(timeout_s=LIMIT_S)
