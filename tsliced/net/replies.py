"""What the core says to clients, as messages of the wire (`libtimeslice.protocol`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from libtimeslice.protocol import Message
from tsliced.core.actions import (
    ConfirmCancel,
    ConfirmRelease,
    DeclineTurn,
    Grant,
    Refuse,
    TellContended,
    TellHoldWarning,
    TellLost,
    TellRankLost,
    TellStalled,
    TellWarning,
)
from tsliced.core.fronting import ForeignLease
from tsliced.core.model import JobKey
from tsliced.core.sessions import LeaseState, Session


def job_message(job: JobKey) -> Message:
    """Return a job's key as a map."""
    return {"cluster": job.cluster, "uid": job.uid, "id": job.id}


def held_leases(session: Session, elsewhere: Iterable[ForeignLease]) -> list[Message]:
    """Return the leases that a session holds, here and elsewhere, for a client that comes back."""
    here = (lease for lease in session.leases.values() if lease.state is LeaseState.HELD)
    held = [(lease.id, lease.tokens) for lease in here]
    held += [(lease.id, lease.tokens) for lease in elsewhere]
    return [
        {
            "lease": lease,
            "groups": [group for group, _ in tokens],
            "tokens": {group: token.as_int() for group, token in tokens},
        }
        for lease, tokens in held
    ]


def _grant(action: Grant) -> Message:
    tokens = {}
    for group, token in action.tokens:
        tokens[group] = token.as_int()
    return {
        "re": action.request,
        "lease": action.lease,
        "groups": list(tokens),
        "tokens": tokens,
        "waited_s": action.waited_s,
        "restored": action.restored,
        "switch_s": action.switch_s,
        "contended": action.contended,
        "ack_s": action.ack_s,
    }


def _refuse(action: Refuse) -> Message:
    return {"re": action.request, "err": {"code": action.code, "message": action.text}}


def _release(action: ConfirmRelease) -> Message:
    return {"re": action.request, "waiters": action.waiters, "deferred": action.deferred}


def _no_turn(action: DeclineTurn) -> Message:
    return {"re": action.request, "needed": False}


def _cancel(action: ConfirmCancel) -> Message:
    return {"re": action.request, "cancelled": action.cancelled}


def _contended(action: TellContended) -> Message:
    return {
        "t": "contended",
        "lease": action.lease,
        "groups": list(action.groups),
        "waiters": action.waiters,
    }


def _stalled(action: TellStalled) -> Message:
    return {
        "t": "stalled",
        "lease": action.lease,
        "job": job_message(action.job),
        "cause": action.reason.cause.value,
        "reason": "; ".join(filter(None, (str(action.reason), action.way_out))),
    }


def _lost(action: TellLost) -> Message:
    return {"t": "lost", "lease": action.lease, "reason": action.text}


def _hold_warning(action: TellHoldWarning) -> Message:
    return {
        "t": "hold_warning",
        "lease": action.lease,
        "groups": list(action.groups),
        "ends_in_s": action.ends_in_s,
        "waiters": action.waiters,
    }


def _rank_lost(action: TellRankLost) -> Message:
    return {"t": "rank_lost", "lease": action.lease, "pid": action.pid, "reason": action.text}


def _warning(action: TellWarning) -> Message:
    return {"t": "warning", "code": action.code, "message": action.text}


#: Any: each function takes the action that is its key.
MESSAGES: dict[type, Callable[[Any], Message]] = {
    Grant: _grant,
    Refuse: _refuse,
    ConfirmRelease: _release,
    ConfirmCancel: _cancel,
    DeclineTurn: _no_turn,
    TellContended: _contended,
    TellStalled: _stalled,
    TellLost: _lost,
    TellHoldWarning: _hold_warning,
    TellRankLost: _rank_lost,
    TellWarning: _warning,
}
