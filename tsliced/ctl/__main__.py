"""tslicectl: the command line tool of tsliced."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from libtimeslice import __version__
from libtimeslice.errors import TimeSliceError
from tsliced.ctl import (
    attach,
    bench_switch,
    cluster,
    doctor,
    events,
    lease,
    observe,
    operate,
    qualify,
    report,
    rescue,
    run,
    show,
    slurm,
    status,
    top,
    trace,
    usage,
)
from tsliced.ctl.failures import DONE, SIGNALLED, CommandError, failure_from
from tsliced.ctl.options import Commands
from tsliced.ctl.output import print_json, say

_EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 not permitted,
            69 daemon unreachable, 75 busy or timed out; run passes on its command's
"""
_INTERRUPTED = SIGNALLED + 2
_FAMILIES = (
    *(status, top, show, lease, run, attach, events, report, usage, trace),
    *(operate, qualify, bench_switch, doctor, observe, rescue, cluster, slurm),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code: int = options.call(options)
        sys.stdout.flush()
        return code
    except TimeSliceError as error:
        return _report(failure_from(error), as_json=options.json)
    except CommandError as error:
        return _report(error, as_json=options.json)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read this, say `head`, has seen enough. Python must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a command; exits with 2 and a hint if they make no sense.

    What follows ``--`` belongs to the command that `tslicectl run` starts, and is not looked at.
    """
    before = list(arguments)
    command: list[str] = []
    if "--" in before:
        cut = before.index("--")
        before, command = before[:cut], before[cut + 1 :]
    parser = make_parser()
    options = parser.parse_args(before)
    if options.name == "run":
        if not command:
            parser.error("run: give the command behind --, as in: tslicectl run -- python train.py")
        options.command = command
    elif command:
        parser.error(f"{options.name} takes no command behind --")
    return options


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tslicectl",
        description="Look at and use the devices that tsliced shares between jobs.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tslicectl {__version__}")
    commands = Commands(parser)
    for family in _FAMILIES:
        family.add_commands(commands)
    return parser


def _report(error: CommandError, *, as_json: bool) -> int:
    if as_json:
        print_json({"error": {"code": error.code, "message": error.message}})
    else:
        say(error.message)
    return error.status


if __name__ == "__main__":
    sys.exit(main())
