"""How jobs left devices and came back: what was seen, and of which kinds of ranks it is known.

The core has a job leave its devices and come back when an operator wants it, or before it makes
room for another one for the first time (`Coordinator.evict`). Ranks of a kind that did so need not
show it again: the same program of the same user, as many of it, with the same driver, backends, and
problems.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from libtimeslice.protocol import Message
from tsliced.core.actions import Note
from tsliced.core.machine import Machine
from tsliced.core.model import DeviceId, JobKey, ProcessId, Verb
from tsliced.host.backends.base import Outcome
from tsliced.host.backends.op_files import read_facts, write_atomically
from tsliced.host.preflight import Preflight, examine
from tsliced.host.processes import environment, uid_of

#: Kinds that are kept; the oldest go first.
MAX_KINDS: Final = 1000
#: How many ranks a job has, by the launcher that said so.
_COUNTS: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
#: A rank that comes back with less of its device memory did not come back whole.
WHOLE_RATIO: Final = 0.9


@dataclass(slots=True, kw_only=True)
class Measured:
    """What was seen of a rank's latest way off its devices and back."""

    #: As it is configured, "torch+cuda" for example.
    way: str | None = None
    before_bytes: int = 0
    out_bytes: int = 0
    out_s: float | None = None
    in_s: float | None = None
    #: On its devices after it was thawed; None: NVML does not say.
    back_bytes: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether its memory came back, as far as is known."""
        return self.back_bytes is None or self.back_bytes >= self.before_bytes * WHOLE_RATIO


@dataclass(slots=True, kw_only=True)
class Result:
    """How a job's latest try ended."""

    at_unix: float
    #: Why it failed; None: it came back.
    reason: str | None


@dataclass(slots=True, kw_only=True)
class Qualifying:
    """Belongs to the event loop, and changes nothing of the core.

    `path`: where the kinds are kept. `terms`: what else they depend on, such as the driver.
    """

    machine: Machine
    path: Path
    terms: str
    clock: Callable[[], float] = time.time
    _measured: dict[ProcessId, Measured] = field(default_factory=dict)
    _looks: dict[ProcessId, Preflight] = field(default_factory=dict)
    _kind_of: dict[ProcessId, str] = field(default_factory=dict)
    _results: dict[JobKey, Result] = field(default_factory=dict)
    _kinds: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._kinds = read_facts(self.path)

    # --- what is looked at and measured -------------------------------------------------------

    async def knows(self, process: ProcessId) -> bool:
        """Return whether ranks of a process's kind were seen to leave and to come back."""
        if not self.machine.config.limits.qualify:
            return False
        if process not in self._kind_of:
            look = await self.look(process)
            if not look.program:
                return False
            with contextlib.suppress(OSError):
                self._kind_of[process] = await asyncio.to_thread(_kind, process, look, self.terms)
        return self._kind_of.get(process) in self._kinds

    async def look(self, process: ProcessId) -> Preflight:
        """Look anew for what may keep a process from being moved."""
        try:
            found = await asyncio.to_thread(examine, process)
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

    def on_operation(
        self,
        process: ProcessId,
        verb: Verb,
        outcome: Outcome,
        *,
        way: str | None,
        on_devices: Mapping[DeviceId, int] | None,
    ) -> None:
        """Take in how an operation went, and what the process has on devices by then."""
        measured = self._measured.setdefault(process, Measured())
        if outcome.failure is not None:
            return
        match verb:
            case Verb.SNAPSHOT:
                tenancy = self.machine.tenancies.home.get(process)
                if tenancy is not None:
                    ranks = self.machine.tenancies.all[tenancy].participant.ranks
                    measured.before_bytes = ranks[process].device_bytes
                measured.way, measured.out_s = way, outcome.seconds
                measured.out_bytes = outcome.moved_bytes or measured.before_bytes
            case Verb.RESTORE:
                measured.in_s = outcome.seconds
            case Verb.THAW:
                measured.back_bytes = sum(on_devices.values()) if on_devices is not None else None
            case _:
                pass

    def forget(self, process: ProcessId) -> None:
        """A process is gone."""
        for known in (self._measured, self._looks, self._kind_of):
            known.pop(process, None)

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
                    text = self._keep(list(tenancy.participant.ranks))
                self._results[key.job] = Result(at_unix=self.clock(), reason=text)
        while len(self._results) > MAX_KINDS:
            del self._results[next(iter(self._results))]

    def _keep(self, processes: list[ProcessId]) -> str | None:
        """Keep the kinds of a job's ranks, or say which of them did not come back whole."""
        for process in processes:
            measured = self._measured.get(process, Measured())
            if not measured.is_whole:
                return (
                    f"process {process.pid} had {measured.before_bytes:,} bytes on its devices, "
                    f"and came back with {measured.back_bytes:,}"
                )
        for process in processes:
            if (kind := self._kind_of.get(process)) is not None:
                look = self._looks.get(process)
                program = look.program if look is not None else ""
                self._kinds.pop(kind, None)
                self._kinds[kind] = {"program": program, **self._facts(process)}
        while len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        with contextlib.suppress(OSError):  # what is not kept is tried anew after a restart
            write_atomically(self.path, self._kinds)
        return None

    # --- what is told -------------------------------------------------------------------------

    def shown(self, job: JobKey) -> Message:
        """Return what is known of a job."""
        tenancies = [each for key, each in self.machine.tenancies.all.items() if key.job == job]
        moving = [t for t in tenancies if t.coordinator.qualifies and not t.coordinator.stable]
        result = self._results.get(job)
        ranks = [process for tenancy in tenancies for process in tenancy.participant.ranks]
        known = bool(ranks) and all(self._kind_of.get(p, "") in self._kinds for p in ranks)
        state = "known" if known else "unknown"
        if result is not None:
            state = "qualified" if result.reason is None else "failed"
        return {
            "state": "running" if moving else state,
            "at_unix": result.at_unix if result is not None else None,
            "reason": result.reason if result is not None and not moving else None,
            "ranks": [self._rank(process) for process in ranks],
        }

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
        measured = self._measured.get(process)
        if measured is None or measured.out_s is None:
            kept = self._kinds.get(self._kind_of.get(process, ""), {})
            return {name: kept.get(name) for name in _MEASURES}
        return {name: getattr(measured, name) for name in _MEASURES}


_MEASURES: Final = ("way", "before_bytes", "out_bytes", "out_s", "in_s", "back_bytes")


def _kind(process: ProcessId, look: Preflight, terms: str) -> str:
    """Return a name for all ranks that are like this one, as far as that can be told."""
    variables = environment(process.pid) or {}
    count = next((variables[name] for name in _COUNTS if name in variables), "")
    problems = [each.what for each in look.problems()]
    words = [str(uid_of(process.pid)), look.program, count, terms, *problems]
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:32]
