"""`tslicectl acquire` and `tslicectl release`: a lease that a shell holds over several commands."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from types import FrameType

from tsliced.ctl import holder
from tsliced.ctl.failures import DONE, FAILED, SIGNALLED, CommandError
from tsliced.ctl.holding import LOOK_S, facts_of, is_lost, lease_for, open_client
from tsliced.ctl.options import Commands, add_lease_options, text
from tsliced.ctl.output import print_json, say

_ACQUIRE = """\
Waits for a lease, prints its id, and leaves a small process behind that holds it until
`tslicectl release`. With --foreground this process holds it itself, until standard input ends or
Ctrl-C.
"""


def add_commands(commands: Commands) -> None:
    """Declares the commands of this module."""
    acquire = commands.add("acquire", "wait for a lease and hold it", description=_ACQUIRE)
    add_lease_options(acquire)
    acquire.add_argument(
        "--foreground", action="store_true", help="hold until standard input ends or Ctrl-C"
    )
    acquire.set_defaults(call=acquire_lease)
    release = commands.add("release", "give back a lease that `tslicectl acquire` got")
    release.add_argument("lease", metavar="LEASE", type=text, help="the id that acquire printed")
    release.set_defaults(call=release_lease)


def acquire_lease(options: argparse.Namespace) -> int:
    """Waits for a lease and prints its id, or with ``--json`` all about it."""
    if options.foreground:
        return hold_in_foreground(options)
    _print_grant(holder.start(options), as_json=options.json)
    return DONE


def release_lease(options: argparse.Namespace) -> int:
    """Tells the process that holds the lease to release it, and prints what it answers."""
    answer = holder.tell_release(options.lease)
    if options.json:
        print_json(answer)
    elif answer["waiters"]:
        say(f"released; {answer['waiters']} waited for it")
    else:
        say("released; nobody waits, so the device state stays where it is")
    return DONE


def hold_in_foreground(options: argparse.Namespace) -> int:
    """Holds a lease until standard input ends or a signal comes."""
    # All that ends us runs the same way, through the end of the `with`.
    signal.signal(signal.SIGTERM, _end)
    with open_client(options) as client, lease_for(options, client) as lease:
        try:
            _print_grant(facts_of(lease, client), as_json=options.json)
            while not _input_ended():
                if is_lost(lease):
                    raise CommandError(
                        f"the lease was lost: {lease.reason}", code="lease_ended", status=FAILED
                    )
        except KeyboardInterrupt:
            pass
    return DONE


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(SIGNALLED + signum)


def _input_ended() -> bool:
    """Waits a moment for standard input; returns True at its end."""
    ready, _, _ = select.select([0], [], [], LOOK_S)
    return bool(ready) and not os.read(0, 4096)


def _print_grant(facts: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        print(facts["lease"], flush=True)
