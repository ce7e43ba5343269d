"""`tslicectl observe`: what sharing could give to a job that runs without it now."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from tsliced.ctl.failures import DONE, FAILED, NOT_FOUND, CommandError
from tsliced.ctl.measured import latest
from tsliced.ctl.options import Commands, pid, positive_seconds, seconds, text
from tsliced.ctl.output import (
    duration,
    folded,
    print_json,
    rate,
    say,
    screen_width,
    size,
    styled,
    table,
    use_colour,
)

if TYPE_CHECKING:
    from tsliced.observe.idleness import Gain, Idleness, Switch
    from tsliced.observe.watching import Watched

DEFAULT_DURATION_S = 60.0
INTERVAL_S = 0.25
#: A longer look has longer intervals.
MOST_SAMPLES = 100_000

_DESCRIPTION = """\
Looks at a running job that shares nothing yet: its processes need no library and no lease, and no
daemon has to run. Says how much of the time its devices were idle, in windows of which length, and
what sharing them could give at the cost of a switch. Ctrl-C ends it early, with what was seen so
far. As root it sees the jobs of all users.
"""
_VERDICTS = {
    "worth_it": ("worth sharing", "green"),
    "pays_a_little": ("sharing would pay a little", "yellow"),
    "not_worth_it": ("not worth sharing, as it runs now", "red"),
}


def add_commands(commands: Commands) -> None:
    """Declares the command of this module."""
    observe = commands.add(
        "observe",
        "before adopting: how idle is a running job, and what could sharing give",
        description=_DESCRIPTION,
    )
    observe.add_argument(
        "--pid", metavar="PID", type=pid, action="append", help="this process; may be repeated"
    )
    observe.add_argument(
        "--job",
        metavar="JOB",
        type=text,
        action="append",
        help="processes of this job, by TSLICE_JOB_ID or Slurm; may be repeated",
    )
    observe.add_argument(
        "--device",
        metavar="DEVICE",
        type=text,
        action="append",
        help="look at this device only, by index or UUID; may be repeated (default: all that the "
        "processes are on)",
    )
    observe.add_argument(
        "--duration",
        metavar="SECONDS",
        type=positive_seconds,
        default=DEFAULT_DURATION_S,
        help=f"for so long; several steps of the job, please (default {DEFAULT_DURATION_S:g})",
    )
    observe.add_argument(
        "--interval",
        metavar="SECONDS",
        type=positive_seconds,
        default=INTERVAL_S,
        help=f"between two looks (default {INTERVAL_S:g})",
    )
    cost = observe.add_mutually_exclusive_group()
    cost.add_argument(
        "--switch-s",
        metavar="SECONDS",
        type=seconds,
        help="what a switch costs: one job out, the other one in (default: what bench-switch "
        "measured here, else estimated)",
    )
    cost.add_argument(
        "--copy-rate",
        metavar="GB_PER_S",
        type=positive_seconds,
        help="estimate it by this rate, of one device in each direction",
    )
    observe.add_argument("--nvml-library", metavar="PATH", type=text, help=argparse.SUPPRESS)
    observe.set_defaults(call=observe_job)


def observe_job(options: argparse.Namespace) -> int:
    """Prints one page, or one JSON document."""
    # No other command needs what looks at devices.
    from tsliced.observe import idleness
    from tsliced.observe.watching import LEAST_SAMPLES, CannotWatch, NothingToWatch, Wanted, Watch

    wanted = Wanted(
        pids=frozenset(options.pid or ()),
        jobs=frozenset(options.job or ()),
        devices=frozenset(options.device or ()),
    )
    interval_s = max(options.interval, options.duration / MOST_SAMPLES)
    watch = Watch(
        wanted=wanted,
        duration_s=options.duration,
        interval_s=interval_s,
        library=options.nvml_library,
        on_begin=partial(_say_whom, options.duration),
    )
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(watch.run())
    except NothingToWatch as exc:
        raise CommandError(str(exc), code="not_found", status=NOT_FOUND) from exc
    except CannotWatch as exc:
        raise CommandError(str(exc), code="unavailable", status=FAILED) from exc
    watched = watch.watched
    if watched is None or len(watched.samples) < LEAST_SAMPLES:
        raise CommandError("it ended before anything was seen", code="not_found", status=NOT_FOUND)
    seen = idleness.look_through(watched.samples)
    measured = None
    if options.switch_s is not None:
        switch = idleness.Switch(seconds=options.switch_s, source="given")
    elif options.copy_rate is not None:
        pace = options.copy_rate * 1e9
        switch = idleness.estimate_switch(seen, out_bytes_per_s=pace, in_bytes_per_s=pace)
    elif (measured := latest(options)) is not None:
        switch = idleness.estimate_switch(
            seen,
            fixed_s=measured.fixed_s,
            out_bytes_per_s=measured.out_bytes_per_s,
            in_bytes_per_s=measured.in_bytes_per_s,
            source="measured",
        )
    else:
        switch = idleness.estimate_switch(seen)
    gain = idleness.estimate_gain(seen, switch.seconds)
    if options.json:
        found = document(watched, seen, switch, gain, interval_s)
        print_json({**found, "measured_at": measured.at_unix if measured is not None else None})
    else:
        width = screen_width()
        lines = page(watched, seen, switch, gain, colour=use_colour(sys.stdout))
        # (Of tables and the verdict no line is long.)
        print("\n".join(part for line in lines for part in folded(line, width)), flush=True)
    return DONE


def _say_whom(seconds: float, watched: Watched) -> None:
    pids = ", ".join(map(str, sorted(watched.processes)))
    devices = ", ".join(str(device.index) for device in watched.devices)
    say(f"looking at pid {pids} on device {devices} for {duration(seconds)}; Ctrl-C ends it early")


def document(
    watched: Watched, seen: Idleness, switch: Switch, gain: Gain, interval_s: float
) -> dict[str, object]:
    """Returns what `--json` prints; shares are from 0 to 1."""
    return {
        "seconds": seen.seconds,
        "samples": seen.samples,
        "interval_s": interval_s,
        "ended": watched.ended,
        "processes": [{"pid": pid, "name": name} for pid, name in watched.processes.items()],
        "jobs": sorted(watched.jobs),
        "others": sorted(watched.others),
        "devices": [
            {
                "index": device.index,
                "uuid": device.uuid,
                "name": device.name,
                "total_bytes": device.total_bytes,
                "peak_bytes": seen.peak_bytes.get(device.uuid, 0),
                "kernel_share": seen.kernel_share_of.get(device.uuid, 0.0),
            }
            for device in watched.devices
        ],
        "busy_share": seen.busy_share,
        "kernel_share": seen.kernel_share,
        "windows": [asdict(window) for window in seen.windows],
        "idle_histogram": [asdict(each) for each in seen.histogram],
        "switch": asdict(switch),
        "gain": {**asdict(gain), "verdict": gain.verdict},
    }


def page(
    watched: Watched, seen: Idleness, switch: Switch, gain: Gain, *, colour: bool = False
) -> list[str]:
    """Returns the page, without line ends."""
    lines = [_whose(watched, seen), ""]
    for device in watched.devices:
        peak, share = seen.peak_bytes.get(device.uuid, 0), seen.kernel_share_of.get(device.uuid, 0)
        lines.append(
            f"device {device.index}  {device.name}: {size(peak)} of {size(device.total_bytes)} "
            f"at most, a kernel ran {share:.0%} of the time"
        )
    idle = seen.idle_s
    lines += ["", f"busy   {seen.busy_share:.0%} of the time (kernels: {seen.kernel_share:.0%})"]
    if idle:
        lines.append(
            f"idle   {len(idle)} windows, {duration(sum(idle))} in all; median "
            f"{duration(seen.median_idle_s)}, longest {duration(idle[-1])}"
        )
        lines += ["", *_histogram_lines(seen, colour=colour)]
    else:
        lines.append("idle   never for long enough to be seen")
    lines += ["", _switch_line(switch), *_gain_lines(seen, switch, gain)]
    text, style = _VERDICTS[gain.verdict]
    lines += ["", styled(f"verdict: {text}", style, colour=colour)]
    if watched.others:
        pids = ", ".join(map(str, sorted(watched.others)))
        lines += ["", f"others were on the same devices (pid {pids}): what is busy may be theirs"]
    return lines


def _whose(watched: Watched, seen: Idleness) -> str:
    names = [f"{pid} ({name})" for pid, name in watched.processes.items()]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    jobs = f" of job {', '.join(sorted(watched.jobs))}" if watched.jobs else ""
    end = "; it has ended" if watched.ended else ""
    return f"pid {shown}{jobs}, looked at for {duration(seen.seconds)}{end}"


def _histogram_lines(seen: Idleness, *, colour: bool) -> list[str]:
    rows, lower = [], 0.0
    for each in seen.histogram:
        if each.below_s is None:
            label = f"{lower:g} s and more"
        else:
            label = f"{lower:g} to {each.below_s:g} s" if lower else f"below {each.below_s:g} s"
        lower = each.below_s or lower
        share = f"{each.seconds / seen.seconds:.0%}"
        rows.append([label, str(each.count), duration(each.seconds), share])
    header = ["IDLE WINDOWS", "COUNT", "IN ALL", "OF THE TIME"]
    return table(header, rows, right=header[1:], colour=colour)


def _switch_line(switch: Switch) -> str:
    if switch.source == "given":
        return f"a switch takes {duration(switch.seconds)}, as given"
    how = "by what bench-switch measured here" if switch.source == "measured" else "estimated"
    text = (
        f"a switch takes about {duration(switch.seconds)}, {how}: {size(switch.bytes_per_device)} "
        f"a device out at {rate(switch.out_bytes_per_s)} and as much in at "
        f"{rate(switch.in_bytes_per_s)}, {duration(switch.fixed_s)} for the rest"
    )
    return text if switch.source == "measured" else f"{text}; measure it by tslicectl bench-switch"


def _gain_lines(seen: Idleness, switch: Switch, gain: Gain) -> list[str]:
    lines = [
        f"others could have the devices {gain.usable_share:.0%} of the time without this job being "
        f"late: {gain.windows} of {len(seen.idle_s)} idle windows are longer than two switches",
        f"two jobs like this one: {gain.speedup:.2f} times as fast together as one after the other",
    ]
    if gain.break_even_s is not None:
        lines.append(f"it pays as long as a switch takes less than {duration(gain.break_even_s)}")
    elif seen.idle_s:
        lines.append("it would not pay if switches took no time: the job is not idle enough")
    return lines
