"""Answers, and the codes of errors in them."""

from __future__ import annotations

from enum import Enum

from libtimeslice.fields import Message


class ErrorCode(str, Enum):
    """Codes of errors on the wire. Stable: new ones may come, none changes its meaning."""

    BAD_FRAME = "bad_frame"
    BAD_REQUEST = "bad_request"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_REQUEST = "unknown_request"
    UNKNOWN_GROUP = "unknown_group"
    NOT_PERMITTED = "not_permitted"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    WOULD_EXCEED_LIMIT = "would_exceed_limit"
    WOULD_DEADLOCK = "would_deadlock"
    NO_HOST_MEMORY = "no_host_memory"
    NO_DEVICE_MEMORY = "no_device_memory"
    JOB_FAULTED = "job_faulted"
    PINNED = "pinned"
    BLOCKED = "blocked"
    REFUSED = "refused"
    NOT_CUDA = "not_cuda"
    NO_SUCH_PROCESS = "no_such_process"
    UNKNOWN_LEASE = "unknown_lease"
    NOT_FOUND = "not_found"
    LEASE_ENDED = "lease_ended"
    SESSION_UNKNOWN = "session_unknown"
    SHUTTING_DOWN = "shutting_down"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"

    def __str__(self) -> str:
        return self.value


def reply(request_id: int, **fields: object) -> Message:
    """Builds the answer to a request that succeeded."""
    return {"re": request_id, **fields}


def error_reply(request_id: int, code: str, message: str, **facts: object) -> Message:
    """Builds the answer to a request that failed."""
    return {"re": request_id, "err": {"code": str(code), "message": message, **facts}}


def error_message(code: str, message: str) -> Message:
    """Builds the last message before a connection is closed for a fault of the other side."""
    return {"t": "error", "code": str(code), "message": message}
