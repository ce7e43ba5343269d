"""What clients may have of the daemon: connections, sessions, requests, buffers, descriptors.

Everything has a limit for all, so that the daemon stays alive, and a limit for each user, so that
it stays useful to the others. Root is not counted as a user: whoever has to help gets in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from tsliced.config import ServerLimits

#: Descriptors that the daemon needs for itself: journal, workers, reading /proc.
OWN_DESCRIPTORS: Final = 96
ROOT: Final = 0


@dataclass(slots=True, eq=False)
class Share:
    """What one user has."""

    uid: int
    connections: int = 0
    sessions: int = 0
    #: Requests that are not answered yet, of all sessions that have a connection.
    requests: int = 0


class Hoard(Protocol):
    """A connection, as far as its buffers go."""

    @property
    def buffered_bytes(self) -> int:
        """What it has not sent, and what has come of a frame that is not complete."""
        ...

    def drop(self) -> None:
        """End it at once, with all that it has."""
        ...


class Shares:
    """Counts. `watched` tells how many descriptors watch processes."""

    def __init__(
        self,
        limits: ServerLimits,
        *,
        descriptors: int,
        watched: Callable[[], int],
    ) -> None:
        self.limits = limits
        self._descriptors = descriptors - OWN_DESCRIPTORS
        self._watched = watched
        self._connections = self._sessions = 0
        self._shares: dict[int, Share] = {}
        #: Connections that have more in their buffers than the usual.
        self._hoards: dict[Hoard, None] = {}

    def of(self, uid: int) -> Share:
        """Return a user's share."""
        share = self._shares.get(uid)
        if share is None:
            share = self._shares[uid] = Share(uid)
        return share

    # --- connections --------------------------------------------------------------------------

    def add_connection(self, uid: int) -> str | None:
        """Count a connection, or return why there is no room for it."""
        limits, share = self.limits, self.of(uid)
        most = limits.max_clients + (limits.reserved_clients if uid == ROOT else 0)
        if self._connections >= most:
            return f"{limits.max_clients} clients are connected, which is the limit max_clients"
        if share.connections >= limits.max_clients_per_uid and uid != ROOT:
            most = limits.max_clients_per_uid
            return f"uid {uid} has {most} connections, which is the limit max_clients_per_uid"
        if self._connections + self._watched() >= self._descriptors:
            return "the daemon has no file descriptor left; raise LimitNOFILE of its unit"
        self._connections += 1
        share.connections += 1
        return None

    def remove_connection(self, uid: int) -> None:
        """Count a connection no longer."""
        self._connections -= 1
        self.of(uid).connections -= 1
        self._tidy(uid)

    # --- sessions -----------------------------------------------------------------------------

    def session_objection(self, uid: int) -> str | None:
        """Return why there is no room for another session of a user, if so."""
        limits = self.limits
        if self._sessions >= limits.max_sessions and uid != ROOT:
            return f"there are {limits.max_sessions} sessions, which is the limit max_sessions"
        if self.of(uid).sessions >= limits.max_sessions_per_uid and uid != ROOT:
            most = limits.max_sessions_per_uid
            return f"uid {uid} has {most} sessions, which is the limit max_sessions_per_uid"
        return None

    def add_session(self, uid: int) -> Share:
        """Count a session, and return the share that it is part of."""
        share = self.of(uid)
        self._sessions += 1
        share.sessions += 1
        return share

    def remove_session(self, share: Share) -> None:
        """Count a session no longer."""
        self._sessions -= 1
        share.sessions -= 1
        self._tidy(share.uid)

    def _tidy(self, uid: int) -> None:
        share = self._shares[uid]
        if not (share.connections or share.sessions):
            del self._shares[uid]

    # --- buffers ------------------------------------------------------------------------------

    def add_hoard(self, hoard: Hoard) -> None:
        """Know a connection that has much in its buffers; drop those that have most, if need be."""
        self._hoards[hoard] = None
        while sum(one.buffered_bytes for one in self._hoards) > self.limits.max_buffered_bytes:
            largest = max(self._hoards, key=lambda one: one.buffered_bytes)
            del self._hoards[largest]
            largest.drop()

    def remove_hoard(self, hoard: Hoard) -> None:
        """A connection is as others again, or gone."""
        self._hoards.pop(hoard, None)
