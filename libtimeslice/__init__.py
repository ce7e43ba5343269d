"""libtimeslice: exclusive turns on shared accelerators for the phases of a job.

    from libtimeslice import connect

    ts = connect()
    with ts.lease("trainer", phase="train") as lease:
        ...

`libtimeslice.aio` has the same for asyncio, and `libtimeslice.compat` takes the calls of the llm-d
time-slicing client. Needs msgpack and nothing else.
"""

from __future__ import annotations

__version__ = "0.1.0"

from libtimeslice.callbacks import Contended, HoldWarning, Lost, Pause, Resume
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
    "Pause",
    "ProtocolError",
    "Refused",
    "Released",
    "Resume",
    "TimeSlice",
    "TimeSliceError",
    "Unavailable",
    "UnknownGroup",
    "connect",
]
