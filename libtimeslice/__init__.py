"""libtimeslice: exclusive turns on shared accelerators for the phases of a job.

    from libtimeslice import connect

    ts = connect()
    with ts.lease("trainer", phase="train") as lease:
        ...

`libtimeslice.aio` has the same for asyncio, and `libtimeslice.compat` takes the calls of the llm-d
time-slicing client. Needs msgpack and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libtimeslice.callbacks import Contended, HoldWarning, Lost, Pause, Resume, Waiting
    from libtimeslice.client import TimeSlice, connect
    from libtimeslice.environment import Mode
    from libtimeslice.errors import (
        AcquireTimeout,
        Cancelled,
        ClientClosed,
        DaemonUnreachable,
        LeaseLost,
        NotPermitted,
        ProtocolError,
        Refused,
        TimeSliceError,
        Unavailable,
        UnknownGroup,
    )
    from libtimeslice.lease import Lease
    from libtimeslice.session import LeaseState, Released
    from libtimeslice.steps import PausableStep

__version__ = "0.1.0"

__all__ = [
    "AcquireTimeout",
    "Cancelled",
    "ClientClosed",
    "Contended",
    "DaemonUnreachable",
    "HoldWarning",
    "Lease",
    "LeaseLost",
    "LeaseState",
    "Lost",
    "Mode",
    "NotPermitted",
    "PausableStep",
    "Pause",
    "ProtocolError",
    "Refused",
    "Released",
    "Resume",
    "TimeSlice",
    "TimeSliceError",
    "Unavailable",
    "UnknownGroup",
    "Waiting",
    "connect",
]

#: Where each name is from. They are imported when they are asked for: the daemon needs the wire's
#: definition alone, and one that imported the client with it would be a megabyte larger.
_HOMES = {
    "Contended": "callbacks",
    "HoldWarning": "callbacks",
    "Lost": "callbacks",
    "Pause": "callbacks",
    "Resume": "callbacks",
    "Waiting": "callbacks",
    "TimeSlice": "client",
    "connect": "client",
    "Mode": "environment",
    "AcquireTimeout": "errors",
    "Cancelled": "errors",
    "ClientClosed": "errors",
    "DaemonUnreachable": "errors",
    "LeaseLost": "errors",
    "NotPermitted": "errors",
    "ProtocolError": "errors",
    "Refused": "errors",
    "TimeSliceError": "errors",
    "Unavailable": "errors",
    "UnknownGroup": "errors",
    "Lease": "lease",
    "LeaseState": "session",
    "Released": "session",
    "PausableStep": "steps",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
