"""`tslicectl slurm`: what Slurm's hooks call: prolog, epilog and taskprolog; and a job's comment.

A hook that fails drains its node or requeues its job. So these end within a limit and with 0,
whatever becomes of the daemon, and say what was wrong to standard error and the system's log;
with ``--strict`` they fail.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import syslog
import time
from collections.abc import Callable, Mapping

from libtimeslice.connection import Connection
from libtimeslice.errors import DaemonUnreachable, TimeSliceError
from libtimeslice.fields import MAX_TEXT
from libtimeslice.protocol import Message
from tsliced.ctl.calls import socket_of
from tsliced.ctl.failures import DONE, CommandError, failure_from
from tsliced.ctl.history import Choice, read_events
from tsliced.ctl.options import Commands, positive_seconds
from tsliced.ctl.output import print_json, say

#: How long each hook may take, seconds.
_LIMITS_S = {"prolog": 3.0, "epilog": 9.0, "taskprolog": 2.0, "comment": 20.0}
#: How often it is looked whether something is left.
_LOOK_S = 0.2
#: What this has exported: a job that is submitted from within another one inherits it.
_OWN_EXPORTS = "TSLICE_FROM_SLURM"

_DESCRIPTION = """\
Called by Slurm's hooks, which say in their environment what it is about. prolog tells the daemon
of a job before anything of it runs; epilog ends what is left of one and looks at the devices;
taskprolog prints what tasks get in their environment. comment is no hook's, and what the daemon
calls: it puts what a job had of the devices into Slurm's own records of it. See docs/slurm.md.
"""


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    parser = commands.add("slurm", "what Slurm's hooks call", description=_DESCRIPTION)
    parser.add_argument("hook", choices=tuple(_LIMITS_S), help="which hook calls, or comment")
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=positive_seconds,
        help="end within this time (default: 3 for prolog, 9 for epilog, 2 for taskprolog, "
        "20 for comment)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="fail where the daemon cannot be reached or something is left: Slurm then drains "
        "the node",
    )
    parser.set_defaults(call=call_hook)


class _Deadline:
    """An instant until which something must have ended."""

    def __init__(self, limit_s: float) -> None:
        self._at = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Returns how long there is still; never nothing, so that what is ready is taken."""
        return max(0.05, self._at - time.monotonic())

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._at


def call_hook(options: argparse.Namespace) -> int:
    """Does what one of Slurm's hooks is for."""
    hooks: Mapping[str, Callable[[argparse.Namespace, _Deadline], None]] = {
        "prolog": _prolog,
        "epilog": _epilog,
        "taskprolog": _task_prolog,
        "comment": _comment,
    }
    limit_s = options.limit or _LIMITS_S[options.hook]
    try:
        hooks[options.hook](options, _Deadline(limit_s))
    except (TimeSliceError, CommandError) as error:
        failure = error if isinstance(error, CommandError) else failure_from(error)
        if options.strict:
            raise failure from error
        _warn(options.hook, failure.message)
    return DONE


def _warn(hook: str, text: str) -> None:
    job = os.environ.get("SLURM_JOB_ID", "unknown")
    say(f"{hook} of Slurm job {job}: {text}")
    syslog.openlog("tslicectl", 0, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_WARNING, f"{hook} of Slurm job {job}: {text}")


def _ask(daemon: Connection, deadline: _Deadline, **fields: object) -> Message:
    try:
        return daemon.request({"t": "slurm_job", **fields}, deadline.left_s())
    except TimeoutError as exc:
        raise DaemonUnreachable("the daemon did not answer in time") from exc


def _open(options: argparse.Namespace, deadline: _Deadline) -> Connection:
    return Connection.open(socket_of(options), role="tool", limit_s=deadline.left_s())


def _job() -> dict[str, object]:
    """Returns which job the hook is for, as the environment of slurmd's hooks says."""
    environ = os.environ
    try:
        uid = int(environ.get("SLURM_JOB_UID") or environ["SLURM_UID"])
        return {"job": environ["SLURM_JOB_ID"], "uid": uid}
    except (KeyError, ValueError) as exc:
        text = "SLURM_JOB_ID and SLURM_JOB_UID are not set: it is for Slurm's hooks to call this"
        raise CommandError(text, code="bad_request", status=2) from exc


# --- prolog and epilog ----------------------------------------------------------------------------


def _prolog(options: argparse.Namespace, deadline: _Deadline) -> None:
    environ, told = os.environ, _job()
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    # Without it, or if it is too long for the message, the daemon asks the controller.
    told["nodes"] = nodes if 0 < len(nodes) <= MAX_TEXT else None
    told["node"] = environ.get("SLURMD_NODENAME")
    told["account"] = environ.get("SLURM_JOB_ACCOUNT")
    with _open(options, deadline) as daemon:
        _ask(daemon, deadline, verb="began", **told)
    if options.json:
        print_json({"job": told["job"]})


def _epilog(options: argparse.Namespace, deadline: _Deadline) -> None:
    told = _job()
    with _open(options, deadline) as daemon:
        answer = _ask(daemon, deadline, verb="ended", **told)
        while not answer["over"] and not deadline.is_over:
            time.sleep(_LOOK_S)
            answer = _ask(daemon, deadline, verb="ended", **told)
    if options.json:
        print_json({key: answer[key] for key in ("over", "left", "problems")})
    problems = [*answer["problems"], *map(_left_text, answer["left"])]
    if problems:
        raise CommandError("; ".join(problems), code="left")


def _left_text(left: Message) -> str:
    mib = left["device_bytes"] / (1 << 20)
    name = f" ({left['name']})" if left["name"] else ""
    return f"process {left['pid']}{name} is left, with {mib:.0f} MiB on the devices"


# --- Slurm's own records --------------------------------------------------------------------------


def _comment(options: argparse.Namespace, deadline: _Deadline) -> None:
    """Puts what a job had of the devices into Slurm's own records of it."""
    # No other command needs it.
    from tsliced.observe import remarks

    told = _job()
    id = str(told["job"])
    with _open(options, deadline) as daemon:
        job = f"{daemon.welcome['job']['cluster']}/{told['uid']}/{id}"
        # Since it began, which one that was requeued has done before.
        beginnings = Choice(jobs=(job,), kinds=("job_began",))
        began = [event["at"] for event in read_events(daemon, beginnings)]
        choice = Choice(after_unix=began[-1] if began else None, kinds=remarks.KINDS)
        events = list(read_events(daemon, choice))
    text = remarks.remark_of(events, job, until_unix=time.time())
    try:
        has_place = remarks.put_remark(id, text, deadline.left_s)
    except remarks.SlurmError as error:
        raise CommandError(str(error), code="slurm") from error
    if options.json:
        print_json({"job": id, "comment": text if has_place else None})


# --- the task's environment -----------------------------------------------------------------------


def _task_prolog(options: argparse.Namespace, deadline: _Deadline) -> None:
    """Prints what Slurm puts into the environment of a task, in Slurm's words."""
    exports = {"SPT_NOENV": "1"}
    failure: TimeSliceError | None = None
    try:
        with _open(options, deadline) as daemon:
            welcome = daemon.welcome
    except TimeSliceError as error:
        failure = error
        if "SLURM_HET_SIZE" not in os.environ:
            # What the components of a job have as their number is not the same for all of them.
            exports["TSLICE_JOB_ID"] = os.environ.get("SLURM_JOB_ID", "")
    else:
        # Behind the dot is what this process has inherited for a name, perhaps of another job.
        exports["TSLICE_JOB_ID"] = welcome["job"]["id"].partition(".")[0]
        if usual := welcome.get("usual_groups"):
            exports["TSLICE_GROUPS"] = f"job={','.join(usual)}"
    earlier = set(shlex.split(os.environ.get(_OWN_EXPORTS, "")))
    chosen = {name: value for name, value in exports.items() if value and _is_free(name, earlier)}
    print(f"export TSLICE_SOCKET={socket_of(options)}")
    for name, value in chosen.items():
        print(f"export {name}={value}")
    print(f"export {_OWN_EXPORTS}={shlex.join(f'{k}={v}' for k, v in chosen.items())}")
    sys.stdout.flush()
    if failure is not None:
        raise failure


def _is_free(name: str, earlier: set[str]) -> bool:
    """Whether the user has not set a variable; what a hook set for another job does not count."""
    value = os.environ.get(name)
    return not value or f"{name}={value}" in earlier
