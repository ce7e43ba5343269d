"""Whether another host is there, by when it was last heard of. Sans-I/O.

Rules: a host is CONNECTED from what it says on; SUSPECT when it has been silent for `suspect_s`, or
its connection ended; LOST when it has been silent for `lost_s`. Nothing but its own words make it
CONNECTED again.
"""

from __future__ import annotations

from enum import Enum


class PeerState(Enum):
    """Where a host stands for this one."""

    AWAITED = "awaited"
    CONNECTED = "connected"
    SUSPECT = "suspect"
    LOST = "lost"


class Liveness:
    """One host. Each method returns whether `state` has changed."""

    def __init__(self, *, suspect_s: float, lost_s: float, now: float) -> None:
        self.state = PeerState.AWAITED
        self.since = now
        #: Why it is not connected.
        self.reason = "it has not connected yet"
        self._trouble = ""
        self._heard_at = now
        self._suspect_s = suspect_s
        self._lost_s = lost_s

    def silent_s(self, now: float) -> float:
        """Return for how long nothing was heard."""
        return max(0.0, now - self._heard_at)

    def hear(self, now: float) -> bool:
        """It said something."""
        self._heard_at = now
        self._trouble = ""
        return self._enter(PeerState.CONNECTED, "", now)

    def close(self, reason: str, now: float) -> bool:
        """Its connection ended, or could not be made."""
        self._trouble = reason
        if self.state is PeerState.CONNECTED:
            return self._enter(PeerState.SUSPECT, reason, now)
        self.reason = self._silence(now) if self.state is PeerState.LOST else reason
        return False

    def pass_time(self, now: float) -> bool:
        """Nothing happened until now."""
        silent_s = self.silent_s(now)
        if self.state is PeerState.LOST or silent_s < self._suspect_s:
            return False
        if silent_s >= self._lost_s:
            return self._enter(PeerState.LOST, self._silence(now), now)
        if self.state is PeerState.CONNECTED:
            return self._enter(PeerState.SUSPECT, self._silence(now), now)
        return False

    def excuse(self, gap_s: float) -> None:
        """This side did not listen for so long: that is nobody's silence."""
        self._heard_at += gap_s

    def _silence(self, now: float) -> str:
        text = f"nothing was heard of it for {self.silent_s(now):.1f} s"
        return f"{text}; {self._trouble}" if self._trouble else text

    def _enter(self, state: PeerState, reason: str, now: float) -> bool:
        self.reason = reason
        if state is self.state:
            return False
        self.state, self.since = state, now
        return True
