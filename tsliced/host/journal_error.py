"""What goes wrong with the journal, in codes that a caller can act upon."""

from __future__ import annotations

import errno
import sqlite3
from enum import Enum
from pathlib import Path


class JournalCode(Enum):
    """Stable codes of journal errors; they travel into logs and answers."""

    #: Another daemon uses the directory.
    LOCKED = "journal_locked"
    #: No space, no quota, or the file size limit: a later write may succeed.
    FULL = "journal_full"
    #: No permission, or the file system is read-only.
    READ_ONLY = "journal_read_only"
    #: Written by a newer version.
    NEWER = "journal_newer"
    #: The files do not hold what was written to them.
    CORRUPT = "journal_corrupt"
    #: One batch is larger than a frame may be.
    TOO_LARGE = "journal_too_large"
    #: The helper thread has too much to do: a later call may succeed.
    BUSY = "journal_busy"
    CLOSED = "journal_closed"
    #: Any other error of the operating system.
    IO = "journal_io"


class JournalError(Exception):
    """A journal operation failed and nothing of it is remembered.

    `code` says what kind of trouble it is, `str()` what to do about it.
    """

    def __init__(self, code: JournalCode, text: str) -> None:
        super().__init__(text)
        self.code = code


_OF_ERRNO = {
    errno.ENOSPC: JournalCode.FULL,
    errno.EDQUOT: JournalCode.FULL,
    errno.EFBIG: JournalCode.FULL,
    errno.EROFS: JournalCode.READ_ONLY,
    errno.EACCES: JournalCode.READ_ONLY,
    errno.EPERM: JournalCode.READ_ONLY,
}

#: By primary result code, https://www.sqlite.org/rescode.html
_OF_SQLITE = {
    sqlite3.SQLITE_FULL: JournalCode.FULL,
    sqlite3.SQLITE_READONLY: JournalCode.READ_ONLY,
    sqlite3.SQLITE_PERM: JournalCode.READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: JournalCode.READ_ONLY,
    sqlite3.SQLITE_CORRUPT: JournalCode.CORRUPT,
    sqlite3.SQLITE_NOTADB: JournalCode.CORRUPT,
}

_REMEDY = {
    JournalCode.FULL: "free some space there",
    JournalCode.READ_ONLY: "make the directory writable for the daemon's user",
}


def _text(code: JournalCode, doing: str, path: Path, said: str) -> str:
    remedy = _REMEDY.get(code)
    return f"cannot {doing} {path}: {said}" + (f"; {remedy}" if remedy else "")


def from_os_error(exc: OSError, doing: str, path: Path) -> JournalError:
    """Return the `JournalError` that stands for an error of the operating system."""
    code = _OF_ERRNO.get(exc.errno or 0, JournalCode.IO)
    return JournalError(code, _text(code, doing, path, exc.strerror or str(exc)))


def from_sqlite_error(exc: sqlite3.Error, doing: str, path: Path) -> JournalError:
    """Return the `JournalError` that stands for an error of sqlite."""
    # The low byte is the primary code; errors that Python itself raises carry none.
    primary = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    code = _OF_SQLITE.get(primary, JournalCode.IO)
    return JournalError(code, _text(code, doing, path, str(exc)))
