"""Tells those who wait for a move how far it has come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from libtimeslice.protocol import Message
from tsliced.core.machine import Machine
from tsliced.core.model import SessionId
from tsliced.core.rounds import MOVING
from tsliced.observe.moving import Moving

#: Between two words on a move, seconds. One that is over sooner is not worth a word.
TELL_S: Final = 0.5


class Waiting:
    """Sends ``moving`` to the sessions of rounds that wait for a move. For the event loop."""

    def __init__(
        self, machine: Machine, moving: Moving, send: Callable[[SessionId, Message], object]
    ) -> None:
        self._machine = machine
        self._moving = moving
        self._send = send

    async def tell_for_ever(self) -> None:
        """Tell every `TELL_S`, as long as bytes are moved."""
        while True:
            await asyncio.sleep(TELL_S)
            if self._moving.moves:
                self.tell(time.monotonic())

    def tell(self, now: float) -> None:
        """Tell each session that waits for a move how far it has come."""
        leasing = self._machine.leasing
        for key, tenancy in self._machine.tenancies.all.items():
            waiting = [r for r in leasing.concerned(key) if r.state is MOVING and r.members]
            if not waiting or (move := self._moving.of(tenancy, now)) is None:
                continue
            for round_ in waiting:
                for lease in round_.members.values():
                    self._send(lease.session, {"t": "moving", "lease": lease.id, **move})
