"""`tslicectl events`: what has happened, and with ``-f`` what happens from now on."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from libtimeslice.connection import Connection, ConnectionLost
from libtimeslice.errors import DaemonUnreachable
from libtimeslice.fields import MAX_EVENTS
from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, notices, open_daemon
from tsliced.ctl.failures import DONE, USAGE, CommandError
from tsliced.ctl.history import (
    Choice,
    add_choice_options,
    add_host_options,
    choice_of,
    read_pages,
    read_recorded,
)
from tsliced.ctl.names import job_text
from tsliced.ctl.options import Commands, limit_of
from tsliced.ctl.output import clock, duration, print_json, printable, say, size, styled, use_colour

#: Events that are shown when neither --since nor --limit says how many.
DEFAULT_LIMIT = 1000
#: A followed daemon that restarts is waited for so long, in seconds.
RECONNECT_S = 10.0
RETRY_S = 0.25

_STYLE_OF_LEVEL = {"warning": "yellow", "error": "red"}
_NOT_FACTS = {"seq", "at", "kind", "level", "job", "origin"}


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    events = commands.add("events", "show what happened: grants, releases, moves, faults")
    events.add_argument("-f", "--follow", action="store_true", help="go on with what happens next")
    add_choice_options(events)
    add_host_options(events)
    events.add_argument(
        "--kind",
        metavar="KIND",
        action="append",
        help="show this kind only, for example granted; may be repeated",
    )
    events.add_argument(
        "--limit",
        metavar="N",
        type=limit_of(MAX_EVENTS),
        help="show at most so many past events: the latest, or from --since on (default: "
        f"{DEFAULT_LIMIT} where nothing says which, else all)",
    )
    events.set_defaults(call=show_events)


def show_events(options: argparse.Namespace) -> int:
    """Prints one line an event; with ``--json`` one document, or one a line with ``--follow``."""
    choice = choice_of(options, options.kind or ())
    if options.all or options.host is not None:
        return _show_hosts(options, choice)
    if not options.follow:
        with open_daemon(options) as daemon:
            events, following = _past(daemon, choice, options)
        if options.json:
            print_json({"events": events, "next": following})
        else:
            for event in events:
                _print_line(event)
        return DONE
    for event in followed(options, choice):
        if options.json:
            print_json({"event": event})
        else:
            _print_line(event)
    return DONE


def _show_hosts(options: argparse.Namespace, choice: Choice) -> int:
    if options.follow:
        text = "--follow goes with neither --all nor --host: run it on each host"
        raise CommandError(text, code="bad_request", status=USAGE)
    limit: int | None = options.limit
    latest = limit or DEFAULT_LIMIT if choice == Choice() else None
    with open_daemon(options) as daemon:
        found = read_recorded(daemon, options, choice, latest=latest)
    events, most = found.events, latest or limit
    if most is not None:
        events = events[-most:] if options.since is None else events[:most]
    if options.json:
        print_json({"events": events, "hosts": found.hosts, "missing": dict(found.missing)})
    else:
        for event in events:
            _print_line(event)
    return DONE


def _past(
    daemon: Connection, choice: Choice, options: argparse.Namespace
) -> tuple[list[Message], int]:
    """Returns what happened, and the number of the event to go on with."""
    limit: int | None = options.limit
    if choice == Choice():
        answer = ask(daemon, "events", limit=limit or DEFAULT_LIMIT)
        return answer["events"], answer["next"]
    from_there_on = options.since is not None
    kept = deque[Message](maxlen=None if from_there_on else limit)
    following = 0
    for events, end in read_pages(daemon, choice):
        kept += events
        following = end
        if from_there_on and limit is not None and len(kept) >= limit:
            events = list(kept)[:limit]
            return events, events[-1]["seq"] + 1
    return list(kept), following


def followed(options: argparse.Namespace, choice: Choice) -> Iterator[Message]:
    """Yields past events, then new ones for ever; goes on after a restart where it was.

    Raises DaemonUnreachable if there is no daemon at first, or when it stays away for longer than
    RECONNECT_S.
    """
    give_up_at = 0.0
    is_first = True
    while True:
        try:
            with open_daemon(options) as daemon:
                if is_first:
                    events, following = _past(daemon, choice, options)
                    yield from events
                    is_first, choice = False, replace(choice, since=following)
                for event in _stream(daemon, choice):
                    choice = replace(choice, since=int(event["seq"]) + 1)
                    give_up_at = 0.0
                    yield event
        except ConnectionLost:
            if not give_up_at:
                say(f"lost the daemon; trying again for {RECONNECT_S:.0f} s")
                give_up_at = time.monotonic() + RECONNECT_S
        except DaemonUnreachable:
            if time.monotonic() > give_up_at:
                raise
        time.sleep(RETRY_S)


def _stream(daemon: Connection, choice: Choice) -> Iterator[Message]:
    """Yields what happened since, and all that happens, until the connection ends."""
    for events, following in read_pages(daemon, choice, follow=True):
        yield from events
        choice = replace(choice, since=following)
    for notice in notices(daemon, "event"):
        event = notice["event"]
        # What came while the pages were read is in them already.
        if event["seq"] >= choice.since:
            yield event


def _print_line(event: Message) -> None:
    text = event_line(event)
    style = _STYLE_OF_LEVEL.get(event["level"])
    print(styled(text, style, colour=use_colour(sys.stdout)) if style else text, flush=True)


def event_line(event: Message, *, short: bool = False) -> str:
    """Returns one event as a line: its number, local time, kind, job and facts as key=value.

    `short`: without the number, and with the job's id for its name.
    """
    parts = [f"{event['seq']:>6}", clock(event["at"]), f"{event['kind']:<16}"]
    if event.get("origin") and event["kind"] != "progress":
        parts.append(f"on={event['origin']}")
    if event.get("job"):
        job = job_text(event["job"])
        parts.append(f"job={job}" if not short else job.rpartition("/")[2])
    parts += [
        f"{name}={_fact_text(name, value)}"
        for name, value in event.items()
        if name not in _NOT_FACTS and value is not None
    ]
    if short:
        # To the second, and for the kind no more room than it takes.
        return " ".join([parts[1][:8], event["kind"], *parts[3:]])
    return "  ".join(parts[:2]) + "  " + " ".join(parts[2:])


def _fact_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    # Jobs may tell of anything by any name.
    if isinstance(value, int | float) and 0 <= value < float("inf"):
        if name.endswith("_s") or name == "seconds":
            return duration(value)
        if name == "bytes" or name.endswith("_bytes"):
            return size(int(value)).replace(" ", "")
    if isinstance(value, list):
        return ",".join(printable(str(item)) for item in value)
    text = printable(str(value))
    return f'"{text}"' if " " in text else text
