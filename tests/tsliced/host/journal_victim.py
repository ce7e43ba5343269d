"""A process that writes to a journal until it is killed, and says what was acknowledged.

Batch n (from 1) puts lease n and ends lease n - HELD, so what must stand after n batches is known
without replaying anything: see `standing_after`. Run as a script: ``journal_victim.py DIRECTORY``.
Lines on stdout: ``batch N`` after `write` returned, ``ceiling N`` after `reserve` returned, and
``event N`` for the number of each event.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from journal_records import lease, lease_ended, session

from tsliced.core.actions import LeaseRecord, Record
from tsliced.host.journal import Journal, JournalLimits

HELD = 3
SLOTS = 16
#: So small that the log is cut every few hundred batches.
LIMITS = JournalLimits(cut_bytes=20_000, history_max_bytes=50_000)


def standing_after(batches: int) -> set[Record]:
    """Return what must stand after so many batches."""
    held = range(max(1, batches - HELD + 1), batches + 1)
    ended = range(max(1, batches - HELD - SLOTS + 1), batches - HELD + 1)
    return {
        session("s-1"),
        *(lease(number) for number in held),
        *(lease_ended(number, slots=SLOTS) for number in ended),
    }


def batches_in(records: tuple[Record, ...]) -> int:
    """Return how many batches a journal's records come from."""
    return max((int(r.lease[2:]) for r in records if isinstance(r, LeaseRecord)), default=0)


def batch(number: int) -> list[Record]:
    ends = number - HELD
    records: list[Record] = [session("s-1")] if number == 1 else []
    records.append(lease(number))
    return [*records, lease_ended(ends, slots=SLOTS)] if ends >= 1 else records


def say(line: str) -> None:
    # One write(2), so that a kill cannot hold a line back.
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


async def write_for_ever(journal: Journal) -> None:
    history = journal.open_history(100)
    number = batches_in(journal.load())
    while True:
        number += 1
        journal.write(batch(number))
        say(f"batch {number}")
        seq = history.next_seq
        history.append("batch", "info", {"n": number}, time.time())
        say(f"event {seq}")
        if number % 50 == 0:
            history.flush()
            await journal.reserve(journal.ceiling + 64)
            say(f"ceiling {journal.ceiling}")
        elif number % 5 == 0:
            await asyncio.sleep(0)


if __name__ == "__main__":
    journal = Journal.open(Path(sys.argv[1]), now_unix=time.time(), limits=LIMITS)
    say(f"generation {journal.generation}")
    asyncio.run(write_for_ever(journal))
