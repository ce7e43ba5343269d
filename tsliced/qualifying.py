"""How jobs left devices and came back: what was seen, and what is known of others like them.

The core has a job leave its devices and come back when an operator wants it, or before it makes
room for another one for the first time (`Tenancies.make_room`). Ranks of a kind that did so need
not show it again; those of a kind that could not come back are not even frozen. What any move took,
whoever wanted it, is what the next one of the kind is expected to take.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from libtimeslice.protocol import Message
from tsliced.config.ways import Ways
from tsliced.core.actions import Note, StartOperation
from tsliced.core.machine import Machine
from tsliced.core.model import (
    Cause,
    DeviceId,
    Earlier,
    FoundRank,
    JobKey,
    ProcessId,
    RankId,
    RankState,
    Reason,
    Verb,
)
from tsliced.core.rank import Rank
from tsliced.core.tenancy import Tenancy
from tsliced.host.backends.base import Measure, Outcome
from tsliced.host.kinds import MEASURES, Kind, Kinds, Measured, name_of, shape_of
from tsliced.host.preflight import HostFacts, Preflight, examine

#: For so long NVML may not show yet what has come back, seconds.
_LAG_S: Final = 0.5
_POLL_S: Final = 0.05
#: Jobs of which it is kept how their latest try ended.
_MAX_RESULTS: Final = 1000


@dataclass(slots=True, kw_only=True)
class Result:
    """How a job's latest try ended."""

    at_unix: float
    #: Why it failed; None: it came back.
    reason: str | None


@dataclass(slots=True, kw_only=True)
class Qualifying:
    """Belongs to the event loop, and changes nothing of the core.

    `ways`: by which backends ranks are moved. `facts`: what of this host their moves depend on.
    """

    machine: Machine
    kinds: Kinds
    ways: Ways
    facts: HostFacts
    clock: Callable[[], float] = time.time
    #: Of each rank the trip off its devices and back that it is on, ...
    _under_way: dict[ProcessId, Measured] = field(default_factory=dict)
    #: ... and the latest one that is over.
    _trips: dict[ProcessId, Measured] = field(default_factory=dict)
    _looks: dict[ProcessId, Preflight] = field(default_factory=dict)
    _shapes: dict[ProcessId, tuple[str, ...]] = field(default_factory=dict)
    _results: dict[JobKey, Result] = field(default_factory=dict)

    # --- what is known of a kind --------------------------------------------------------------

    async def recall(self, found: FoundRank) -> Earlier | None:
        """Return what was seen of a rank, or of others of its kind."""
        process = found.process
        if process not in self._shapes:
            with contextlib.suppress(OSError):  # out of descriptors, for instance: next time
                self._shapes[process] = await asyncio.to_thread(shape_of, process)
        kind = self._kind(process)
        measured = self._expected(process)
        return Earlier(
            qualified=kind is not None and kind.failure is None,
            switch_s=measured.switch_s(found.device_bytes) if measured is not None else None,
        )

    def objection(self, start: StartOperation) -> Reason | None:
        """Say why a rank must not be frozen, if others of its kind could not come back.

        Not if it did so itself, nor to an operator who wants to see it.
        """
        if start.verb is not Verb.FREEZE:
            return None
        kind = self._kind(start.rank.process)
        if kind is None or kind.failure is None:
            return None
        tenancy = self._tenancy_of(start.rank.process)
        if tenancy is not None and (tenancy.coordinator.insists or tenancy.coordinator.qualified):
            return None
        text = (
            "another one of its kind left its devices and could not come back: "
            f"{kind.failure}; tslicectl qualify tries it with this one"
        )
        return Reason(cause=Cause.UNSUPPORTED, text=text, rank=start.rank)

    def expected_s(self, process: ProcessId, verb: Verb, count: int) -> float | None:
        """Return how long it should take to move so many bytes of a rank; None: not known."""
        measured = self._expected(process)
        return measured.step_s(verb, count) if measured is not None else None

    def _expected(self, process: ProcessId) -> Measured | None:
        """Return what a rank's own latest trip took, or else that of the latest of its kind."""
        if (own := self._trips.get(process)) is not None:
            return own
        kind = self._kind(process)
        return kind.measured if kind is not None else None

    def _tenancy_of(self, process: ProcessId) -> Tenancy | None:
        tenancies = self.machine.tenancies
        key = tenancies.home.get(process)
        return tenancies.all[key] if key is not None else None

    def _name(self, process: ProcessId) -> str | None:
        """Return the name of a rank's kind; None: what it runs is not known, or whose it is."""
        shape, tenancy = self._shapes.get(process), self._tenancy_of(process)
        if not shape or tenancy is None:
            return None
        job = tenancy.key.job
        rank = tenancy.participant.ranks[process]
        ranks = sum(len(t.participant.ranks) for t in self.machine.tenancies.tenancies_of(job))
        ways = ["+".join(way) for way in self.ways.of(job, tenancy.key.groups)]
        return name_of(*shape, str(ranks), str(len(rank.devices)), str(self.facts.driver), *ways)

    def _kind(self, process: ProcessId) -> Kind | None:
        return self.kinds.get(self._name(process))

    # --- what is looked at and measured -------------------------------------------------------

    async def look(self, process: ProcessId) -> Preflight:
        """Look anew for what may keep a process from being moved."""
        try:
            rank = self._rank_of(process)
            devices = rank.devices if rank is not None else ()
            found = await asyncio.to_thread(examine, process, host=self.facts, devices=devices)
        except OSError:
            # Out of descriptors, for instance: nothing is known of it.
            found = Preflight(findings=(), proposal=None, program="")
        self._looks[process] = found
        return found

    async def look_at(self, job: JobKey) -> None:
        """Look anew at all ranks of a job here."""
        tenancies = self.machine.tenancies.tenancies_of(job)
        ranks = [process for tenancy in tenancies for process in tenancy.participant.ranks]
        await asyncio.gather(*map(self.look, ranks))

    def wants_to_see(self, process: ProcessId, verb: Verb) -> bool:
        """Whether it is to be measured what a rank has on its devices after an operation.

        That takes a look at the devices: not after every switch of who is known to come back.
        """
        trip = self._under_way.get(process)
        if verb is not Verb.THAW or trip is None or trip.in_s is None:
            return False
        tenancy, kind = self._tenancy_of(process), self._kind(process)
        qualifies = tenancy is not None and tenancy.coordinator.qualifies
        return qualifies or kind is None or kind.failure is not None

    async def see(self, process: ProcessId, measure: Measure) -> Mapping[DeviceId, int] | None:
        """Return what a rank that was thawed has on its devices; None: NVML does not say.

        NVML lags: what is missing is waited for a moment.
        """
        loop = asyncio.get_running_loop()
        end, before = loop.time() + _LAG_S, self._under_way[process].before_bytes
        while True:
            on_devices = await measure(process)
            if on_devices is None or sum(on_devices.values()) >= before or loop.time() > end:
                return on_devices
            await asyncio.sleep(_POLL_S)

    def on_operation(
        self,
        rank: RankId,
        verb: Verb,
        outcome: Outcome,
        *,
        way: str | None = None,
        on_devices: Mapping[DeviceId, int] | None = None,
    ) -> str | None:
        """Take in how an operation went, and what the process has on devices by then.

        Return what is wrong with a rank that has come back, if it is not whole.
        """
        process = rank.process
        if (failure := outcome.failure) is not None:
            name = self._name(process)
            # Anything else may have been the occasion, and not the kind; and the driver says the
            # same of a process that is being ended, whose state nobody can tell by then.
            is_its_kind = (
                verb is Verb.RESTORE
                and failure.cause is Cause.UNSUPPORTED
                and outcome.observed is not RankState.UNKNOWN
            )
            if is_its_kind and name is not None:
                self.kinds.keep_failure(name, self._program(process), str(failure.text))
            return None
        trip = self._under_way.get(process)
        if verb is Verb.SNAPSHOT:
            known = self._rank_of(process)
            before = known.device_bytes if known is not None else 0
            self._under_way[process] = Measured(
                way=way,
                before_bytes=before,
                out_bytes=outcome.moved_bytes or before,
                out_s=outcome.seconds,
            )
        elif verb is Verb.RESTORE and trip is not None:
            trip.in_s = outcome.seconds
        elif verb is Verb.THAW and trip is not None and trip.in_s is not None:
            trip.back_bytes = sum(on_devices.values()) if on_devices is not None else None
            self._trips[process] = self._under_way.pop(process)
            return self._keep(process, trip)
        return None

    def _keep(self, process: ProcessId, measured: Measured) -> str | None:
        """Keep the kind of a rank that is back, or say why it is not whole."""
        if not measured.is_whole:
            return (
                f"process {process.pid} had {measured.before_bytes:,} bytes on its devices, "
                f"and came back with {measured.back_bytes:,}"
            )
        if (name := self._name(process)) is not None:
            self.kinds.keep(name, self._program(process), measured)
        return None

    def _program(self, process: ProcessId) -> str:
        return next(iter(self._shapes.get(process, ())), "")

    def _rank_of(self, process: ProcessId) -> Rank | None:
        tenancy = self._tenancy_of(process)
        return tenancy.participant.ranks.get(process) if tenancy is not None else None

    def forget(self, process: ProcessId) -> None:
        """A process is gone."""
        self._under_way.pop(process, None)
        self._trips.pop(process, None)
        self._looks.pop(process, None)
        self._shapes.pop(process, None)

    # --- how it ended -------------------------------------------------------------------------

    def on_note(self, note: Note) -> None:
        """Take in how a job's try ended, if it did."""
        if not note.facts.get("qualifies"):
            return
        for key, tenancy in self.machine.tenancies.all.items():
            if str(key.job) == note.facts["job"]:
                reason = note.facts.get("reason")
                text = None if reason is None else str(reason)
                if text is None:
                    ranks = tenancy.participant.ranks
                    text = next(filter(None, map(self._lack, ranks)), None)
                self._results[key.job] = Result(at_unix=self.clock(), reason=text)
        while len(self._results) > _MAX_RESULTS:
            del self._results[next(iter(self._results))]

    def _lack(self, process: ProcessId) -> str | None:
        trip = self._trips.get(process)
        return None if trip is None or trip.is_whole else self._keep(process, trip)

    # --- what is told -------------------------------------------------------------------------

    def shown(self, job: JobKey) -> Message:
        """Return what is known of a job."""
        tenancies = [each for key, each in self.machine.tenancies.all.items() if key.job == job]
        moving = [t for t in tenancies if t.coordinator.qualifies and not t.coordinator.stable]
        result = self._results.get(job)
        ranks = [process for tenancy in tenancies for process in tenancy.participant.ranks]
        kinds = [self._kind(process) for process in ranks]
        state, reason = ("known" if ranks and None not in kinds else "unknown"), None
        if (failed := next((k for k in kinds if k and k.failure is not None), None)) is not None:
            state, reason = "refused", failed.failure
        if result is not None:
            state, reason = ("qualified" if result.reason is None else "failed"), result.reason
        return {
            "state": "running" if moving else state,
            "at_unix": result.at_unix if result is not None else None,
            "reason": reason if not moving else None,
            "switch_s": self._switch_s(tenancies),
            "ranks": [self._rank(process) for process in ranks],
        }

    def _switch_s(self, tenancies: list[Tenancy]) -> float | None:
        """Return what a switch of a job is expected to take here; None: nothing is known."""
        expected = (self.machine.leasing.switch_s(tenancy) for tenancy in tenancies)
        return max(expected, default=0.0) or None

    def _rank(self, process: ProcessId) -> Message:
        look = self._looks.get(process)
        findings = look.findings if look is not None else ()
        return {
            "pid": process.pid,
            **self._facts(process),
            "program": look.program if look is not None else None,
            "findings": [
                {
                    "what": each.what,
                    "verdict": each.verdict.value,
                    "text": each.text,
                    "remedy": each.remedy or None,
                }
                for each in findings
            ],
            "proposal": look.proposal if look is not None else None,
        }

    def _facts(self, process: ProcessId) -> Message:
        """Return what was measured of a rank, or else of the latest one of its kind."""
        measured = self._expected(process)
        return {name: getattr(measured, name, None) for name in MEASURES}
