"""Where the managed tensors of this process are, and the daemon's orders to move them.

    running -- quiesce --> paused -- freeze --> frozen -- snapshot --> parked
    running <-- resume --- paused <-- thaw ---- frozen <-- restore --- parked

Rule: nothing is moved while code of the job may use it. The daemon's `quiesce` has to come first,
and is answered when the job's own functions say that it stands still, `PausableStep.pause` above
all: no thread of the job is inside of a step then, and none gets into one before `resume`, which is
refused until the tensors are back. The moving itself is done by the agent's thread.

Repeating an order gives the same answer, and moves nothing.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING

from libtimeslice.errors import Refused, Unavailable
from libtimeslice.protocol import Message

if TYPE_CHECKING:
    from libtimeslice.tensors import Moved, Tensors

logger = logging.getLogger("libtimeslice")


class Place(str, Enum):
    """Where the tensors are, and what the job may do."""

    #: On the device, and the job uses them.
    RUNNING = "running"
    #: On the device; the job stands still, and may go on when it is told.
    PAUSED = "paused"
    #: On the device; the job stands still until they are thawed.
    FROZEN = "frozen"
    #: In host memory.
    PARKED = "parked"


class Parking:
    """The tensors of one process. `tensors` is set by the job, all else by its agent's thread."""

    def __init__(self) -> None:
        #: What the job named; None: nothing.
        self.tensors: Tensors | None = None
        self.place = Place.RUNNING
        #: What the latest move did.
        self.moved: Moved | None = None

    @property
    def is_held(self) -> bool:
        """Whether the job must not go on before the daemon says so."""
        return self.place in (Place.FROZEN, Place.PARKED)

    def pause(self) -> None:
        """Knows that the job stands still."""
        if not self.is_held:
            self.place = Place.PAUSED

    def resume(self) -> None:
        """Lets the job go on. Raises Unavailable if its tensors are held."""
        if self.is_held:
            raise Unavailable(f"its tensors are {self.place.value}: they have to be thawed first")
        self.place = Place.RUNNING

    def obey(self, order: str) -> Message:
        """Carries out an order of the daemon: freeze, snapshot, restore, thaw or query.

        Returns the fields of the answer. Raises a TimeSliceError that says why it cannot be done;
        all is then as before.
        """
        if self.tensors is None:
            raise Refused("no tensors are managed in this process", code="not_found")
        if order == "freeze":
            self._freeze(self.tensors)
        elif order == "snapshot":
            self._snapshot(self.tensors)
        elif order == "restore":
            self._restore(self.tensors)
        elif order == "thaw":
            self._thaw()
        elif order != "query":
            raise Refused(f"this agent does not know {order!r:.80}", code="bad_request")
        return self._told(None if order in ("freeze", "thaw") else self.moved)

    def _freeze(self, tensors: Tensors) -> None:
        if self.is_held:
            return
        if self.place is Place.RUNNING:
            raise Unavailable("it was not paused: its code may be using its tensors")
        tensors.check()  # while nothing of the job has been moved yet
        self.place = Place.FROZEN

    def _snapshot(self, tensors: Tensors) -> None:
        if self.place is Place.PARKED:
            return
        if self.place is not Place.FROZEN:
            raise Unavailable("it was not frozen: its code may be using its tensors")
        self.moved = tensors.park()
        self.place = Place.PARKED
        self._log("parked")

    def _restore(self, tensors: Tensors) -> None:
        if self.place is not Place.PARKED:
            return
        self.moved = tensors.unpark()
        self.place = Place.FROZEN
        self._log("brought back")

    def _thaw(self) -> None:
        if self.place is Place.PARKED:
            raise Unavailable("its tensors are parked: they have to be restored first")
        if self.place is Place.FROZEN:
            self.place = Place.PAUSED

    def _log(self, what: str) -> None:
        moved = self.moved
        assert moved is not None
        logger.info(
            "%s %.3f GB in %.3f s (%.1f GB/s)",
            what,
            moved.bytes / 1e9,
            moved.seconds,
            moved.gb_per_s,
        )

    def _told(self, moved: Moved | None) -> Message:
        return {
            "state": self.place.value,
            "bytes": 0 if moved is None else moved.bytes,
            "seconds": 0.0 if moved is None else moved.seconds,
            "regions": [
                {
                    "name": region.name,
                    "policy": region.policy,
                    "storages": region.storages,
                    "bytes": region.bytes,
                }
                for region in (() if moved is None else moved.regions)
            ],
        }
