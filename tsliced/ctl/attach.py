"""`tslicectl attach`: makes a running process, which never calls us, known as a rank of a job."""

from __future__ import annotations

import argparse
import contextlib
import os
import select

from libtimeslice.protocol import Message
from tsliced.ctl.calls import ask, open_daemon
from tsliced.ctl.failures import DONE, FAILED, NOT_FOUND, CommandError
from tsliced.ctl.holding import LOOK_S, facts_of, is_lost, lease_for, open_client
from tsliced.ctl.options import Commands, add_lease_options, pid
from tsliced.ctl.output import print_json, say

_DESCRIPTION = """\
Makes a running process known as a rank of a job, so that its device state is moved with the job's.
With --hold, also waits for a lease for that job and holds it until the process ends or Ctrl-C.
"""


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    parser = commands.add(
        "attach", "make a running process known as a rank of a job", description=_DESCRIPTION
    )
    parser.add_argument("pid", metavar="PID", type=pid, help="the process")
    add_lease_options(parser)
    parser.add_argument(
        "--hold", action="store_true", help="hold a lease until the process ends or Ctrl-C"
    )
    parser.set_defaults(call=attach)


def attach(options: argparse.Namespace) -> int:
    """Attaches the process, and holds a lease for it if asked to."""
    # Opened first: from here on it is this process that is meant, whoever gets its number later.
    process = open_process(options.pid)
    try:
        options.job = options.job or job_of_process(options.pid)
        with open_daemon(options, job=options.job, uid=user_of_process(options.pid)) as daemon:
            answer = ask(daemon, "attach", pid=options.pid, groups=options.group)
            job: str = daemon.welcome["job"]["id"]
        if options.hold:
            return hold(options, process)
    finally:
        os.close(process)
    _print_rank(options, answer, job)
    return DONE


def open_process(number: int) -> int:
    """Returns a descriptor of the process that becomes readable when it ends."""
    try:
        return os.pidfd_open(number)
    except ProcessLookupError as error:
        raise CommandError(
            f"there is no process {number}", code="no_such_process", status=NOT_FOUND
        ) from error
    except OSError as error:
        raise CommandError(
            f"process {number} cannot be watched: {error.strerror}", code="no_such_process"
        ) from error


def user_of_process(number: int) -> int | None:
    """Returns the user of a process, or None if it is of the caller: its job is of that user."""
    with contextlib.suppress(OSError), open(f"/proc/{number}/status") as file:
        line = next(line for line in file if line.startswith("Uid:"))
        uid = int(line.split()[1])
        return None if uid == os.getuid() else uid
    return None


def job_of_process(number: int) -> str:
    """Returns the job that a process says it is of, else a name made of its number."""
    try:
        with open(f"/proc/{number}/environ", "rb") as file:
            variables = dict(
                entry.partition(b"=")[::2] for entry in file.read().split(b"\0") if b"=" in entry
            )
    except OSError:
        variables = {}
    for variable in (b"TSLICE_JOB_ID", b"SLURM_JOB_ID"):
        if variables.get(variable):
            return variables[variable].decode(errors="replace")
    return f"pid-{number}"


def hold(options: argparse.Namespace, process: int) -> int:
    """Holds a lease for the job until the process ends or Ctrl-C."""
    with open_client(options) as client, lease_for(options, client) as lease:
        facts = facts_of(lease, client)
        try:
            if options.json:
                print_json({**facts, "pid": options.pid})
            else:
                print(facts["lease"], flush=True)
            while not select.select([process], [], [], LOOK_S)[0]:
                if is_lost(lease):
                    raise CommandError(
                        f"the lease was lost: {lease.reason}", code="lease_ended", status=FAILED
                    )
        except KeyboardInterrupt:
            return DONE
    say(f"process {options.pid} has ended")
    return DONE


def _print_rank(options: argparse.Namespace, answer: Message, job: str) -> None:
    if options.json:
        print_json({"job": job, "rank": answer["rank"], "groups": answer["groups"]})
    else:
        groups = ", ".join(answer["groups"]) or "no group yet"
        print(f"process {options.pid} is a rank of job {job} in {groups}")
