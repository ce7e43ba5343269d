"""What to do about what stands still: `tslicectl retry`, `clear`, `kill`, `drain`, `host-dead`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from libtimeslice.connection import Connection
from libtimeslice.errors import TimeSliceError
from libtimeslice.protocol import KILL_GRACE_S, Message
from tsliced.ctl.calls import ask, open_daemon
from tsliced.ctl.failures import BUSY, DONE, FAILED, USAGE, CommandError
from tsliced.ctl.names import job_name, job_text
from tsliced.ctl.options import Commands, name, seconds, text
from tsliced.ctl.output import duration, print_json, printable, say

#: How often it is looked whether something that was ordered is done, in seconds.
_LOOK_S = 0.2
#: What a kill has after the grace: the kernel frees device memory, and a driver call ends.
_END_LIMIT_S = 30.0

_JOB_HELP = "the job: its id, UID/ID, or CLUSTER/UID/ID"
_HOST_DEAD = """\
Says that every process of another host is gone for good: the machine is off, or was started anew.
Leases of its jobs are revoked, and who waited for it goes on without it. The daemon cannot see that
by itself, for a host that is silent may only be cut off. If a process there still runs, two jobs
may use the same devices, or a job goes on without a part of itself. All hosts that this one has
links with are told, and tell those that they have links with; a host that has no way to any of them
has to be told there. It stands until the host is back.
"""
_PARKED_NOTE = (
    "parked processes have no device memory but still have the driver open; to unload it or to "
    "reset a device, end them too: tslicectl kill JOB"
)


def add_commands(commands: Commands) -> None:
    """Declares the commands of this module."""
    retry = commands.add("retry", "try again now what failed for a job, without its pause")
    clear = commands.add("clear", "take a job's fault, PINNED or BLOCKED back")
    kill = commands.add(
        "kill",
        "end all processes of a job: SIGTERM, and after a grace SIGKILL; parked ones at once",
    )
    for parser, call in ((retry, retry_job), (clear, clear_job), (kill, kill_job)):
        parser.add_argument("job", metavar="JOB", type=text, help=_JOB_HELP)
        parser.set_defaults(call=call)
    kill.add_argument(
        "--grace",
        metavar="SECONDS",
        type=seconds,
        default=KILL_GRACE_S,
        help=f"from SIGTERM to SIGKILL (default {KILL_GRACE_S:g})",
    )
    kill.add_argument("--yes", action="store_true", help="do not ask first, on a terminal")
    kill.add_argument("--no-wait", action="store_true", help="do not wait until they have ended")
    drain = commands.add(
        "drain", "let nobody more onto groups; who holds them keeps them to the end of the lease"
    )
    resume = commands.add("resume", "let jobs onto drained groups again")
    for parser in (drain, resume):
        parser.add_argument(
            "--group", metavar="NAME", type=name, action="append", help="may be repeated"
        )
        parser.add_argument(
            "--device", metavar="DEVICE", type=text, help="the group of this UUID or index"
        )
        parser.set_defaults(call=drain_groups)
    drain.add_argument(
        "--park",
        action="store_true",
        help="also take off the devices what nobody holds (implied by --device)",
    )
    drain.add_argument("--reason", metavar="TEXT", type=text, help="told to those who wait")
    drain.add_argument(
        "--wait", action="store_true", help="wait until nobody holds them, and all is parked"
    )
    drain.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, help="of --wait; then exit with 75"
    )
    dead = commands.add(
        "host-dead", "say that all processes of a lost host are gone", description=_HOST_DEAD
    )
    dead.add_argument("host", metavar="HOST", type=name, help="the name of the other host")
    dead.add_argument("--reason", metavar="TEXT", type=text, help="for the log")
    dead.add_argument("--yes", action="store_true", help="it is certain: do not ask")
    dead.set_defaults(call=give_host_up)


# --- jobs -----------------------------------------------------------------------------------------


def retry_job(options: argparse.Namespace) -> int:
    """Has what failed tried again."""
    return _order(options, "retry", "is tried again")


def clear_job(options: argparse.Namespace) -> int:
    """Has what a job is held back for forgotten."""
    return _order(options, "clear", "is taken back")


def _order(options: argparse.Namespace, verb: str, done: str) -> int:
    with open_daemon(options) as daemon:
        answer = ask(daemon, verb, job=options.job)
    if options.json:
        print_json({"job": answer["job"], "stood": answer["stood"]})
        return DONE
    for stop in answer["stood"]:
        where = f" on {', '.join(stop['groups'])}" if stop["groups"] else ""
        print(
            f"{job_name(answer['job'])}: {stop['state']}{where} {done}: {printable(stop['reason'])}"
        )
    if not answer["stood"]:
        say(f"nothing held {job_name(answer['job'])} back; pauses before another try are over")
    return DONE


def kill_job(options: argparse.Namespace) -> int:
    """Has all processes of a job ended, and waits until they are."""
    with open_daemon(options) as daemon:
        if not options.yes and sys.stdin.isatty() and not _confirmed(daemon, options.job):
            return FAILED
        answer = ask(daemon, "kill", job=options.job, grace_s=options.grace)
        job = job_name(answer["job"])
        left: Sequence[int] = answer["pids"]
        if not options.no_wait:
            left = _await_end(daemon, job, options.grace + _END_LIMIT_S)
    if options.json:
        ended = not (left or options.no_wait)
        print_json({"job": answer["job"], "pids": answer["pids"], "left": left, "ended": ended})
    elif options.no_wait:
        print(f"{len(left)} processes of {job} are asked to end: {_pids(left)}")
    elif not left:
        print(f"{len(answer['pids'])} processes of {job} have ended: {_pids(answer['pids'])}")
    if left and not options.no_wait:
        say(f"these processes of {job} have not ended: {_pids(left)}")
        return FAILED
    return DONE


def _confirmed(daemon: Connection, job: str) -> bool:
    shown = ask(daemon, "show", kind="job", name=job)["shown"]
    pids = _processes(shown)
    name = printable(shown["name"])
    return _is_sure(f"End {len(pids)} processes of {name} ({_pids(pids)})? [y/N] ")


def _await_end(daemon: Connection, job: str, limit_s: float) -> list[int]:
    """Waits until the daemon knows no process of a job; returns those that are left."""
    end = time.monotonic() + limit_s
    while True:
        try:
            left = _processes(ask(daemon, "show", kind="job", name=job)["shown"])
        except TimeSliceError as error:
            if error.code != "not_found":
                raise
            return []
        if not left or time.monotonic() > end:
            return left
        time.sleep(_LOOK_S)


def _processes(shown: Message) -> list[int]:
    entries = [*shown["rank_list"], *shown["sessions"]]
    return list(dict.fromkeys(entry["pid"] for entry in entries))


def _pids(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids)) or "none"


# --- hosts ----------------------------------------------------------------------------------------


def give_host_up(options: argparse.Namespace) -> int:
    """Has a host that is lost taken for dead, if whoever asks for it is sure."""
    host: str = options.host
    if not options.yes:
        if not sys.stdin.isatty():
            what = f"--yes says that no process of {host} is left; see tslicectl host-dead --help"
            raise CommandError(what, code="bad_request", status=USAGE)
        say(_HOST_DEAD.rstrip())
        if not _is_sure(f"Is {host} dead, with all its processes? [y/N] "):
            return FAILED
    with open_daemon(options) as daemon:
        ask(daemon, "host_dead", host=host, why=options.reason)
    if options.json:
        print_json({"host": host})
    else:
        print(f"{host} is taken for dead; see tslicectl events")
    return DONE


def _is_sure(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# --- groups ---------------------------------------------------------------------------------------


def drain_groups(options: argparse.Namespace) -> int:
    """Closes groups, or opens them again."""
    if options.device is not None and options.group is not None:
        raise CommandError("give --group or --device, not both", code="bad_request", status=2)
    wanted = {"groups": options.group, "device": options.device}
    with open_daemon(options) as daemon:
        if options.name == "resume":
            groups = ask(daemon, "undrain", **wanted)["groups"]
        else:
            park = options.park or options.device is not None
            answer = ask(daemon, "drain", **wanted, park=park, why=options.reason)
            groups = answer["groups"]
            if options.wait:
                groups = _await_drained(daemon, [g["name"] for g in groups], options.timeout)
    if options.json:
        print_json({"groups": groups})
    else:
        print("\n".join(line for group in groups for line in _drain_lines(group)))
        parked = any(rank["state"] == "parked" for g in groups for rank in g["rank_list"])
        if parked and options.name == "drain":
            say(_PARKED_NOTE)
    busy = options.name == "drain" and options.wait and any(map(_is_draining, groups))
    return BUSY if busy else DONE


def _await_drained(
    daemon: Connection, names: Sequence[str], timeout_s: float | None
) -> list[Message]:
    end = time.monotonic() + timeout_s if timeout_s is not None else None
    while True:
        groups = [ask(daemon, "show", kind="group", name=name)["shown"] for name in names]
        late = end is not None and time.monotonic() > end
        if late or not any(map(_is_draining, groups)):
            return groups
        time.sleep(_LOOK_S)


def _is_draining(group: Message) -> bool:
    return str(group["state"]) != "drained"


def _drain_lines(group: Message) -> list[str]:
    holder: Message | None = group["holder"]
    lines = [f"{group['name']} is {group['state']}"]
    if holder is not None:
        since = duration(group["lease_since_s"])
        lines[0] += f"; {job_text(holder)} holds it for {since}, and may go on"
    if group["waiters"]:
        lines[0] += f"; {group['waiters']} wait"
    for rank in group["rank_list"]:
        what = "parked" if rank["state"] == "parked" else f"on it, {rank['state']}"
        lines.append(f"  {job_text(rank['job'])} pid {rank['pid']}: {what}")
    for stop in group["standstills"]:
        lines.append(f"  {job_name(stop['job'])} is {stop['state']}: {printable(stop['reason'])}")
        lines.append(f"    way out: {printable(stop['way_out'])}")
    return lines
