"""Holds a lease for somebody else: for a command, for a shell, or for a process that knows nothing.

The client library keeps the session, over restarts of the daemon too; here is what it takes around
it: which lease, what is printed of it, and how its loss is noticed.
"""

from __future__ import annotations

import argparse
import logging

from libtimeslice import TimeSlice, connect
from libtimeslice.lease import Lease, LeaseContext
from libtimeslice.session import LeaseState
from tsliced.ctl.calls import job_of, socket_of

#: A daemon that is not there is reported soon; one that restarts later is waited for, see grace.
CONNECT_LIMIT_S = 1.0
#: How often a holder looks whether its lease still stands, seconds.
LOOK_S = 1.0


def open_client(options: argparse.Namespace) -> TimeSlice:
    """Returns a client for the options; it connects when it is first used.

    This process does no device work, so that it has nothing to finish before a release. Variables
    that make a training script run unshared are not for us: who asks for a lease means it.
    """
    # What the library would log, the commands say in their own words.
    logging.getLogger("libtimeslice").addHandler(logging.NullHandler())
    return connect(
        socket=socket_of(options),
        job=job_of(options),
        mode="require",
        ranks=getattr(options, "ranks", 1),
        connect_timeout_s=CONNECT_LIMIT_S,
        last_turn_s=0.0,
        synchronize=False,
    )


def lease_for(options: argparse.Namespace, client: TimeSlice) -> LeaseContext:
    """Returns the lease that the options ask for, to be entered with ``with``."""
    return client.lease(options.group, timeout=options.timeout, phase=options.phase)


def facts_of(lease: Lease, client: TimeSlice) -> dict[str, object]:
    """Returns what is printed about a lease that was granted; times in seconds."""
    return {
        "lease": lease.id,
        "job": client.job,
        "groups": list(lease.groups),
        "tokens": lease.tokens,
        "waited_s": lease.waited_s,
        "restored": lease.restored,
        "switch_s": lease.switch_s,
    }


def is_lost(lease: Lease) -> bool:
    """Tells whether the lease was taken away; reads what the daemon has said meanwhile."""
    _ = lease.contended
    return lease.state is LeaseState.LOST
