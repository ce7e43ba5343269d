"""What the figures say, in plain sentences: is it worth it, what does it cost, what limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tsliced.ctl.output import duration, size
from tsliced.observe.report.figures import Figures, GroupFigures, JobFigures

#: Below these, sharing gains nothing that one would notice.
_WORTH_IT, _BREAK_EVEN = 1.1, 1.0
#: A queue that is fuller, or emptier, than this says which side of it is behind.
_FULL, _EMPTY = 0.9, 0.1
#: Kernels that run for less of a hold leave it to the host.
_HOST_BOUND = 0.5


class Tone(Enum):
    """How somebody should take a sentence."""

    GOOD = "good"
    PLAIN = "plain"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One thing that the figures say."""

    tone: Tone
    text: str


def verdict(figures: Figures, backlogs: dict[tuple[str, str], float]) -> list[Sentence]:
    """Return the sentences. `backlogs`: how full each queue of a job is on average; 1 is full."""
    found = [_gain(group) for group in figures.groups if len(group.jobs) > 1]
    found += [_duty(group) for group in figures.groups if group.jobs]
    found += [s for job in figures.jobs for s in _idle(job)]
    found += _cost(figures)
    found += [s for job in figures.jobs for s in _limit(job, backlogs)]
    found += [s for job in figures.jobs for s in _too_fine(job, figures)]
    if figures.failed_moves:
        text = f"{figures.failed_moves} moves failed and were turned back: see tslicectl events"
        found.append(Sentence(tone=Tone.BAD, text=text))
    return found


def job_id(job: str) -> str:
    """Return a job's id without its user."""
    return job.rpartition("/")[2]


def _gain(group: GroupFigures) -> Sentence:
    names = (
        " and ".join(map(job_id, group.jobs[:4]))
        if len(group.jobs) < 5
        else f"{len(group.jobs)} jobs"
    )
    times = f"{group.gain:.2f} times as fast as one after the other"
    how = "" if group.recorded else ", worked out from their waits,"
    text = (
        f"On {group.name}, {names} together took {duration(group.span_s)}; one after the other "
        f"they would take{how} {duration(group.serial_s)}: {times}."
    )
    if group.gain >= _WORTH_IT:
        return Sentence(tone=Tone.GOOD, text=f"Sharing pays. {text}")
    if group.gain >= _BREAK_EVEN:
        return Sentence(tone=Tone.PLAIN, text=f"Sharing hardly pays. {text}")
    return Sentence(tone=Tone.BAD, text=f"Sharing does not pay. {text}")


def _duty(group: GroupFigures) -> Sentence:
    before, after = group.before, group.duty
    text = f"Useful duty of {group.name}: {after.useful:.0%}"
    if len(group.jobs) > 1:
        text += f", where each job with devices of its own would have had {before.useful:.0%}"
    text += f" (held, switches included: {after.held:.0%})"
    if after.kernel is not None:
        text += f"; kernels ran for {after.kernel:.0%} of the time"
        if len(group.jobs) > 1 and before.kernel is not None:
            text += f" instead of {before.kernel:.0%}"
    return Sentence(tone=Tone.PLAIN, text=text + ".")


def _idle(job: JobFigures) -> Iterator[Sentence]:
    if job.idle_window_s is None:
        return
    text = (
        f"{job_id(job.job)} wants no devices for {duration(job.idle_window_s)} at a time, and for "
        f"{min(1.0, job.idle_share):.0%} of its own time: this is the window that others can have."
    )
    yield Sentence(tone=Tone.PLAIN, text=text)


def _cost(figures: Figures) -> Iterator[Sentence]:
    switch = figures.switch
    if switch is None:
        yield Sentence(tone=Tone.PLAIN, text="No state was moved: nobody ever had to make room.")
        return
    text = (
        f"A full switch costs {duration(switch.seconds)}: {duration(switch.off_s)} off and "
        f"{duration(switch.on_s)} on, for {size(switch.bytes)} (median of {switch.count}). A phase "
        f"should last {duration(switch.shortest_phase_s)} or longer, so that no more than a tenth "
        "goes into it."
    )
    yield Sentence(tone=Tone.PLAIN, text=text)


def _limit(job: JobFigures, backlogs: dict[tuple[str, str], float]) -> Iterator[Sentence]:
    stage = job.limit
    if stage is None:
        return
    name = job_id(job.job)
    text = f"{name} is limited by {stage.name}, {stage.share:.0%} of its time"
    if stage.kind == "host":
        text += ", which needs no devices"
    elif stage.kernel is not None:
        text += f", with kernels running for {stage.kernel:.0%} of it"
        if stage.kernel < _HOST_BOUND:
            text += ": the host keeps the devices waiting"
    if job.tokens_per_s is not None:
        text += f"; it makes {job.tokens_per_s:,.0f} tokens per second"
        if job.tokens_per_s_alone is not None:
            text += f", and {job.tokens_per_s_alone:,.0f} alone"
    for (owner, queue), level in backlogs.items():
        if owner == job.job and level >= _FULL:
            text += f"; its queue {queue} is full, so what takes from it is behind"
        elif owner == job.job and level <= _EMPTY:
            text += f"; its queue {queue} is empty, so what fills it is behind"
    yield Sentence(tone=Tone.PLAIN, text=text + ".")


def _too_fine(job: JobFigures, figures: Figures) -> Iterator[Sentence]:
    fine = [phase for phase in job.phases if phase.too_fine]
    if not fine:
        return
    named = ", ".join(
        f"{phase.name} ({duration(phase.hold_s.p50)}, {phase.overhead:.0%} switches)"
        for phase in fine
    )
    text = f"{job_id(job.job)} gives the devices back too often. What does not pay: {named}."
    if figures.switch is not None:
        text += f" Put together what is shorter than {duration(figures.switch.shortest_phase_s)}."
    yield Sentence(tone=Tone.BAD, text=text)
