"""docs/events.md names every kind of event that the daemon writes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: Where a kind is said: of a note, in a call that makes one, or in one of a few helpers.
SAID = re.compile(
    r"(?:(?:Note|_make_note)\(\s*kind=|\bnote\(\s*|_note\(\s*|_write\(\s*|_note_turn\(\s*|note_fault\(\s*"
    r"|_note_each\(round_, )"
    r'"([a-z_]+)"'
)


def test_every_kind_of_event_is_on_the_page_about_them() -> None:
    sources = [path.read_text() for path in (ROOT / "tsliced").rglob("*.py")]
    kinds = {kind for source in sources for kind in SAID.findall(source)}
    assert {"granted", "operation", "turn_failed", "progress", "pinned", "peer_lost"} <= kinds
    named = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs/events.md").read_text()))
    assert kinds - named == set()
