"""`tslicectl show`: all that is known of one job, group, device, session, lease or host."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, open_daemon
from tsliced.ctl.failures import DONE
from tsliced.ctl.names import devices_text, job_name, job_text, move_text, user_name
from tsliced.ctl.options import Commands, text
from tsliced.ctl.output import (
    NOTHING,
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
from tsliced.ctl.qualify import qualification_lines
from tsliced.ctl.status import host_reason, host_state, problem_lines, rank_lines, state_of_job

#: How a line in red begins and ends.
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"

_KINDS = ("job", "group", "device", "session", "lease", "host")


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    show = commands.add(
        "show", "show all that is known of one job, group, device, session, lease or host"
    )
    show.add_argument("kind", choices=_KINDS, help="what it is")
    show.add_argument(
        "thing",
        metavar="ID",
        type=text,
        help="a job's id, UID/ID or CLUSTER/UID/ID; a group's name; a device's UUID or index; "
        "a session's or lease's id; the name of another host",
    )
    show.set_defaults(call=show_one)


def show_one(options: argparse.Namespace) -> int:
    """Prints what is known, for people or as one JSON document."""
    with open_daemon(options) as daemon:
        shown: Message = ask(daemon, "show", kind=options.kind, name=options.thing)["shown"]
    if options.json:
        print_json({"shown": shown})
    else:
        colour, width = use_colour(sys.stdout), screen_width()
        print("\n".join(shown_lines(shown, colour=colour, width=width)))
    return DONE


def shown_lines(shown: Message, *, colour: bool = False, width: int | None = None) -> list[str]:
    """Returns the page about one thing, without line ends; `width`: what a line may have."""
    pages: Mapping[str, Callable[..., list[str]]] = {
        "job": _job_page,
        "group": _group_page,
        "device": _device_page,
        "session": _session_page,
        "lease": _lease_page,
        "host": _host_page,
    }
    lines = pages[shown["kind"]](shown, colour=colour)
    return [part for line in lines for part in _folded(line, width)]


def _folded(line: str, width: int | None) -> list[str]:
    """Folds a sentence; what has columns, which are two spaces apart, is left as it is."""
    text = line.lstrip()
    bare = text.removeprefix(_RED).removesuffix(_PLAIN)
    if "  " in bare:
        return [line]
    parts = folded(bare, width, line[: len(line) - len(text)])
    return parts if bare == text else [styled(part, "red", colour=True) for part in parts]


def _job_page(job: Message, *, colour: bool) -> list[str]:
    lines = _facts(
        ("job", printable(job["name"])),
        ("user", user_name(job["job"]["uid"])),
        ("state", state_of_job(job)),
        ("ranks", str(job["ranks"])),
        ("on devices", size(job["device_bytes"])),
        ("parked", size(job["parked_bytes"])),
        ("parked for", duration(job.get("parked_s"))),
        ("moving", move_text(job["move"]) if job.get("move") else NOTHING),
        ("held", duration(job["held_s"] or None)),
        ("waited", duration(job["waited_s"] or None)),
        ("switches", str(job["switches"])),
    )
    # A daemon of version 1.0 knows no allocations.
    for slurm in job.get("allocations", ()):
        lines += _allocation(slurm)
    lines += _standstills(job["standstills"], colour=colour)
    lines += _tenancies(job["tenancies"], colour=colour)
    lines += _ranks(job["rank_list"], colour=colour)
    # A daemon of version 1.1 does not say.
    if (qualification := job.get("qualification")) is not None:
        lines += ["", *qualification_lines(qualification)]
    lines += _leases(job["leases"], colour=colour)
    return lines + _sessions(job["sessions"], colour=colour)


def _allocation(slurm: Message) -> list[str]:
    end = slurm["ends_at_unix"]
    left = duration(max(0.0, end - time.time())) if end is not None else NOTHING
    tickets = "" if slurm["tickets"] is None else f", {slurm['tickets']} of its node's tickets"
    return _facts(
        ("Slurm job", f"{slurm['slurm_job']}{tickets}{', ending' if slurm['ending'] else ''}"),
        ("account", printable(slurm["account"] or NOTHING)),
        ("nodes", printable(", ".join(slurm["nodes"]) or NOTHING)),
        ("time left", left),
    )


def _group_page(group: Message, *, colour: bool) -> list[str]:
    drain: Message | None = group["drain"]
    lines = _facts(
        ("group", group["name"]),
        ("state", group["state"]),
        # What it stands still for is said below, with the way out.
        ("reason", NOTHING if group["standstills"] else printable(group["reason"] or NOTHING)),
        # A daemon of version 1.0 knows no other hosts.
        ("hosts", ", ".join(group.get("hosts", ())) or NOTHING),
        ("arbiter", group.get("arbiter", NOTHING)),
        ("drained by", printable(drain["by"]) if drain else NOTHING),
        ("drained for", duration(drain["since_s"]) if drain else NOTHING),
        ("devices", devices_text(group["devices"])),
        ("holder", job_text(group["holder"]) if group["holder"] else NOTHING),
        ("next", job_text(group["next"]) if group["next"] else NOTHING),
        ("since", duration(group["lease_since_s"])),
        ("phase", printable(group["phase"] or NOTHING)),
        ("moving", move_text(group["move"]) if group.get("move") else NOTHING),
        ("token", str(group["token"] or NOTHING)),
        ("waiters", str(group["waiters"]) if group["waiters"] is not None else NOTHING),
    )
    lines += _standstills(group["standstills"], colour=colour)
    rows = [
        [str(place), job_text(w["job"]), duration(w["waited_s"]), printable(w["phase"] or NOTHING)]
        for place, w in enumerate(group["queue"], start=1)
    ]
    lines += _table(["PLACE", "JOB", "WAITED", "FOR PHASE"], rows, colour=colour)
    lines += _tenancies(group["tenancies"], colour=colour)
    return lines + _ranks(group["rank_list"], colour=colour)


def _device_page(device: Message, *, colour: bool) -> list[str]:
    lines = _facts(
        ("device", device["uuid"]),
        ("index", str(device["index"])),
        ("name", printable(device["name"])),
        ("memory", f"{size(device['used_bytes'])} of {size(device['total_bytes'])}"),
        ("group", device["group"]["name"]),
    )
    lines += [styled(text, "yellow", colour=colour) for text in problem_lines([device])]
    lines += _ranks(device["rank_list"], colour=colour)
    return [*lines, "", *_group_page(device["group"], colour=colour)]


def _session_page(session: Message, *, colour: bool) -> list[str]:
    lines = _facts(
        ("session", session["session"]),
        ("job", job_name(session["job"])),
        ("pid", str(session["pid"])),
        ("connected", "yes" if session["connected"] else "no"),
        ("agent", "yes" if session["agent"] else "no"),
        ("hooks", "yes" if session["hooks"] else "no"),
        ("may lease", ", ".join(session["groups"]) or NOTHING),
    )
    return lines + _leases(session["leases"], colour=colour)


def _lease_page(lease: Message, *, colour: bool) -> list[str]:
    return _facts(
        ("lease", lease["lease"]),
        ("job", job_name(lease["job"])),
        ("session", lease["session"]),
        ("pid", str(lease["pid"])),
        ("groups", ", ".join(lease["groups"])),
        ("phase", printable(lease["phase"] or NOTHING)),
        ("state", lease["state"]),
        ("since", duration(lease["since_s"])),
        ("tokens", ", ".join(f"{group}={n}" for group, n in lease["tokens"].items()) or NOTHING),
        ("ranks", f"{lease['arrived']} of {lease['ranks']}"),
        ("waiters", str(lease["waiters"]) if lease["waiters"] is not None else NOTHING),
        ("reason", printable(lease["reason"] or NOTHING)),
    )


def _host_page(host: Message, *, colour: bool) -> list[str]:
    rtt_s, ahead_s, state = host["rtt_s"], host["clock_ahead_s"], host_state(host)
    return _facts(
        ("host", host["host"]),
        ("state", styled(state, "red", colour=colour and state in ("lost", "dead"))),
        ("since", duration(host["since_s"])),
        ("reason", printable(host_reason(host) or NOTHING)),
        ("address", host["address"]),
        ("round trip", f"{1000 * rtt_s:.1f} ms" if rtt_s is not None else NOTHING),
        ("clock ahead", f"{ahead_s:+.3f} s" if ahead_s is not None else NOTHING),
        ("version", host["version"] or NOTHING),
        ("incarnation", host["incarnation"] or NOTHING),
        ("groups", ", ".join(host.get("groups", ())) or NOTHING),
    )


def _facts(*facts: tuple[str, str]) -> list[str]:
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {value}" for name, value in facts if value != NOTHING]


def _standstills(stops: Sequence[Message], *, colour: bool) -> list[str]:
    lines: list[str] = []
    for stop in stops:
        where = f" on {', '.join(stop['groups'])}" if stop["groups"] else ""
        whose = f"{job_name(stop['job'])}: " if "job" in stop else ""
        since = duration(stop["since_s"])
        head = f"{whose}{stop['state'].upper()}{where} for {since}: {printable(stop['reason'])}"
        lines += [
            "",
            styled(head, "red", colour=colour),
            f"  way out: {printable(stop['way_out'])}",
        ]
    return lines


def _tenancies(tenancies: Sequence[Message], *, colour: bool) -> list[str]:
    rows = [
        [
            job_text(tenancy["job"]),
            ",".join([*tenancy["groups"], *tenancy["beyond"]]),
            tenancy["state"],
            duration(tenancy["moving_s"]),
            str(tenancy["ranks"]),
            str(tenancy["switches"]),
        ]
        for tenancy in tenancies
    ]
    header = ["JOB", "GROUPS", "PLACE", "MOVING", "RANKS", "SWITCHES"]
    return _table(header, rows, colour=colour) + _waits(tenancies)


def _waits(tenancies: Sequence[Message]) -> list[str]:
    """Returns a line for each move that waits for somebody just now."""
    lines = []
    for tenancy in tenancies:
        # A daemon of version 1.0 does not say.
        if waiting := tenancy.get("waiting"):
            missing = "; ".join(printable(host["text"]) for host in waiting["missing"])
            since = duration(waiting["waiting_s"])
            lines += ["", f"{waiting['step']} waits since {since} for {missing}"]
    return lines


def _ranks(ranks: Sequence[Message], *, colour: bool) -> list[str]:
    return ["", *rank_lines(ranks, colour=colour)] if ranks else []


def _leases(leases: Sequence[Message], *, colour: bool) -> list[str]:
    rows = [
        [
            lease["lease"],
            lease["state"],
            duration(lease["since_s"]),
            ",".join(lease["groups"]),
            printable(lease["phase"] or NOTHING),
            printable(lease["reason"] or NOTHING),
        ]
        for lease in leases
    ]
    return _table(["LEASE", "STATE", "SINCE", "GROUPS", "PHASE", "REASON"], rows, colour=colour)


def _sessions(sessions: Sequence[Message], *, colour: bool) -> list[str]:
    rows = [
        [session["session"], str(session["pid"]), "yes" if session["connected"] else "no"]
        for session in sessions
    ]
    return _table(["SESSION", "PID", "CONNECTED"], rows, colour=colour)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, colour: bool) -> list[str]:
    return ["", *table(header, rows, colour=colour)] if rows else []
