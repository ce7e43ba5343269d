"""`tslicectl bench-switch`: what a full switch costs on this host, step by step."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from libtimeslice.connection import Connection
from libtimeslice.errors import DaemonUnreachable
from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, open_daemon, socket_of
from tsliced.ctl.failures import BUSY, DONE, NOT_FOUND, USAGE, CommandError
from tsliced.ctl.history import Choice, read_events
from tsliced.ctl.measured import leave
from tsliced.ctl.names import job_name, job_text
from tsliced.ctl.options import Commands, limit_of, name, positive_seconds, size_of, text
from tsliced.ctl.output import duration, folded, print_json, rate, say, screen_width, size, table

_DESCRIPTION = """\
Takes a job off its devices and brings it back, through the daemon and in turns with all others,
and says what each step took, how fast bytes went, and how fast this host could copy them. The job
is a running one (--job), or a process with --size of device memory that is made for it. The daemon
goes by what it learned when it says how long a move still takes, and `tslicectl observe` when it
estimates what sharing could give.
"""
#: A process that is made for it has so long to take its memory, seconds.
_BALLAST_LIMIT_S = 120.0
#: What a phase may lose to switches.
_OVERHEAD = 0.1
_STEPS = ("freeze", "snapshot", "restore", "thaw")
#: Device memory that is enough to see how fast the host copies; of small devices a quarter.
_YARDSTICK_BYTES = 256 << 20


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    parser = commands.add(
        "bench-switch", "measure what a full switch costs on this host", description=_DESCRIPTION
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--job", metavar="JOB", type=text, help="a running job: ID or UID/ID")
    what.add_argument(
        "--size", metavar="SIZE", type=size_of, help="make a process of so much: 20GiB, 512MiB"
    )
    parser.add_argument(
        "--group",
        metavar="NAME",
        type=name,
        help="on this group (default: the only one, or all of --job)",
    )
    parser.add_argument(
        "--device",
        metavar="N",
        type=int,
        default=0,
        help="index of the device for --size (default 0)",
    )
    parser.add_argument(
        "--times", metavar="N", type=limit_of(100), default=3, help="switches (default 3)"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=positive_seconds, default=600.0,
        help="longest wait for a turn (default 600)",
    )  # fmt: skip
    parser.add_argument(
        "--library", metavar="PATH", type=text, help="libcuda.so.1, if not the usual"
    )
    parser.set_defaults(call=bench_switch)


def bench_switch(options: argparse.Namespace) -> int:
    """Measures, and prints what was found."""
    with open_daemon(options) as asker:
        status: Message = ask(asker, "status")["status"]
        subject = _subject(options, status)
        begin = int(ask(asker, "events", limit=1)["next"])
        with _subject_ready(options, subject) as ballast:
            limits = _measure(options, subject, ballast)
        events = list(read_events(asker, Choice(since=begin, jobs=(subject.name,))))
        found = summary(events, limits)
        if found is None:
            raise CommandError("nothing was moved: the job has no state", code="not_moved")
        leave(options, found)
    if options.json:
        print_json(found)
    else:
        print("\n".join(lines_of(found, screen_width())))
    return DONE


# --- who is moved ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The job that is moved."""

    name: str
    id: str
    uid: int
    groups: tuple[str, ...]
    #: The smallest device of any group.
    least_bytes: int

    @property
    def foreign_uid(self) -> int | None:
        """Its user, if that is another than the caller."""
        return self.uid if self.uid != os.getuid() else None


def _subject(options: argparse.Namespace, status: Message) -> _Subject:
    groups = [group["name"] for group in status["groups"] if group["devices"]]
    sizes = [d["total_bytes"] for group in status["groups"] for d in group["devices"]]
    least = min(sizes, default=0)
    if options.job is None:
        if options.group is None and len(groups) != 1:
            text = f"say which group with --group: {', '.join(groups) or 'there is none'}"
            raise CommandError(text, code="bad_request", status=USAGE)
        own = f"bench-switch-{os.getpid()}"
        group = options.group or groups[0]
        return _Subject(
            name=f"{os.getuid()}/{own}",
            id=own,
            uid=os.getuid(),
            groups=(group,),
            least_bytes=least,
        )
    for job in status["jobs"]:
        if options.job in (job_name(job["job"]), job_text(job["job"]), job["job"]["id"]):
            if not job["ranks"]:
                break
            its = tuple(job["groups"]) if options.group is None else (options.group,)
            return _Subject(
                name=job_name(job["job"]),
                id=job["job"]["id"],
                uid=job["job"]["uid"],
                groups=its,
                least_bytes=least,
            )
    text = f"no job {options.job!r} has processes on the devices; see tslicectl status"
    raise CommandError(text, code="not_found", status=NOT_FOUND)


@contextmanager
def _subject_ready(options: argparse.Namespace, subject: _Subject) -> Iterator[Ballast | None]:
    """Yields when the job has its state on the devices; the process, if one was made for it."""
    if options.size is None:
        yield None
        return
    with _open(options, subject.id) as daemon:
        lease = _acquire(options, daemon, subject.groups)
        with Ballast(options, subject.id, options.size) as ballast:
            ask(daemon, "attach", pid=ballast.pid, groups=list(subject.groups))
            ask(daemon, "release", lease=lease)
            yield ballast


class Ballast:
    """A process with device memory: `cuda_ckpt.ballast`, which says how to talk to it."""

    def __init__(self, options: argparse.Namespace, job: str, count: int) -> None:
        command = [sys.executable, "-m", "cuda_ckpt.ballast"]
        command += [f"--bytes={count}", f"--device={options.device}"]
        if options.library is not None:
            command.append(f"--library={options.library}")
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "TSLICE_JOB_ID": job, "TSLICE_SOCKET": socket_of(options)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def __enter__(self) -> Ballast:
        try:
            told = self._read()
            if not told["ready"]:
                raise CommandError(f"no device memory: {told['message']}", code="no_memory")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def ask(self, question: str) -> dict[str, Any]:
        """Returns the answer to ``check`` or ``rate``; it must run: its job must have a lease."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _BALLAST_LIMIT_S)[0]:
            text = f"the process that was made for it did not answer in {_BALLAST_LIMIT_S:g} s"
            raise CommandError(text, code="timeout", status=BUSY)
        # Each answer is one line, and is asked for: nothing waits in the file's own buffer.
        line = self._process.stdout.readline()
        if not line:
            raise CommandError("the process that was made for it ended", code="failed")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        # One that is parked hears nothing else.
        self._process.kill()
        self._process.communicate(timeout=_BALLAST_LIMIT_S)


# --- measuring ------------------------------------------------------------------------------------


def _measure(
    options: argparse.Namespace, subject: _Subject, ballast: Ballast | None
) -> dict[str, Any]:
    """Lets another job and the subject take turns; returns how fast the host copies."""
    other = f"bench-switch-other-{os.getpid()}"
    limits: dict[str, Any] = {}
    with (
        _open(options, other) as away,
        _open(options, subject.id, subject.foreign_uid) as back,
    ):
        for number in range(options.times):
            lease = _acquire(options, away, subject.groups)
            if number == 0:
                count = min(_YARDSTICK_BYTES, subject.least_bytes // 4)
                limits = _yardstick(options, other, count)
            ask(away, "release", lease=lease)
            lease = _acquire(options, back, subject.groups)
            if ballast is not None and not ballast.ask("check")["intact"]:
                raise CommandError("the device memory came back changed", code="not_intact")
            ask(back, "release", lease=lease)
            say(f"switch {number + 1} of {options.times}")
    return limits


def _yardstick(options: argparse.Namespace, job: str, count: int) -> dict[str, Any]:
    """Returns how fast this host copies now; empty if no CUDA library can be used from here."""
    try:
        with Ballast(options, job, count) as ballast:
            return ballast.ask("rate")
    except CommandError as error:
        say(f"how fast the host copies is not known: {error.message}")
        return {}


def _open(options: argparse.Namespace, job: str, uid: int | None = None) -> Connection:
    return open_daemon(options, job=job, uid=uid)


def _acquire(options: argparse.Namespace, daemon: Connection, groups: Sequence[str]) -> str:
    """Returns a lease, when its turn has come. Raises CommandError if it does not."""
    limit_s = options.timeout + 30.0
    request: Message = {"t": "acquire", "groups": list(groups), "phase": "bench-switch"}
    request |= {"ranks": None, "arrive": "all", "timeout_s": options.timeout}
    try:
        answer = daemon.request(request, limit_s)
    except TimeoutError as exc:
        raise DaemonUnreachable(f"the daemon did not answer within {limit_s:.0f} s") from exc
    if answer.get("ack_s") is not None:
        daemon.send({"t": "ack", "lease": answer["lease"]})
    lease: str = answer["lease"]
    return lease


# --- what it comes to -----------------------------------------------------------------------------


def summary(events: Sequence[Message], limits: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the medians of all steps and moves; None if no state was moved. Times in seconds."""
    steps = {}
    for step in _STEPS:
        own = [e for e in events if e["kind"] == "operation" and e["verb"] == step]
        good = [event for event in own if event.get("reason") is None]
        if good:
            seconds = median(event["seconds"] for event in good)
            moved = int(median(event["bytes"] or 0 for event in good))
            pace = moved / seconds if moved and seconds else None
            steps[step] = {"seconds": seconds, "bytes": moved, "bytes_per_s": pace}
    if "snapshot" not in steps or "restore" not in steps:
        return None
    # Moves of a job without state have no such operations.
    copied = {e["epoch"] for e in events if e.get("verb") in ("snapshot", "restore")}
    moves = [event for event in events if event.get("epoch") in copied]
    off_s, on_s = (
        median(event["seconds"] for event in moves if event["kind"] == kind)
        for kind in ("evicted", "admitted")
    )
    switches = sum(event["kind"] == "admitted" for event in moves)
    # All ranks of the job together.
    moved = sum(e["bytes"] or 0 for e in events if e.get("verb") == "restore") // max(1, switches)
    return {
        "switches": switches,
        "bytes": moved,
        "steps": steps,
        "off_s": off_s,
        "on_s": on_s,
        "switch_s": off_s + on_s,
        "shortest_phase_s": (off_s + on_s) * (1 - _OVERHEAD) / _OVERHEAD,
        "copy_limit": limits or None,
    }


def lines_of(found: dict[str, Any], width: int | None = None) -> list[str]:
    """Returns what is printed for people, in lines of at most `width`."""
    limits = found["copy_limit"] or {}
    best = {"snapshot": limits.get("to_host"), "restore": limits.get("to_device")}
    rows = []
    for step, its in found["steps"].items():
        pace, limit = its["bytes_per_s"], best.get(step)
        rows.append(
            [
                step,
                duration(its["seconds"]),
                size(its["bytes"]) if its["bytes"] else "-",
                rate(pace),
                f"{pace / limit:.0%}" if pace and limit else "-",
            ]
        )
    header = ["STEP", "TIME", "BYTES", "RATE", "OF THE COPY LIMIT"]
    lines = table(header, rows, right=header[1:])
    if limits:
        kind = "page-locked" if limits["pinned"] else "pageable"
        text = (
            f"This host copies {rate(limits['to_host'])} off a device and "
            f"{rate(limits['to_device'])} onto one ({kind} memory), {rate(limits['used_pages'])} "
            f"within its memory, {rate(limits['fresh_pages'])} into pages that are fresh."
        )
        lines += ["", *folded(text, width)]
    cost = (
        f"A full switch of {size(found['bytes'])} costs {duration(found['switch_s'])}: "
        f"{duration(found['off_s'])} off and {duration(found['on_s'])} on "
        f"(medians of {found['switches']})."
    )
    phase = (
        f"A phase should last {duration(found['shortest_phase_s'])} or longer, so that no more "
        "than a tenth goes into switches."
    )
    return [*lines, "", *folded(cost, width), *folded(phase, width)]
