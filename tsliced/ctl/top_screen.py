"""What `tslicectl top` draws: one screen of groups, moves, jobs, waiters, troubles and events.

Names are other people's, so each cell is a `Text` and none is read as markup.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from libtimeslice.protocol import Message
from tsliced.ctl.events import event_line
from tsliced.ctl.names import devices_text, job_text, user_name
from tsliced.ctl.output import NOTHING, counted, duration, printable, rate, size
from tsliced.ctl.status import busy_text, state_of_job, style_of_state, troubles

#: Characters of a bar that shows how far a move is.
_BAR = 12
_FULL, _EMPTY = "█", "░"
#: What is done to a job's state, in a word or two: a line has room for no more.
_STEPS = {"snapshotting": "goes off", "restoring": "comes back"}
#: Events that are shown where the height of a screen sets no limit.
_EVENTS_IN_A_PIPE = 10
#: Facts of events that tell a person nothing at a glance.
_HIDDEN = frozenset({"lease", "token", "epoch", "incarnation", "state", "way_out"})
#: Groups, jobs and waiters beyond this are only counted: a screen has to be read at a glance.
MOST_ROWS = 16
#: Jobs in the order in which they matter to who looks.
_ORDER = (
    "blocked",
    "pinned",
    "faulted",
    "held",
    "waiting",
    "resident",
    "parked",
    "orphaned",
    "idle",
)


def screen(
    status: Message, events: Sequence[Message], *, console: Console, note: str = ""
) -> RenderableType:
    """Returns one screen; the latest events take what is left of its height."""
    parts: list[RenderableType] = [_head(status, note), Text(), _groups(status["groups"])]
    parts += _moves(status["groups"])
    parts += _jobs(status["jobs"])
    parts += _waiters(status["groups"])
    parts += _troubles(status)
    upper = Group(*parts)
    # Those of level debug are samples, and leases that nobody waited for.
    events = [event for event in events if event["level"] != "debug"]
    if not events:
        return upper
    used = len(console.render_lines(upper, pad=False))
    left = console.height - used - 2
    if console.is_terminal and left < 1:
        return upper
    lines = [_line(_event_text(event), _event_style(event)) for event in events]
    shown = lines[-left:] if console.is_terminal else lines[-_EVENTS_IN_A_PIPE:]
    return Group(upper, Text(), *shown)


def _head(status: Message, note: str) -> RenderableType:
    memory = status.get("memory") or {}
    first = Table.grid(expand=True)
    first.add_column(no_wrap=True, overflow="ellipsis")
    first.add_column(justify="right", no_wrap=True)
    text = Text(
        f"tsliced {status['version']} on {status['host']}, up {duration(status['uptime_s'])}, "
        f"driver {status.get('driver') or 'unknown'}"
    )
    text.stylize("bold")
    first.add_row(text, Text(time.strftime("%H:%M:%S"), style="dim"))
    second = Text(
        f"host memory {size(memory.get('available_bytes'))} free, "
        f"{size(memory.get('reserved_bytes'))} promised; {counted(status['sessions'], 'session')}",
        no_wrap=True,
        overflow="ellipsis",
    )
    if note:
        second = Text(note, style="bold red", no_wrap=True, overflow="ellipsis")
    return Group(first, second)


def _groups(groups: Sequence[Message]) -> RenderableType:
    table = _table("GROUP", "STATE", "JOB", ">SINCE", "PHASE", ">WAIT", "DEV", ">MEMORY", ">BUSY")
    for group in groups[:MOST_ROWS]:
        holder = group["holder"] or group.get("next")
        table.add_row(
            Text(group["name"]),
            Text(group["state"], style=style_of_state(group["state"])),
            Text(f"{job_text(holder)} ({user_name(holder['uid'])})" if holder else NOTHING),
            Text(duration(group["lease_since_s"])),
            Text(printable(group["phase"] or NOTHING)),
            Text(str(group["waiters"]) if group["waiters"] is not None else NOTHING),
            Text(devices_text(group["devices"])),
            Text(_used_text(group["devices"])),
            Text(busy_text(group["devices"])),
        )
    return Group(table, *_more(len(groups)))


def _used_text(devices: Sequence[Message]) -> str:
    total = sum(device["total_bytes"] for device in devices)
    used = [device["used_bytes"] for device in devices]
    if not total or None in used:
        return NOTHING
    return f"{sum(used) / total:.0%} of {size(total).replace(' ', '')}"


def _moves(groups: Iterable[Message]) -> list[RenderableType]:
    moves = [group["move"] for group in groups if group.get("move")]
    # One move of a job over several groups is one line.
    unique = {(str(move["job"]), move["step"]): move for move in moves}
    return [_move(move) for move in unique.values()]


def _move(move: Message) -> Text:
    share = move["done_bytes"] / max(1, move["total_bytes"])
    full = round(_BAR * share)
    text = Text("  ", no_wrap=True, overflow="ellipsis")
    text.append(_FULL * full + _EMPTY * (_BAR - full), style="yellow")
    # The long names come last: if something is cut off, then they.
    text.append(f" {_size(move['done_bytes'])}/{_size(move['total_bytes'])}")
    if move["bytes_per_s"]:
        text.append(f" {rate(move['bytes_per_s'])}")
    if move["left_s"] is not None:
        text.append(f" {duration(move['left_s'])} left")
    return text.append(f": {job_text(move['job'])} {_STEPS.get(move['step'], move['step'])}")


def _jobs(jobs: Sequence[Message]) -> list[RenderableType]:
    if not jobs:
        return [Text(), Text("no jobs", style="dim")]
    table = _table(
        "JOB", "USER", "STATE", ">RANKS", ">DEVICES", ">PARKED", ">FOR", ">HELD", ">WAITED", ">SW"
    )
    ordered = sorted(jobs, key=lambda job: _ORDER.index(state_of_job(job)))
    for job in ordered[:MOST_ROWS]:
        table.add_row(
            Text(job_text(job["job"])),
            Text(user_name(job["job"]["uid"])),
            Text(state_of_job(job), style=style_of_state(state_of_job(job))),
            Text(str(job["ranks"])),
            Text(_size(job["device_bytes"])),
            Text(_size(job["parked_bytes"])),
            Text(duration(job.get("parked_s"))),
            Text(duration(job["held_s"] or None)),
            Text(duration(job["waited_s"] or None)),
            Text(str(job["switches"])),
        )
    return [Text(), table, *_more(len(jobs))]


def _size(count: int) -> str:
    return size(count).replace(" ", "") if count else NOTHING


def _waiters(groups: Sequence[Message]) -> list[RenderableType]:
    rows = [(group["name"], n, w) for group in groups for n, w in enumerate(group["queue"], 1)]
    if not rows:
        return []
    table = _table("WAITING FOR", ">PLACE", "JOB", "USER", ">SINCE", "PHASE")
    for name, place, waiter in rows[:MOST_ROWS]:
        table.add_row(
            Text(name),
            Text(str(place)),
            Text(job_text(waiter["job"])),
            Text(user_name(waiter["job"]["uid"])),
            Text(duration(waiter["waited_s"])),
            Text(printable(waiter["phase"] or NOTHING)),
        )
    return [Text(), table, *_more(len(rows))]


def _troubles(status: Message) -> list[RenderableType]:
    # These are worth more lines than one: they end in what helps.
    found: list[RenderableType] = []
    for text, style, way_out in troubles(status)[:MOST_ROWS]:
        found.append(Text(text, style=style))
        if way_out:
            found.append(Text(f"  way out: {way_out}"))
    return [Text(), *found] if found else []


def _more(count: int) -> list[RenderableType]:
    beyond = count - MOST_ROWS
    return [Text(f"and {beyond} more: tslicectl status", style="dim")] if beyond > 0 else []


def _event_text(event: Message) -> str:
    """Returns an event as `tslicectl events` shows it, as far as a glance has use for it."""
    told = {name: value for name, value in event.items() if name not in _HIDDEN}
    return event_line(told, short=True)


def _event_style(event: Message) -> str:
    return {"warning": "yellow", "error": "red"}.get(event["level"], "dim")


def _line(text: str, style: str) -> Text:
    return Text(text.strip(), style=style, no_wrap=True, overflow="ellipsis")


def _table(*names: str) -> Table:
    """Returns a plain table; names that begin with ``>`` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in names:
        table.add_column(
            name.lstrip(">"),
            justify="right" if name.startswith(">") else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    return table
