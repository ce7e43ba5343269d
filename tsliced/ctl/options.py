"""What the commands have in common on the command line, and types for their arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from libtimeslice.environment import check_name
from libtimeslice.fields import MAX_ID, MAX_NAME, MAX_PID, MAX_RANKS, MAX_TEXT, MAX_TIMEOUT_S

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

Number = TypeVar("Number", int, float)

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(B|KiB|MiB|GiB|TiB)?")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Commands:
    """The commands of tslicectl, to which each family of commands adds its own.

    ``--socket`` and ``--json`` may stand before or behind the name of a command.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        add_common_options(parser, socket=None, json=False)
        self._subparsers: Subparsers = parser.add_subparsers(
            dest="name", metavar="COMMAND", required=True
        )

    def add(
        self, name: str, help: str, *, description: str | None = None, usage: str | None = None
    ) -> argparse.ArgumentParser:
        """Declares a command and returns the parser of its options; ``help`` is one line."""
        text = description or f"{help[0].upper()}{help[1:]}."
        parser = self._subparsers.add_parser(name, help=help, description=text, usage=usage)
        # Without a default of its own, so that it does not undo what stood before the command.
        add_common_options(parser, socket=argparse.SUPPRESS, json=argparse.SUPPRESS)
        return parser


def add_common_options(
    parser: argparse.ArgumentParser, *, socket: str | None, json: bool | str
) -> None:
    """Declares ``--socket`` and ``--json`` with the given defaults."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        default=socket,
        help="the daemon's socket (default: $TSLICE_SOCKET, else /run/tsliced/tsliced.sock if it "
        "exists, else that of your own tsliced --user)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        default=json,
        help="print one JSON document on standard output, also for an error",
    )


def add_lease_options(parser: argparse.ArgumentParser) -> None:
    """Declares what to lease, for whom, and for how long to wait."""
    add_job_options(parser)
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        help="wait for at most so long, then exit with 75 (default: as long as it takes)",
    )
    parser.add_argument(
        "--phase", metavar="NAME", type=name, help="what the lease is for, shown to others"
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=limit_of(MAX_RANKS),
        default=1,
        help="so many processes of the job ask together, and are granted together (default 1)",
    )


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Declares the job and the groups that a command is about."""
    parser.add_argument(
        "--group",
        metavar="NAME",
        type=name,
        action="append",
        help="a group of devices; may be repeated (default: all that the job may use)",
    )
    parser.add_argument(
        "--job",
        metavar="ID",
        type=text,
        help="the job (default $TSLICE_JOB_ID, else the Slurm job, else this process)",
    )


def seconds(given: str) -> float:
    """A time from 0 on, in seconds."""
    return _number(given, float, 0, MAX_TIMEOUT_S, "a number of seconds")


def positive_seconds(given: str) -> float:
    """A pause in seconds, long enough to leave the daemon time for others."""
    return _number(given, float, 0.1, MAX_TIMEOUT_S, "a number of seconds")


def count(given: str) -> int:
    """A whole number from 0 on."""
    return _number(given, int, 0, MAX_ID, "a whole number")


def pid(given: str) -> int:
    """The id of a process."""
    return _number(given, int, 1, MAX_PID, "the id of a process")


def limit_of(most: int) -> Callable[[str], int]:
    """Returns the type of a whole number from 1 to ``most``."""

    def limit(given: str) -> int:
        return _number(given, int, 1, most, "a whole number")

    return limit


def size_of(given: str) -> int:
    """A number of bytes, as ``20GiB``, ``512MiB`` or ``1000000``."""
    match = _SIZE.fullmatch(given)
    if match is None:
        raise argparse.ArgumentTypeError(f"{given!r} is no size: write 20GiB, 512MiB or bytes")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def name(given: str) -> str:
    """The name of a group or phase."""
    try:
        return check_name("this", given)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"1 to {MAX_NAME} printable characters, please") from exc


def text(given: str) -> str:
    """The id of a job or lease."""
    if 0 < len(given) <= MAX_TEXT and given.isprintable():
        return given
    raise argparse.ArgumentTypeError(f"1 to {MAX_TEXT} printable characters, please")


def _number(given: str, kind: type[Number], least: float, most: float, what: str) -> Number:
    try:
        value = kind(given)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{given!r} is not {what}") from exc
    # Not a number compares as false, and is refused here too.
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{what} from {least:g} to {most:g}, please")
    return value
