"""Reads the event history of a daemon, or of all hosts, page by page: for reports and others."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from libtimeslice.connection import Connection
from libtimeslice.errors import Refused, Unavailable
from libtimeslice.fields import MAX_ID, MAX_INSTANT
from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask
from tsliced.ctl.failures import USAGE, CommandError
from tsliced.ctl.options import name, text
from tsliced.ctl.output import say

#: Events that are asked for at once.
PAGE: Final = 2000
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_CLOCK: Final = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which events somebody wants. What is empty or None lets all through."""

    #: Number of the first event.
    since: int = 0
    #: Unix seconds: not before, and before.
    after_unix: float | None = None
    before_unix: float | None = None
    groups: tuple[str, ...] = ()
    #: Ids, ``UID/ID`` or ``CLUSTER/UID/ID``.
    jobs: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Events, the oldest first, and of which hosts they are."""

    events: list[Message]
    hosts: tuple[str, ...]
    #: Hosts that did not tell, and why.
    missing: Mapping[str, str] = field(default_factory=dict)


def read_recorded(
    daemon: Connection, options: argparse.Namespace, choice: Choice, *, latest: int | None = None
) -> Recorded:
    """Returns what a choice chooses of the hosts that the options of `add_host_options` name.

    Of all hosts it is one history: see `tsliced.observe.merging`. `latest`: only so many of each
    host, the latest ones; then the choice must be an empty one. Raises as `read_events`, and
    CommandError for a choice that makes no sense for several hosts.
    """

    def read(host: str | None) -> list[Message]:
        if latest is None:
            return list(read_events(daemon, choice, host))
        events: list[Message] = ask(daemon, "events", limit=latest, host=host)["events"]
        return events

    here = str(daemon.welcome["host"])
    if not options.all:
        return Recorded(events=read(options.host), hosts=(options.host or here,))
    # No other command needs it.
    from tsliced.observe.merging import merged

    if choice.since:
        text = "events have a number on each host: with --all say --since as a time"
        raise CommandError(text, code="bad_request", status=USAGE)
    found = {here: read(None)}
    ahead_s: dict[str, float] = {}
    missing: dict[str, str] = {}
    for peer in ask(daemon, "status")["status"].get("peers") or ():
        name = str(peer["host"])
        ahead_s[name] = peer["clock_ahead_s"] or 0.0
        try:
            found[name] = read(name)
        except (Refused, Unavailable) as error:
            missing[name] = error.message
            say(f"without the history of {name}: {error.message}")
    return Recorded(events=list(merged(found, ahead_s)), hosts=tuple(found), missing=missing)


def read_events(daemon: Connection, choice: Choice, host: str | None = None) -> Iterator[Message]:
    """Yields all events that a choice chooses and that there are now, the oldest first.

    `host`: of another one than the daemon's, by its link to that. Each is
    ``{"seq": int, "at": float (unix seconds), "kind": str, "level": str, **facts}``.
    Raises DaemonUnreachable, or what the daemon answers instead.
    """
    for events, _ in read_pages(daemon, choice, host=host):
        yield from events


def read_pages(
    daemon: Connection, choice: Choice, *, follow: bool = False, host: str | None = None
) -> Iterator[tuple[list[Message], int]]:
    """Yields the same in pages, each with the number of the first event behind it.

    With `follow` what happens from now on comes as notices; the pages may have the first of it too.
    """
    fields: Message = {
        "after": choice.after_unix,
        "before": choice.before_unix,
        "groups": list(choice.groups),
        "jobs": list(choice.jobs),
        "kinds": list(choice.kinds),
    }
    if host is not None:
        fields["host"] = host
    since, more = choice.since, True
    while more:
        page = ask(daemon, "events", since=since, limit=PAGE, follow=follow, **fields)
        follow = False
        since = int(page["next"])
        yield page["events"], since
        more = page.get("more", False)


def add_choice_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options that `choice_of` reads."""
    parser.add_argument(
        "--since",
        metavar="WHEN",
        type=number_or_instant,
        help="begin there: the number of an event, or a time: 90s, 15m, 2h or 3d ago, 14:30, "
        "2026-11-30T14:30, or @ and unix seconds",
    )
    parser.add_argument(
        "--until", metavar="WHEN", type=instant, help="end before that time (as for --since)"
    )
    parser.add_argument(
        "--group",
        metavar="NAME",
        type=name,
        action="append",
        help="what is about this group only; may be repeated",
    )
    parser.add_argument(
        "--job",
        metavar="JOB",
        type=text,
        action="append",
        help="what is about this job only: its id, UID/ID or CLUSTER/UID/ID; may be repeated",
    )


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Declares of which hosts events are to be: the options that `read_recorded` reads."""
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument(
        "--all",
        action="store_true",
        help="of all hosts that this one's daemon has links to, as one history",
    )
    whose.add_argument(
        "--host", metavar="HOST", type=name, help="of another host, by the link to its daemon"
    )


def choice_of(options: argparse.Namespace, kinds: Iterable[str] = ()) -> Choice:
    """Returns what the options of `add_choice_options` choose."""
    since: int | float | None = options.since
    return Choice(
        since=since if isinstance(since, int) else 0,
        after_unix=since if isinstance(since, float) else None,
        before_unix=options.until,
        groups=tuple(options.group or ()),
        jobs=tuple(options.job or ()),
        kinds=tuple(kinds),
    )


def number_or_instant(given: str) -> int | float:
    """The number of an event, or an instant as for `instant`."""
    if given.isdecimal() and int(given) <= MAX_ID:
        return int(given)
    return instant(given)


def instant(given: str) -> float:
    """An instant, in unix seconds."""
    if match := _AGO.fullmatch(given.removesuffix(" ago")):
        return time.time() - float(match[1]) * _UNITS[match[2]]
    try:
        if given.startswith("@"):
            found = float(given[1:])
        else:
            # Without a zone it is local time, as everything that is shown.
            day = f"{datetime.now().astimezone():%Y-%m-%d}T" if _CLOCK.fullmatch(given) else ""
            found = datetime.fromisoformat(day + given).timestamp()
    except (ValueError, OverflowError):
        found = -1.0
    if 0 <= found <= MAX_INSTANT:
        return found
    raise argparse.ArgumentTypeError(
        f"{given!r} is no time: say 90s, 15m, 2h or 3d (ago), 14:30, 2026-11-30T14:30, or @SECONDS"
    )
