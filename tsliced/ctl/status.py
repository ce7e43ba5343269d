"""`tslicectl status` and `tslicectl ps`: who has the devices, who waits, and where each rank is."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from libtimeslice.connection import Connection
from libtimeslice.errors import Refused, Unavailable
from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, open_daemon
from tsliced.ctl.failures import DONE
from tsliced.ctl.names import devices_text, job_text, move_text, user_name
from tsliced.ctl.options import Commands, name, positive_seconds
from tsliced.ctl.output import (
    NOTHING,
    counted,
    duration,
    folded,
    print_json,
    printable,
    screen_width,
    size,
    styled,
    table,
    use_colour,
)

#: What a terminal needs to show the next screen in the place of the last.
_CLEAR = "\x1b[H\x1b[2J"

#: Hosts of a group that are listed one by one behind its first.
_MOST_HOSTS = 4

_STYLE_OF_STATE = {
    "held": "green",
    "switching": "yellow",
    "blocked": "red",
    "pinned": "red",
    "faulted": "red",
    "lost": "red",
    "dead": "red",
    "uncertain": "yellow",
}


def add_commands(commands: Commands) -> None:
    """Declares the commands of this module."""
    status = commands.add("status", "show who has the devices, since when, and who waits")
    status.add_argument(
        "--watch",
        metavar="SECONDS",
        type=positive_seconds,
        help="show it again and again, until Ctrl-C",
    )
    whose = status.add_mutually_exclusive_group()
    whose.add_argument(
        "--all", action="store_true", help="of all hosts that this one's daemon has links to"
    )
    whose.add_argument(
        "--host", metavar="HOST", type=name, help="of another host, by the link to its daemon"
    )
    status.set_defaults(call=show_status)
    ps = commands.add("ps", "list the processes that have a context on the devices")
    ps.set_defaults(call=show_ranks)


def show_status(options: argparse.Namespace) -> int:
    """Prints one screen, or one JSON document, about one daemon or all; maybe repeatedly."""
    watch: float | None = options.watch
    whose = {} if options.host is None else {"host": options.host}
    with open_daemon(options) as daemon:
        while True:
            status: Message = ask(daemon, "status", **whose)["status"]
            others = _ask_others(daemon, status) if options.all else []
            if options.json:
                print_json({"status": status, **({"hosts": others} if options.all else {})})
            else:
                colour = use_colour(sys.stdout)
                if watch and sys.stdout.isatty():
                    print(_CLEAR, end="")
                width = screen_width()
                lines = status_lines(status, colour=colour, width=width)
                for other in others:
                    lines += other_lines(other, colour=colour, width=width)
                print("\n".join(lines), flush=True)
            if watch is None:
                return DONE
            time.sleep(watch)


def _ask_others(daemon: Connection, status: Message) -> list[Message]:
    """Returns what is known of each other host: where it stands, and its status if it answers."""
    found: list[Message] = []
    for peer in status.get("peers") or ():
        other = {**peer, "status": None}
        try:
            other["status"] = ask(daemon, "status", host=peer["host"])["status"]
        except (Refused, Unavailable) as error:
            other["reason"] = error.message
        found.append(other)
    return found


def other_lines(other: Message, *, colour: bool = False, width: int | None = None) -> list[str]:
    """Returns the screen of another host, or the line that says why there is none."""
    status: Message | None = other["status"]
    if status is not None:
        return ["", "", *status_lines({**status, "peers": []}, colour=colour, width=width)]
    since, state = duration(other["since_s"]), host_state(other)
    text = f"{other['host']} is {state} for {since}: {printable(host_reason(other) or '-')}"
    style = _STYLE_OF_STATE.get(state, "yellow")
    return ["", "", *(styled(line, style, colour=colour) for line in folded(text, width))]


def host_state(other: Message) -> str:
    """Returns where another host stands, in a word."""
    state: str = "dead" if other.get("dead_by") else other["state"]
    return state


def host_reason(other: Message) -> str | None:
    """Returns why another host stands where it does."""
    reason: str | None = other["reason"]
    if (by := other.get("dead_by")) is None:
        return reason
    return f"dead, says {by}; {reason}" if reason else f"dead, says {by}"


def show_ranks(options: argparse.Namespace) -> int:
    """Prints a line, or an entry of one JSON document, for each rank that the daemon knows."""
    with open_daemon(options) as daemon:
        ranks: list[Message] = ask(daemon, "ps")["ranks"]
    if options.json:
        print_json({"ranks": ranks})
    else:
        colour, width = use_colour(sys.stdout), screen_width()
        print("\n".join(rank_lines(ranks, colour=colour, width=width)))
    return DONE


def status_lines(status: Message, *, colour: bool = False, width: int | None = None) -> list[str]:
    """Returns the screen of `tslicectl status`, without line ends; `width`: what a line may have.

    Tables may be wider, should names be long.
    """
    groups: list[Message] = status["groups"]
    lines = [*_daemon_lines(status, width), ""]
    header = ["GROUP", "STATE", "USER", "JOB", "SINCE", "PHASE"]
    header += ["WAITING", "DEV", "MEMORY", "BUSY"]
    rows = [_group_row(group) for group in groups]
    # Groups of other hosts too: a daemon of version 1.0 has none.
    if any(group.get("hosts", [status["host"]]) != [status["host"]] for group in groups):
        header.append("HOSTS")
        rows = [[*row, _hosts_text(group)] for row, group in zip(rows, groups, strict=True)]
    right = ["SINCE", "WAITING", "BUSY"]
    lines += table(header, rows, right=right, colour=colour, width=width)
    for group in groups:
        if move := group.get("move"):
            text = f"{group['name']}: {move_text(move)}"
            lines += [styled(line, "yellow", colour=colour) for line in folded(text, width)]
    lines += _queue_lines(groups, colour=colour)
    lines += _job_lines(status["jobs"], colour=colour, width=width)
    lines += _peer_lines(status.get("peers") or (), colour=colour)
    return lines + _trouble_lines(status, colour=colour, width=width)


def state_of_job(job: Message) -> str:
    """Returns where a job stands, in a word."""
    # A daemon of version 1.0 calls all that faulted.
    state: str = job.get("standstill") or job["state"]
    return state


class Trouble(NamedTuple):
    """Something that is wrong, or stands still, and how to leave it, if that is known apart."""

    text: str
    style: str
    way_out: str = ""


def troubles(status: Message) -> list[Trouble]:
    """Returns all that is wrong, or stands still."""
    groups, jobs = status["groups"], status["jobs"]
    devices = [device for group in groups for device in group["devices"]]
    found = [Trouble(text, "yellow") for text in problem_lines(devices)]
    for group in groups:
        if reason := group.get("reason"):
            # What a group stands still for is said once, with the job that it is about.
            causes = [job_text(job["job"]) for job in jobs if reason in (job.get("reason") or "")]
            why = f"because of {', '.join(causes)}, see there" if causes else printable(reason)
            text = f"{group['name']} is {group['state']}: {why}"
            found.append(Trouble(text, _STYLE_OF_STATE.get(group["state"], "bold")))
    for job in jobs:
        if reason := job.get("reason"):
            state, way_out = state_of_job(job), job.get("way_out") or ""
            reason = printable(reason.removesuffix(f"; {way_out}"))
            text = f"{job_text(job['job'])} is {state}: {reason}"
            style = _STYLE_OF_STATE.get(state, "bold")
            found.append(Trouble(text, style, printable(way_out)))
    return found


def _trouble_lines(status: Message, *, colour: bool, width: int | None) -> list[str]:
    found = troubles(status)
    if not found:
        return []
    lines = ["", styled("LOOK AT THIS", "bold", colour=colour)]
    for text, style, way_out in found:
        lines += [styled(line, style, colour=colour) for line in folded(text, width)]
        lines += folded(f"way out: {way_out}", width, "  ") if way_out else []
    return lines


def _peer_lines(peers: Sequence[Message], *, colour: bool) -> list[str]:
    rows = [
        [
            peer["host"],
            host_state(peer),
            duration(peer["since_s"]),
            f"{1000 * peer['rtt_s']:.1f} ms" if peer["rtt_s"] is not None else NOTHING,
            peer["address"],
            printable(host_reason(peer) or NOTHING),
        ]
        for peer in peers
    ]
    if not rows:
        return []
    header = ["HOST", "STATE", "SINCE", "RTT", "ADDRESS", "REASON"]
    return ["", *table(header, rows, right=["SINCE", "RTT"], colour=colour)]


def problem_lines(devices: Sequence[Message]) -> list[str]:
    """Returns what is wrong with devices; what is wrong with several of them is said once."""
    having: dict[str, list[Message]] = {}
    for device in devices:
        for problem in device.get("problems") or ():
            having.setdefault(problem, []).append(device)
    return [f"device {devices_text(found)}: {printable(text)}" for text, found in having.items()]


def _daemon_lines(status: Message, width: int | None) -> list[str]:
    memory: Mapping[str, int] = status.get("memory") or {}
    who = f"tsliced {status['version']} on {status['host']}, pid {status['pid']}"
    facts = (
        f"{who}, up {duration(status['uptime_s'])}",
        f"driver {status.get('driver') or 'unknown'}, backend {status['backend']}",
        counted(status["sessions"], "session"),
        f"host memory {size(memory.get('available_bytes'))} available, "
        f"{size(memory.get('reserved_bytes'))} reserved",
    )
    lines = [facts[0]]
    for fact in facts[1:]:
        if width is None or len(lines[-1]) + 2 + len(fact) < width:
            lines[-1] += f"; {fact}"
        else:
            lines.append(fact)
    return lines


def _group_row(group: Message) -> list[str]:
    # While state is moved nobody holds the group yet; then it is who will that matters.
    holder: Message | None = group["holder"] or group.get("next")
    devices: list[Message] = group["devices"]
    return [
        group["name"],
        group["state"],
        user_name(holder["uid"]) if holder else NOTHING,
        job_text(holder) if holder else NOTHING,
        duration(group["lease_since_s"]),
        printable(group["phase"] or NOTHING),
        str(group["waiters"]) if group["waiters"] is not None else NOTHING,
        devices_text(devices),
        _memory_text(devices),
        busy_text(devices),
    ]


def _hosts_text(group: Message) -> str:
    """Returns a group's hosts, its arbiter first; of many only how many."""
    first, *others = group["hosts"]
    if len(others) > _MOST_HOSTS:
        return f"{first} and {len(others)} more"
    return ",".join([first, *others])


def _memory_text(devices: Sequence[Message]) -> str:
    if not devices:
        return NOTHING
    total = sum(device["total_bytes"] for device in devices)
    used = [device["used_bytes"] for device in devices]
    known = [count for count in used if count is not None]
    # Both in one unit, so that they can be compared at a glance.
    number, unit = size(total).split(" ")
    scale = total / float(number) if float(number) else 1.0
    text = f"{sum(known) / scale:.1f}" if len(known) == len(used) else "?"
    return f"{text} of {number} {unit}"


def busy_text(devices: Sequence[Message]) -> str:
    """Returns how busy devices are on average, as far as they say."""
    percents = [device["utilization_pct"] for device in devices]
    known = [percent for percent in percents if percent is not None]
    return f"{sum(known) / len(known):.0f}%" if known else NOTHING


def style_of_state(state: str) -> str:
    """Returns the style in which a state of a group, job or host is written."""
    return _STYLE_OF_STATE.get(state, "bold" if state == "waiting" else "none")


def _queue_lines(groups: Sequence[Message], *, colour: bool) -> list[str]:
    rows = [
        [
            group["name"],
            str(place),
            user_name(waiter["job"]["uid"]),
            job_text(waiter["job"]),
            duration(waiter["waited_s"]),
            printable(waiter["phase"] or NOTHING),
        ]
        for group in groups
        for place, waiter in enumerate(group["queue"], start=1)
    ]
    if not rows:
        return []
    header = ["GROUP", "PLACE", "USER", "JOB", "WAITED", "FOR PHASE"]
    return ["", *table(header, rows, right=["PLACE", "WAITED"], colour=colour)]


def _job_lines(jobs: Sequence[Message], *, colour: bool, width: int | None) -> list[str]:
    if not jobs:
        return ["", "No jobs."]
    rows = [
        [
            user_name(job["job"]["uid"]),
            job_text(job["job"]),
            state_of_job(job),
            duration(job["held_s"] or job["waited_s"] or None),
            ",".join(job.get("groups") or ()) or NOTHING,
            str(job["ranks"]),
            size(job["device_bytes"] or None),
            size(job["parked_bytes"] or None),
            duration(job.get("parked_s")),
            str(job["switches"]),
        ]
        for job in jobs
    ]
    # What is parked is in the memory of this host, and behind it for how long.
    header = ["USER", "JOB", "STATE", "SINCE", "GROUPS", "RANKS", "DEVICES", "PARKED", "FOR"]
    header.append("MOVES")
    right = ["SINCE", *header[5:]]
    lines = ["", *table(header, rows, right=right, colour=colour, width=width)]
    for job in jobs:
        lines += [_gathering_line(job, gathering) for gathering in job.get("gathering") or ()]
    return lines


def _gathering_line(job: Message, gathering: Message) -> str:
    """Says how many ranks of a round have asked, and which: what is missing is found by that."""
    arrived = gathering["arrived"]
    pids = ", ".join(str(pid) for pid in arrived)
    return (
        f"{job_text(job['job'])}: {len(arrived)} of {gathering['ranks']} ranks have asked for "
        f"{', '.join(gathering['groups'])} (pid {pids})"
    )


def rank_lines(
    ranks: Sequence[Message], *, colour: bool = False, width: int | None = None
) -> list[str]:
    """Returns the table of `tslicectl ps`, without line ends."""
    rows = [
        [
            job_text(rank["job"]) if rank["job"] else NOTHING,
            user_name(rank["uid"]),
            str(rank["pid"]),
            f"{rank['state']}, orphaned" if rank.get("orphaned") else rank["state"],
            _doing_text(rank),
            ",".join(rank["groups"]) or NOTHING,
            str(len(rank["devices"])),
            size(rank["device_bytes"]),
            printable(rank["name"]),
        ]
        for rank in ranks
    ]
    header = ["JOB", "USER", "PID", "STATE", "DOING", "GROUPS", "DEVICES", "MEMORY", "NAME"]
    return table(header, rows, right=["PID", "DEVICES", "MEMORY"], colour=colour, width=width)


def _doing_text(rank: Message) -> str:
    if not rank["doing"]:
        return NOTHING
    text = f"{rank['doing']} {duration(rank['doing_s'])}"
    # A daemon of version 1.0 does not say how far it is.
    if progress := rank.get("progress"):
        text += f" {progress['done_bytes'] / max(1, progress['total_bytes']):.0%}"
    return text
