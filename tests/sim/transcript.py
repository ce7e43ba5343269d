"""What happened in a life, in order, by host, in short lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum

from life import Life

from tsliced.core.actions import Action, FreeMemory, Note, SettleHostMemory, WatchProcess
from tsliced.core.events import Event, FaultCleared, GroupsObserved, MemoryReserved, TimePassed
from tsliced.core.model import (
    Counter,
    HostName,
    JobKey,
    ProcessId,
    RankId,
    Reason,
    Stamp,
    TenancyKey,
)

#: Said by other lines, or by nothing that anybody asks for.
LEFT_OUT = (
    FaultCleared,
    FreeMemory,
    SettleHostMemory,
    WatchProcess,
    GroupsObserved,
    MemoryReserved,
    TimePassed,
)
#: Lines that are kept: the latest ones.
MAX_LINES = 4000
#: Facts that tell no story.
TEDIOUS = frozenset({"secret", "seconds", "bytes", "moved_bytes", "timeout_s", "ack_s", "waited_s"})


def short(value: object) -> str:
    """Return a value in as few words as will do."""
    match value:
        case Reason(cause=cause, rank=rank):
            return f"{cause.value}({rank})" if rank else cause.value
        case TenancyKey(job=job, groups=groups):
            return f"{job.id}@{'+'.join(groups)}"
        case JobKey(id=name):
            return name
        case RankId() | None:
            return str(value)
        case ProcessId(pid=pid):
            return str(pid)
        case Stamp(epoch=epoch, step=step):
            return f"{epoch.number}.{step}"
        case Counter(number=number):
            return str(number)
        case Enum():
            return str(value.value)
        case Mapping():
            return " ".join(f"{k}={short(v)}" for k, v in value.items() if k not in TEDIOUS)
        case tuple() | list() | frozenset():
            return f"({', '.join(short(part) for part in value)})"
        case float():
            return f"{value:.3f}"
        case _ if is_dataclass(value):
            return describe(value)
        case _:
            return str(value)


def describe(what: object) -> str:
    """Return an event, an action or a message in one line."""
    if isinstance(what, Note):
        return f"note {what.kind} {short(what.facts)}"
    facts = [
        f"{each.name}={short(getattr(what, each.name))}"
        for each in fields(what)  # type: ignore[arg-type]  # all of them are dataclasses
        if each.name not in TEDIOUS
    ]
    return " ".join([type(what).__name__, *facts])


@dataclass(slots=True)
class Transcript:
    """Writes a life down while it is lived."""

    life: Life
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES))

    def __post_init__(self) -> None:
        self.life.cluster.note = self.note
        judge = self.life.cluster.watch

        def watch(host: HostName, what: Event | Action) -> None:
            if not isinstance(what, LEFT_OUT):
                self.note(host, describe(what))
            judge(host, what)

        self.life.cluster.watch = watch

    def note(self, host: str, text: str) -> None:
        """Write one line."""
        self.lines.append(f"{self.life.cluster.timeline.now:9.3f} {host:4} {text}")
