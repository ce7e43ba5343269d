"""What a job that ran alone noted of itself, as a history: reports lay it beside the shared run."""

from __future__ import annotations

import os

from demo.job import Result
from libtimeslice.protocol import Message


def history_of(result: Result) -> list[Message]:
    """Returns the events that a daemon would have told, had one been there; the oldest first."""
    job = f"{os.getuid()}/{result.job}"
    events: list[Message] = []

    def note(at: float, kind: str, **facts: object) -> None:
        events.append({"at": at, "kind": kind, "level": "info", "job": job, **facts})

    for token, (phase, on_devices, begin, end) in enumerate(result.phases, start=1):
        if on_devices:
            lease = {"lease": f"alone-{token}", "groups": "alone"}
            note(begin, "granted", **lease, token=token, phase=phase, waited_s=0.0, switch_s=0.0)
            note(end, "released", **lease, held_s=end - begin, cause="released")
        else:
            note(end, "phase", name=phase, begin=False, times=1, seconds=end - begin)
    for at, figures in result.progress:
        note(at, "progress", **figures)
    events.sort(key=lambda event: float(event["at"]))
    return [{"seq": number, **event} for number, event in enumerate(events, start=1)]
