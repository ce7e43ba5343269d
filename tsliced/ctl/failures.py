"""How a command of tslicectl ends: its exit codes, and the error that carries one.

0 done, 1 failed, 2 wrong usage, 3 not found, 4 not permitted, 69 daemon unreachable, 75 busy (the
last two as in sysexits.h). `tslicectl run` passes on the exit code of its command; 126 and 127 say,
as in a shell, that it could not be started or was not found.
"""

from __future__ import annotations

from collections.abc import Mapping

from libtimeslice.errors import DaemonUnreachable, TimeSliceError

DONE = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
NOT_PERMITTED = 4
UNREACHABLE = 69
BUSY = 75
CANNOT_EXECUTE = 126
COMMAND_NOT_FOUND = 127
#: A process that signal n ended has the exit code 128 + n, as in a shell.
SIGNALLED = 128

_STATUS_OF_CODE: Mapping[str, int] = {
    "bad_request": USAGE,
    "unknown_group": NOT_FOUND,
    "no_such_process": NOT_FOUND,
    "unknown_lease": NOT_FOUND,
    "not_found": NOT_FOUND,
    "not_permitted": NOT_PERMITTED,
    "timeout": BUSY,
    "shutting_down": BUSY,
    "unavailable": BUSY,
}


class CommandError(Exception):
    """A command cannot do what it was asked: `status` is its exit code, `code` a stable word."""

    def __init__(self, message: str, *, code: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status


def failure_from(error: TimeSliceError) -> CommandError:
    """Turns an error of the client library into the way in which the command ends."""
    if isinstance(error.__cause__, PermissionError):
        return CommandError(error.message, code="not_permitted", status=NOT_PERMITTED)
    if isinstance(error, DaemonUnreachable):
        return CommandError(error.message, code="unreachable", status=UNREACHABLE)
    return CommandError(
        error.message, code=error.code, status=_STATUS_OF_CODE.get(error.code, FAILED)
    )
