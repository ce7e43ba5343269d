"""One thread for what may wait on a disk, so that the event loop never does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tsliced.host.journal_error import JournalCode, JournalError

T = TypeVar("T")


class HelperThread:
    """Runs jobs one after the other, in the order in which they were submitted.

    A daemon thread: a call that a dead disk never answers must not keep the process alive.
    """

    def __init__(self, name: str, *, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its result or exception arrives in the future.

        Raises `JournalError` BUSY when `max_jobs` wait already.
        """
        if self._jobs.qsize() >= self._max_jobs:
            text = f"{self._max_jobs} jobs wait for the journal's disk; it is slow or hangs"
            raise JournalError(JournalCode.BUSY, text)
        future: Future[T] = Future()
        self._jobs.put(lambda: _settle(future, job))
        return future

    def stop(self, *, timeout_s: float) -> bool:
        """Let the queued jobs end; return whether they did in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job()
            # A snapshot may hang on the job; it must not stay until the next one comes.
            del job


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as exc:  # the edge of the thread: whoever waits for the job gets it
        future.set_exception(exc)
    else:
        future.set_result(result)
