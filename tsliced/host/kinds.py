"""Kinds of ranks: which of them left their devices and came back, what that took, which could not.

A *kind* is the shape of a job as far as it can be told from outside: the same program (not its
arguments) of the same user, with as many ranks and devices, the same settings of NCCL, torch and
CUDA, the same driver and backends. What one job showed holds for the next one of the same shape.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tsliced.core.model import ProcessId, Verb
from tsliced.host.backends.op_files import read_facts, write_atomically
from tsliced.host.preflight import SETTINGS, program_of
from tsliced.host.processes import environment, uid_of
from tsliced.host.procfs import PROC

#: Kinds that are kept; those that were not seen for longest go first.
MAX_KINDS: Final = 1000
#: That a kind could not come back is believed for so long, seconds: it may have been the occasion.
FAILURE_S: Final = 86_400.0
#: What is kept is written anew when a figure differs from the written one by this factor.
_NOTABLE: Final = 1.5
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
    #: On its devices after it was thawed; None: nobody looked, or NVML does not say.
    back_bytes: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether its memory came back, as far as is known."""
        return self.back_bytes is None or self.back_bytes >= self.before_bytes * WHOLE_RATIO

    def switch_s(self, device_bytes: int) -> float | None:
        """Return what it takes to move so many bytes off devices and back; None: not known."""
        if self.out_s is None or self.in_s is None:
            return None
        return (self.out_s + self.in_s) * _ratio(device_bytes, self.before_bytes)

    def step_s(self, verb: Verb, moved_bytes: int) -> float | None:
        """Return what a snapshot or a restore of so many bytes takes; None: not known."""
        if verb is Verb.SNAPSHOT and self.out_s is not None:
            return self.out_s * _ratio(moved_bytes, self.before_bytes)
        if verb is Verb.RESTORE and self.in_s is not None:
            return self.in_s * _ratio(moved_bytes, self.out_bytes)
        return None


def _ratio(count: int, measured: int) -> float:
    """Return by how much more there is to move; where nobody counts, as much as then."""
    return count / measured if count and measured else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is known of a kind."""

    measured: Measured
    #: Why the latest one of it could not come back; None: it did.
    failure: str | None


class Kinds:
    """All kinds that were seen, in a file. Belongs to the event loop."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._written: dict[str, Any] = read_facts(path)
        self._kinds: dict[str, dict[str, Any]] = {
            name: kept for name, kept in self._written.items() if _is_sound(kept)
        }

    def get(self, name: str | None) -> Kind | None:
        """Return what is known of a kind; None: nothing."""
        kept = self._kinds.get(name or "")
        if kept is None:
            return None
        failure = kept["failure"]
        if failure is not None and self._clock() > kept["at_unix"] + FAILURE_S:
            return None
        return Kind(measured=Measured(**{key: kept[key] for key in MEASURES}), failure=failure)

    def keep(self, name: str, program: str, measured: Measured) -> None:
        """Take down that one of a kind left its devices and came back."""
        self._put(name, program, measured, None)

    def keep_failure(self, name: str, program: str, failure: str) -> None:
        """Take down that one of a kind could not come back, with what was measured before."""
        known = self._kinds.get(name)
        measured = Measured(**{key: known[key] for key in MEASURES}) if known else Measured()
        self._put(name, program, measured, failure)

    def _put(self, name: str, program: str, measured: Measured, failure: str | None) -> None:
        self._kinds.pop(name, None)
        self._kinds[name] = {
            "program": program,
            "failure": failure,
            "at_unix": self._clock(),
            **{key: getattr(measured, key) for key in MEASURES},
        }
        while len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if _differ(self._written.get(name), self._kinds[name]):
            self._written = dict(self._kinds)
            with contextlib.suppress(OSError):  # what is not kept is tried anew after a restart
                write_atomically(self._path, self._written)


MEASURES: Final = tuple(Measured.__dataclass_fields__)


def _is_sound(kept: object) -> bool:
    """Whether an entry of the file is one that this version wrote."""
    if not isinstance(kept, dict) or not {"program", "failure", "at_unix", *MEASURES} <= set(kept):
        return False
    figures = (kept["at_unix"], kept["before_bytes"], kept["out_bytes"])
    others = (kept["out_s"], kept["in_s"], kept["back_bytes"])
    return all(isinstance(figure, (int, float)) for figure in figures) and all(
        figure is None or isinstance(figure, (int, float)) for figure in others
    )


def _differ(before: object, after: Mapping[str, Any]) -> bool:
    """Whether a kind has to be written anew, which is not worth it after every switch."""
    if not _is_sound(before):
        return True
    assert isinstance(before, dict)
    if (before["failure"], before["way"]) != (after["failure"], after["way"]):
        return True
    pairs = ((before[name], after[name]) for name in ("out_bytes", "out_s", "in_s"))
    return any(_is_notable(one, other) for one, other in pairs)


def _is_notable(one: float | None, other: float | None) -> bool:
    if not one or not other:
        return one != other
    return max(one / other, other / one) > _NOTABLE


def shape_of(process: ProcessId, *, proc: str = PROC) -> tuple[str, ...]:
    """Return what a process's files say of its kind; nothing if they do not say what it runs.

    It reads files: call it in a thread. An environment that was written over is one without
    settings, which is another kind than one in which they can be read. Raises OSError.
    """
    program = program_of(process.pid, proc=proc)
    if not program:
        return ()
    variables = environment(process.pid, proc=proc) or {}
    count = next((variables[name] for name in _COUNTS if name in variables), "")
    settings = [f"{name}={variables[name]}" for name in SETTINGS if name in variables]
    return (program, str(uid_of(process.pid, proc=proc)), count, *settings)


@lru_cache(maxsize=MAX_KINDS)
def name_of(*words: str) -> str:
    """Return the name of the kind that all these words describe."""
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:32]
