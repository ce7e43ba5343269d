"""How long watchdogs of PyTorch let this process be without its devices.

A process whose devices were taken cannot make the calls that NCCL's threads make all the time.
PyTorch's monitor ends it when they have not come back for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, and a
collective that was under way for longer than its process group's timeout is an error that ends it
as well. Both go by the clock on the wall. The daemon is told, so that it can avoid this or say so.

torch is never imported here: it is looked at only if somebody else uses it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from libtimeslice.environment import nccl_heartbeat_s
from libtimeslice.fields import MAX_TIMEOUT_S

#: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC where it is not set, as torch has it (ProcessGroupNCCL.hpp).
DEFAULT_HEARTBEAT_S = 480.0


def limit_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """The shortest time that a watchdog of this process waits, seconds; None: none is known."""
    timeouts = _nccl_timeouts_s()
    default = DEFAULT_HEARTBEAT_S if timeouts else None
    known = [*timeouts, nccl_heartbeat_s(environ, default=default)]
    return min((s for s in known if s is not None and 0 < s <= MAX_TIMEOUT_S), default=None)


def _nccl_timeouts_s() -> list[float]:
    """The timeouts of this process's groups that talk by NCCL."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    # torch has no public way to ask for a timeout that was set.
    world = getattr(getattr(distributed, "distributed_c10d", None), "_world", None)
    found = map(_nccl_timeout_s, list(getattr(world, "pg_map", ())))
    return [seconds for seconds in found if seconds is not None]


def _nccl_timeout_s(group: Any) -> float | None:  # Any: torch's types are not a dependency
    try:
        backend = group._get_backend(sys.modules["torch"].device("cuda"))
        if backend.name() != "nccl":
            return None
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        # The group does not use the devices, or this version of torch does not tell.
        return None
