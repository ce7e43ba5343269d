"""The page itself: everything in one file, and nothing that somebody typed can act in it.

Texts from outside are escaped where they stand in HTML; what the script draws lies in a block of
JSON without any `<`. A policy in the page lets only this script and this style run, by their
digests, and nothing be loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from typing import Any

from libtimeslice import __version__
from tsliced.ctl.output import NOTHING, counted, duration, size
from tsliced.observe.accounts import Event
from tsliced.observe.report.drawing import drawing
from tsliced.observe.report.figures import Figures, JobFigures, Stats, figures
from tsliced.observe.report.verdict import Sentence, job_id, verdict
from tsliced.observe.timeline import Timeline

_ASSETS = files("tsliced.observe.report").joinpath("assets")


def report(
    events: Sequence[Event], line: Timeline, solo: Sequence[Timeline] = (), *, host: str = ""
) -> str:
    """Return the HTML. `solo` are recordings of jobs that ran alone."""
    found = figures(events, line, solo)
    return page(found, verdict(found, backlogs(line)), drawing(line, found.jobs, solo), host=host)


def backlogs(line: Timeline) -> dict[tuple[str, str], float]:
    """Return how full each queue with a target is on average, by job and name."""
    return {
        key: sum(series.values) / len(series.values) / series.target
        for key, series in line.queues.items()
        if series.target and series.values
    }


def page(
    found: Figures, sentences: Sequence[Sentence], drawn: dict[str, Any], *, host: str = ""
) -> str:
    """Return the HTML of what was worked out."""
    style = _asset("uPlot.min.css") + _asset("report.css")
    # The library's own line with its address stays in front of it, as its licence asks.
    script = _asset("uPlot.iife.min.js") + "\n" + _asset("report.js")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"tsliced: {', '.join(job_id(job.job) for job in found.jobs[:3]) or 'nothing'}"
    body = "\n".join(
        [
            _head(found, host),
            _verdict(sentences),
            _groups(found),
            _jobs(found.jobs),
            '<section><h2>What happened</h2><div id="tools"></div><div id="key"></div>'
            '<div id="lanes"></div><div id="time"></div></section>',
            '<section><h2>Steps and what the jobs tell</h2><div id="steps"></div></section>',
            '<section><h2>How long it took</h2><div id="spreads"></div></section>',
            _stages(found.jobs),
            _phases(found.jobs),
            f"<footer>Made by tsliced {escape(__version__)} with uPlot (MIT).</footer>",
        ]
    )
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{style}</style></head><body>\n{body}\n"
        f'<script type="application/json" id="data">{_json(drawn)}</script>\n'
        f"<script>{script}</script>\n</body></html>\n"
    )


def _asset(name: str) -> str:
    return _ASSETS.joinpath(name).read_text(encoding="utf-8").strip()


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _json(value: object) -> str:
    """Return JSON that no parser of HTML can see an end or a comment in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


# --- parts ----------------------------------------------------------------------------------------


def _head(found: Figures, host: str) -> str:
    begin, end = (_instant(at) for at in (found.begin_unix, found.end_unix))
    where = f" on {escape(host)}" if host else ""
    span = duration(found.end_unix - found.begin_unix)
    return (
        f"<header><h1>Shared devices{where}</h1>"
        f"<p>{begin} to {end}, {span}; {counted(len(found.jobs), 'job')}, "
        f"{counted(len(found.groups), 'group')}.</p>"
        "</header>"
    )


def _instant(at: float) -> str:
    local = datetime.fromtimestamp(at, tz=timezone.utc).astimezone()
    return escape(local.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _verdict(sentences: Iterable[Sentence]) -> str:
    items = "".join(f'<li class="{s.tone.value}">{escape(s.text)}</li>' for s in sentences)
    return f'<section id="verdict"><h2>Verdict</h2><ul>{items}</ul></section>'


def _groups(found: Figures) -> str:
    rows = [
        [
            group.name,
            duration(group.span_s),
            duration(group.serial_s),
            f"{group.gain:.2f}",
            _share(group.before.useful),
            _share(group.duty.useful),
            _share(group.duty.held),
            _share(group.before.kernel),
            _share(group.duty.kernel),
        ]
        for group in found.groups
    ]
    header = ["Group", "Together", "One by one", "Times as fast", "Useful, before", "Useful"]
    header += ["Held", "Kernel, before", "Kernel"]
    note = (
        "Held: leased, or moved for a lease. Useful: without the moves. Kernel: a kernel ran. "
        "Before: each job with devices of its own, as recorded, or worked out from its time "
        "without waits."
    )
    return _table("Groups", header, rows, note)


def _jobs(jobs: Sequence[JobFigures]) -> str:
    rows = [
        [
            job_id(job.job),
            str(len(job.steps.shared_s)),
            duration(job.step_s),
            f"{duration(job.alone_step_s)}{'' if job.recorded else '*'}",
            f"{job.step_s / job.alone_step_s:.2f}" if job.step_s and job.alone_step_s else NOTHING,
            duration(job.useful_s),
            *_spread(job.waits),
            *_spread(job.switches),
            duration(job.idle_window_s),
            size(job.moved_bytes),
        ]
        for job in jobs
    ]
    header = ["Job", "Steps", "Step, shared", "Step, alone", "Slowdown", "Useful", "Wait p50"]
    header += ["p95", "Most", "Switch p50", "p95", "Most", "Idle window", "Moved"]
    guessed = not all(job.recorded for job in jobs)
    note = "* worked out: the same time without waits." if guessed else ""
    return _table("Jobs", header, rows, note)


def _spread(found: Stats | None) -> list[str]:
    values = (found.p50, found.p95, found.most) if found is not None else (None, None, None)
    return [duration(value) for value in values]


def _stages(jobs: Sequence[JobFigures]) -> str:
    rows = [
        [
            job_id(job.job),
            stage.name,
            {"held": "devices", "host": "host"}.get(stage.kind, NOTHING),
            duration(stage.seconds),
            _share(stage.share),
            _share(stage.kernel),
            "limits it" if stage is job.limit else "",
        ]
        for job in jobs
        for stage in sorted(job.stages, key=lambda stage: -stage.seconds)
    ]
    header = ["Job", "What", "Needs", "Time", "Share", "Kernel", ""]
    return _table("Where the time went", header, rows)


def _phases(jobs: Sequence[JobFigures]) -> str:
    rows = [
        [
            job_id(job.job),
            phase.name,
            str(phase.count),
            *_spread(phase.hold_s),
            _share(phase.overhead),
            "sliced too finely" if phase.too_fine else "pays",
        ]
        for job in jobs
        for phase in job.phases
    ]
    header = ["Job", "Phase", "Times", "Held p50", "p95", "Most", "Switching", ""]
    return _table("Phases", header, rows)


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    remark = f"<p class=note>{escape(note)}</p>" if note else ""
    return (
        f"<section><h2>{escape(title)}</h2><div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{remark}</section>"
    )
