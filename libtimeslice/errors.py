"""Errors that the library raises, sorted by what the caller can do about them.

Every error carries `code`, the stable word of the wire protocol (`docs/protocol.md`), and `facts`,
what the daemon told with it (names of groups, reasons, amounts in the units of their names).
"""

# ruff: noqa: N818 - named for the caller's situation, as asyncio and concurrent.futures do.

from __future__ import annotations

from collections.abc import Mapping


class TimeSliceError(Exception):
    """Root of all errors of this library; raised itself only for codes that are new to it."""

    #: The code of an error that this side raises without an answer from the daemon.
    default_code = "internal"

    def __init__(self, message: str, *, code: str | None = None, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.default_code if code is None else str(code)
        self.facts = facts

    def __str__(self) -> str:
        """The message, then the facts as key=value, so that a log line holds the whole story."""
        told = " ".join(f"{name}={value!r}" for name, value in self.facts.items())
        return f"{self.message} [{self.code}{' ' if told else ''}{told}]"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (Ray, multiprocessing); keyword arguments need help there.
        return _rebuild, (type(self), self.message, self.code, self.facts)


def _rebuild(
    kind: type[TimeSliceError], message: str, code: str, facts: dict[str, object]
) -> TimeSliceError:
    return kind(message, code=code, **facts)


class Unavailable(TimeSliceError):
    """Not now: the daemon or a host that it needs cannot serve this. Ask again later."""

    default_code = "unavailable"


class DaemonUnreachable(Unavailable):
    """No daemon answered in time. Is it running (`systemctl status tsliced`), is the path right?"""


class AcquireTimeout(TimeSliceError):
    """The lease was not granted in the time that the caller gave. Nothing is held for it."""

    default_code = "timeout"


class Cancelled(TimeSliceError):
    """The acquire was cancelled, by this client or by an operator. Nothing is held for it."""

    default_code = "cancelled"


class LeaseLost(TimeSliceError):
    """The lease ended before its release: another job may be on the devices. Acquire again."""

    default_code = "lease_ended"


class Refused(TimeSliceError):
    """The daemon cannot do this for this job as things stand; `code` and `facts` say why."""

    default_code = "blocked"


class NotPermitted(TimeSliceError):
    """The user or the job may not do this. An administrator can change that."""

    default_code = "not_permitted"


class UnknownGroup(TimeSliceError):
    """No group of that name exists. `TimeSlice.status()` lists those that do."""

    default_code = "unknown_group"


class ClientClosed(TimeSliceError):
    """The client was closed. Make a new one with `connect()`."""

    default_code = "cancelled"


class ProtocolError(TimeSliceError):
    """The two sides do not understand each other: versions that differ, or a bug of one of them.

    `request_id` is the id of the request that was at fault, where there is one to answer.
    """

    default_code = "bad_frame"

    @property
    def request_id(self) -> int | None:
        """The id to answer with `err`; None if the whole connection is in doubt."""
        found = self.facts.get("request_id")
        return found if isinstance(found, int) else None


_KINDS: Mapping[str, type[TimeSliceError]] = {
    "bad_frame": ProtocolError,
    "bad_request": ProtocolError,
    "unsupported_version": ProtocolError,
    "unknown_request": ProtocolError,
    "unknown_group": UnknownGroup,
    "not_permitted": NotPermitted,
    "timeout": AcquireTimeout,
    "cancelled": Cancelled,
    "would_exceed_limit": Refused,
    "would_deadlock": Refused,
    "no_host_memory": Refused,
    "no_device_memory": Refused,
    "job_faulted": Refused,
    "pinned": Refused,
    "blocked": Refused,
    "refused": Refused,
    "not_cuda": Refused,
    "no_such_process": Refused,
    "not_found": Refused,
    "unknown_lease": LeaseLost,
    "lease_ended": LeaseLost,
    "session_unknown": LeaseLost,
    "shutting_down": Unavailable,
    "unavailable": Unavailable,
}


def error_from(answer: object) -> TimeSliceError:
    """Turns the `err` map of a reply, or an `error` message, into the exception to raise."""
    if not isinstance(answer, dict):
        return ProtocolError(f"the daemon answered with a malformed error: {answer!r}")
    code = str(answer.get("code", "internal"))
    kind = _KINDS.get(code, TimeSliceError)
    facts = {
        str(name): value
        for name, value in answer.items()
        if name not in ("code", "message", "t", "self")
    }
    return kind(str(answer.get("message", "the daemon gave no reason")), code=code, **facts)
