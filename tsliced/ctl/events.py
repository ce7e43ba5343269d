"""`tslicectl events`: what has happened, and with ``-f`` what happens from now on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from libtimeslice.connection import ConnectionLost
from libtimeslice.errors import DaemonUnreachable
from libtimeslice.fields import MAX_EVENTS
from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, notices, open_daemon
from tsliced.ctl.failures import DONE
from tsliced.ctl.names import job_text
from tsliced.ctl.options import Commands, count, limit_of
from tsliced.ctl.output import clock, duration, print_json, printable, say, size, styled, use_colour

#: Events that are shown when neither --since nor --limit says how many.
DEFAULT_LIMIT = 1000
#: A followed daemon that restarts is waited for so long, in seconds.
RECONNECT_S = 10.0
RETRY_S = 0.25

_STYLE_OF_LEVEL = {"warning": "yellow", "error": "red"}
_NOT_FACTS = {"seq", "at", "kind", "level", "job"}


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    events = commands.add("events", "show what happened: grants, releases, moves, faults")
    events.add_argument("-f", "--follow", action="store_true", help="go on with what happens next")
    events.add_argument(
        "--since", metavar="N", type=count, help="begin with the event of this number"
    )
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
        default=DEFAULT_LIMIT,
        help=f"ask for at most so many past events (default {DEFAULT_LIMIT}, at most {MAX_EVENTS})",
    )
    events.set_defaults(call=show_events)


def show_events(options: argparse.Namespace) -> int:
    """Prints one line an event; with ``--json`` one document, or one a line with ``--follow``."""
    if not options.follow:
        with open_daemon(options) as daemon:
            answer = ask(daemon, "events", since=options.since, limit=options.limit)
        chosen = [event for event in answer["events"] if _is_chosen(event, options)]
        if options.json:
            print_json({"events": chosen, "next": answer["next"]})
        else:
            for event in chosen:
                _print_line(event)
        return DONE
    for event in followed(options):
        if _is_chosen(event, options):
            if options.json:
                print_json({"event": event})
            else:
                _print_line(event)
    return DONE


def followed(options: argparse.Namespace) -> Iterator[Message]:
    """Yields past events, then new ones for ever; goes on after a restart where it was.

    Raises DaemonUnreachable if there is no daemon at first, or when it stays away for longer than
    RECONNECT_S.
    """
    since: int | None = options.since
    give_up_at = 0.0
    while True:
        try:
            for event in _stream(options, since):
                since = int(event["seq"]) + 1
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


def _stream(options: argparse.Namespace, since: int | None) -> Iterator[Message]:
    """Yields the events of one connection; raises DaemonUnreachable when it ends."""
    with open_daemon(options) as daemon:
        answer = ask(daemon, "events", since=since, follow=True, limit=options.limit)
        yield from answer["events"]
        yield from (notice["event"] for notice in notices(daemon, "event"))


def _is_chosen(event: Message, options: argparse.Namespace) -> bool:
    return not options.kind or event["kind"] in options.kind


def _print_line(event: Message) -> None:
    text = event_line(event)
    style = _STYLE_OF_LEVEL.get(event["level"])
    print(styled(text, style, colour=use_colour(sys.stdout)) if style else text, flush=True)


def event_line(event: Message) -> str:
    """Returns one event as a line: its number, local time, kind, job and facts as key=value."""
    parts = [f"{event['seq']:>6}", clock(event["at"]), f"{event['kind']:<16}"]
    if event.get("job"):
        parts.append(f"job={job_text(event['job'])}")
    parts += [
        f"{name}={_fact_text(name, value)}"
        for name, value in event.items()
        if name not in _NOT_FACTS and value is not None
    ]
    return "  ".join(parts[:2]) + "  " + " ".join(parts[2:])


def _fact_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_s") or name == "seconds":
        return duration(float(str(value)))
    if name == "bytes" or name.endswith("_bytes"):
        return size(int(str(value))).replace(" ", "")
    if isinstance(value, list):
        return ",".join(printable(str(item)) for item in value)
    text = printable(str(value))
    return f'"{text}"' if " " in text else text
