"""How far moves of jobs have come: the map behind ``move`` in `status`, and what waiters are told.

A move of a tenancy is a snapshot or a restore of each of its ranks, one after the other or side by
side. Only the ranks of this host are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from libtimeslice.protocol import Message
from tsliced.core.coordinator import Place
from tsliced.core.machine import Machine
from tsliced.core.model import GroupName, RankState
from tsliced.core.rank import Rank
from tsliced.core.tenancy import Tenancy
from tsliced.host.moves import Moves, Progress

#: In these the state of ranks goes to the host; in all others it comes from there.
_OUTWARD: Final = (Place.FREEZING, Place.SNAPSHOTTING, Place.WITHDRAWING)


@dataclass(slots=True, kw_only=True)
class Moving:
    """Looks at the machine; changes nothing."""

    machine: Machine
    moves: Moves

    def of_group(self, group: GroupName, now: float) -> Message | None:
        """Return the move that goes on on a group's devices, if one does."""
        tenancies = self.machine.tenancies
        for key in tenancies.by_group[group]:
            if (move := self.of(tenancies.all[key], now)) is not None:
                return move
        return None

    def of(self, tenancy: Tenancy, now: float) -> Message | None:
        """Return the move of a tenancy that goes on, if one does.

        ``left_s`` is None as long as nobody can tell.
        """
        coordinator = tenancy.coordinator
        ranks = list(tenancy.participant.ranks.values())
        if coordinator.stable or not ranks:
            return None
        outward = coordinator.place in _OUTWARD
        total = sum(_bytes_of(rank) for rank in ranks)
        done = sum(_bytes_of(rank) for rank in ranks if _is_there(rank, outward))
        working = [p for rank in ranks if (p := self.moves.of(rank.id.process)) is not None]
        done += sum(progress.done_bytes for progress in working)
        pace = _pace(working)
        job = tenancy.key.job
        return {
            "job": {"cluster": job.cluster, "uid": job.uid, "id": job.id},
            "step": coordinator.place.value,
            "seconds": now - coordinator.began_at,
            "done_bytes": min(done, total),
            "total_bytes": total,
            "bytes_per_s": pace,
            "left_s": max(0, total - done) / pace if pace else None,
            "measured": all(progress.measured for progress in working),
        }

    def of_rank(self, rank: Rank) -> Message | None:
        """Return how far the operation on one rank has come, if it moves bytes."""
        progress = self.moves.of(rank.id.process)
        if progress is None:
            return None
        left = progress.total_bytes - progress.done_bytes
        return {
            "done_bytes": progress.done_bytes,
            "total_bytes": progress.total_bytes,
            "bytes_per_s": progress.bytes_per_s,
            "left_s": left / progress.bytes_per_s if progress.bytes_per_s else None,
            "measured": progress.measured,
        }


def _bytes_of(rank: Rank) -> int:
    return rank.parked_bytes or rank.device_bytes


def _is_there(rank: Rank, outward: bool) -> bool:
    """Whether a rank's state is where the move brings it."""
    return (rank.state is RankState.PARKED) is outward and rank.state is not RankState.UNKNOWN


def _pace(working: list[Progress]) -> float | None:
    """Return the bytes per second of all operations together."""
    known = [progress.bytes_per_s for progress in working if progress.bytes_per_s]
    return sum(known) if known else None
