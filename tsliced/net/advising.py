"""Brings advice to jobs: into the history, and through their clients into their own logs.

And says in the history when a job is over, which nobody else has to know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from libtimeslice.protocol import Message
from tsliced.core.model import JobKey, SessionId
from tsliced.driver import Driver
from tsliced.host.history import HistoryQuery
from tsliced.observe.advice import KINDS, Advice, Advisor

#: Between two looks, seconds.
LOOK_S: Final = 1.0
#: Events that are taken in at once.
_PAGE: Final = 5000


class Advising:
    """Looks at what happened, now and then. For the event loop."""

    def __init__(
        self,
        driver: Driver,
        send: Callable[[SessionId, Message], object],
        limit_s: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._send = send
        self._limit_s = limit_s
        self._advisor = Advisor()
        self._next = driver.around.history.next_seq
        #: Jobs that had something on devices, or in host memory, or a lease.
        self._known: set[str] = set()

    async def advise_for_ever(self) -> None:
        """Look every `LOOK_S`."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Take in what happened since the last look, and who holds now."""
        machine, history = self._driver.machine, self._driver.around.history
        if history.next_seq != self._next:
            query = HistoryQuery(since=self._next, kinds=KINDS)
            page = history.chosen(query, _PAGE)
            self._next = page.next
            for event in page.events:
                # Also of those that come and go between two looks.
                self._known.add(str(event["job"]))
                if (advice := self._advisor.add(event)) is not None:
                    sessions = machine.leasing.sessions.values()
                    named = (s.job for s in sessions if str(s.job) == advice.job)
                    self._tell(advice, next(named, None))
        self._note_gone()
        now = time.monotonic()
        for job, advice in self._advisor.look(machine, limit_s=self._limit_s(), now=now):
            self._tell(advice, job)

    def _note_gone(self) -> None:
        machine = self._driver.machine
        here = set(map(str, machine.tenancies.by_job))
        others = {*machine.leasing.by_job, *machine.leasing.faults}
        for job in sorted(self._known - here - set(map(str, others))):
            self._known.remove(job)
            self._driver.note("gone", "info", job=job)
        self._known |= here

    def _tell(self, advice: Advice, job: JobKey | None) -> None:
        self._driver.note(advice.code, "warning", job=advice.job, reason=advice.text)
        if job is None:
            return
        for session in self._driver.machine.leasing.sessions_of(job):
            if not session.agent and not session.tool:
                message = {"t": "warning", "code": advice.code, "message": advice.text}
                self._send(session.id, message)
