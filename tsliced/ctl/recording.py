"""Where reports and traces get their events from: the daemon, or a file that `events` wrote."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from libtimeslice.protocol import Message
from tsliced.ctl.calls import open_daemon
from tsliced.ctl.failures import FAILED, NOT_FOUND, USAGE, CommandError
from tsliced.ctl.history import (
    Choice,
    add_choice_options,
    add_host_options,
    choice_of,
    read_recorded,
)
from tsliced.ctl.options import text

#: The facts without which something is no event.
_NEEDED: Mapping[str, type | tuple[type, ...]] = {"at": (int, float), "kind": str, "level": str}


def add_recording_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Declares which events to take, from where, and where the result goes."""
    add_choice_options(parser)
    add_host_options(parser)
    parser.add_argument(
        "--history",
        metavar="FILE",
        type=text,
        help="take the events from a file that `tslicectl events --json` wrote, not the daemon's",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=text,
        default=default,
        help=f"where to write it; - is standard output (default {default})",
    )


def recorded(options: argparse.Namespace) -> tuple[list[Message], str]:
    """Returns the chosen events, the oldest first, and of which hosts they are, if that is known.

    Raises CommandError if there are none.
    """
    choice, host = choice_of(options), ""
    if options.history is not None and (options.all or options.host):
        text = "--history is a file: --all and --host say whose history to ask for"
        raise CommandError(text, code="bad_request", status=USAGE)
    if options.history is not None:
        events = [e for e in read_file(options.history) if _is_chosen(e, choice)]
    else:
        with open_daemon(options) as daemon:
            found = read_recorded(daemon, options, choice)
            events, host = found.events, ", ".join(found.hosts)
    if not events:
        text = "there are no such events; tslicectl events shows which there are"
        raise CommandError(text, code="not_found", status=NOT_FOUND)
    return events, host


def read_file(path: str) -> list[Message]:
    """Returns the events of a file: one document, or one a line as ``events -f --json`` writes."""
    try:
        with open(path, encoding="utf-8") as file:
            documents = [json.loads(line) for line in file if line.strip()]
    except OSError as exc:
        raise CommandError(f"{path}: {exc.strerror}", code="not_found", status=NOT_FOUND) from exc
    except ValueError as exc:
        raise _no_events(path) from exc
    events: list[Message] = []
    for document in documents:
        if not isinstance(document, dict):
            raise _no_events(path)
        # One document, or one a line as with --follow.
        events += document.get("events") or [document.get("event") or {}]
    if not all(map(_is_event, events)):
        raise _no_events(path)
    return sorted(events, key=lambda event: (event["at"], event.get("seq", 0)))


def _no_events(path: str) -> CommandError:
    text = f"{path} holds no events; make it by: tslicectl events --since 1d --json > {path}"
    return CommandError(text, code="bad_request", status=USAGE)


def _is_event(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) for name, kind in _NEEDED.items()
    )


def _is_chosen(event: Message, choice: Choice) -> bool:
    """Chooses as the daemon does."""
    at = event["at"]
    in_time = (choice.after_unix is None or at >= choice.after_unix) and (
        choice.before_unix is None or at < choice.before_unix
    )
    if not in_time or event.get("seq", 0) < choice.since:
        return False
    groups = str(event.get("groups") or event.get("group") or "").split(",")
    if choice.groups and not set(groups) & set(choice.groups):
        return False
    name = str(event.get("job") or "")
    calls = {name, name.rpartition("/")[2], "/".join(name.split("/")[-2:])}
    return not choice.jobs or bool(calls & set(choice.jobs))


def write_result(path: str, content: str) -> None:
    """Writes to a file, whole or not at all, or to standard output. Raises CommandError."""
    if path == "-":
        print(content, flush=True)
        return
    target = Path(path)
    try:
        handle, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(made, 0o666 & ~umask)
            os.replace(made, target)
        except BaseException:
            os.unlink(made)
            raise
    except OSError as exc:
        text = f"{path} cannot be written: {exc.strerror}"
        raise CommandError(text, code="not_written", status=FAILED) from exc
    print(f"tslicectl: wrote {path}", file=sys.stderr)
