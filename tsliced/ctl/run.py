"""`tslicectl run`: a command under a lease, for programs that know nothing of tsliced."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Mapping

from libtimeslice import TimeSlice
from libtimeslice.lease import Lease
from tsliced.ctl.calls import socket_of
from tsliced.ctl.failures import (
    CANNOT_EXECUTE,
    COMMAND_NOT_FOUND,
    SIGNALLED,
    CommandError,
)
from tsliced.ctl.holding import LOOK_S, is_lost, lease_for, open_client
from tsliced.ctl.options import Commands, add_lease_options
from tsliced.ctl.output import say
from tsliced.ctl.signals import Interrupted, SignalRelay

_DESCRIPTION = """\
Waits for a lease, runs COMMAND under it, and passes on its exit code and all signals. The lease
covers the whole run: a script that marks its phases with libtimeslice needs no `tslicectl run`, and
under it its own leases do nothing (TSLICE_MODE=off). COMMAND also finds TSLICE_JOB_ID and
TSLICE_TOKEN (the fencing token; GROUP=TOKEN,... for several groups) in its environment.
"""


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    parser = commands.add(
        "run",
        "run a command under a lease",
        description=_DESCRIPTION,
        usage="tslicectl run [OPTIONS] -- COMMAND [ARGUMENT ...]",
    )
    add_lease_options(parser)
    parser.add_argument(
        "--on-lost",
        choices=("keep", "kill"),
        default="keep",
        help="what to do with COMMAND if the lease is lost: keep it, or end it with SIGTERM; "
        "either way its device work is moved off when somebody waits (default keep)",
    )
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Runs ``options.command`` under a lease; returns its exit code, 128 + n after signal n."""
    program = find_program(options.command[0])
    try:
        with (
            SignalRelay() as relay,
            open_client(options) as client,
            lease_for(options, client) as lease,
        ):
            relay.start()
            environment = environment_for(options, client, lease)
            child = start(program, options.command, environment)
            relay.attach(child)
            code = wait_for(child, lease, kill_if_lost=options.on_lost == "kill")
    except Interrupted as interrupt:
        return SIGNALLED + interrupt.signum
    return SIGNALLED - code if code < 0 else code


def find_program(name: str) -> str:
    """Returns the path of a command; nobody shall wait for an hour to learn that it has a typo."""
    found = shutil.which(name)
    if found is not None:
        return found
    if os.path.exists(name):
        raise CommandError(f"cannot execute {name}", code="cannot_execute", status=CANNOT_EXECUTE)
    raise CommandError(
        f"command not found: {name}", code="command_not_found", status=COMMAND_NOT_FOUND
    )


def environment_for(
    options: argparse.Namespace, client: TimeSlice, lease: Lease
) -> Mapping[str, str]:
    """Returns the environment of the command."""
    tokens = lease.tokens
    return {
        **os.environ,
        "TSLICE_SOCKET": socket_of(options),
        "TSLICE_JOB_ID": client.job or "",
        "TSLICE_TOKEN": (
            str(next(iter(tokens.values())))
            if len(tokens) == 1
            else ",".join(f"{group}={token}" for group, token in tokens.items())
        ),
        # A second lease of the same job would queue up behind ours, for ever.
        "TSLICE_MODE": "off",
        # setproctitle writes over the environment, in which the daemon reads the job's id.
        "SPT_NOENV": "1",
    }


def start(
    program: str, command: list[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts the command; raises CommandError with the exit code of a shell if that fails."""
    try:
        return subprocess.Popen(command, executable=program, env=environment)
    except OSError as error:
        raise CommandError(
            f"cannot execute {command[0]}: {error.strerror}",
            code="cannot_execute",
            status=CANNOT_EXECUTE,
        ) from error


def wait_for(child: subprocess.Popen[bytes], lease: Lease, *, kill_if_lost: bool) -> int:
    """Waits until the command ends; returns its code as `subprocess` writes it."""
    told = False
    while True:
        try:
            return child.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            pass
        if not told and is_lost(lease):
            told = True
            say(f"the lease was lost: {lease.reason}")
            if kill_if_lost:
                child.terminate()
