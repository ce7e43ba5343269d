"""Journals that daemons of earlier layouts left: today's daemon goes on with them."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from journal_records import (
    drain,
    fault,
    lease,
    lease_ended,
    rank,
    remains,
    session,
    stranger,
    tenancy,
)

from tsliced.core.actions import Record
from tsliced.host import record_codec
from tsliced.host.journal import Journal

#: Journals as daemons of earlier layouts left them; nothing in there is ever changed.
JOURNALS = Path(__file__).parent / "journals"
KEPT_BOOT = "11111111-2222-3333-4444-555555555555"
KEPT_NUMBERS = (32_774_400, 4096)
#: What stands in each of them, as it is said today.
STANDING_IN: dict[str, tuple[Record, ...]] = {
    "layout-1": (
        session("s-1"),
        fault(),
        tenancy(),
        replace(rank(), bytes_on=(), residue=()),
        lease(1),
        lease(2),
        lease_ended(0),
        lease_ended(9),
    ),
    "layout-2": (
        session("s-1"),
        fault(),
        drain(),
        stranger(),
        remains(),
        tenancy(),
        rank(),
        lease(1),
        lease(2),
        lease_ended(0),
    ),
}


@pytest.mark.parametrize("layout", sorted(path.name for path in JOURNALS.iterdir()))
def test_a_journal_of_each_earlier_layout_is_brought_up(tmp_path: Path, layout: str) -> None:
    directory = tmp_path / "state"
    shutil.copytree(JOURNALS / layout, directory)
    directory.chmod(0o700)
    for _ in range(2):  # as it was kept, and as it is kept now
        with closing(Journal.open(directory, now_unix=2e9, boot=KEPT_BOOT)) as journal:
            assert journal.load() == STANDING_IN[layout]
            assert (journal.generation, journal.ceiling) == KEPT_NUMBERS
            # Events that were kept as maps are dropped; their numbers are not used again.
            assert journal.open_history(10).next_seq > 1
            assert tuple(journal.warnings) == ()


def test_there_is_a_journal_of_each_layout_that_is_migrated() -> None:
    kept = {path.name for path in JOURNALS.iterdir()}
    assert kept == {f"layout-{schema}" for schema in record_codec.MIGRATIONS} == set(STANDING_IN)
