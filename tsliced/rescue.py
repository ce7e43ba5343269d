"""What `tslicectl rescue` does: the journal, the driver and the devices, without a daemon."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from libtimeslice.protocol import Message
from tsliced.config import (
    DEFAULT_PATH,
    Config,
    ConfigError,
    load,
    user_config,
    user_defaults,
)
from tsliced.core.actions import Record
from tsliced.core.model import DeviceId, HostName, RankState
from tsliced.ctl.failures import (
    BUSY,
    DONE,
    FAILED,
    NOT_FOUND,
    NOT_PERMITTED,
    USAGE,
    CommandError,
)
from tsliced.ctl.output import NOTHING, print_json, printable, say, size, table
from tsliced.host.backends.base import BackendContext, BackendError
from tsliced.host.backends.composite import make_backend
from tsliced.host.devices import Devices, DevicesUnavailable
from tsliced.host.journal import (
    Journal,
    JournalCode,
    JournalError,
    check_unused,
    read_records,
)
from tsliced.host.measuring import Measuring
from tsliced.host.memory import DeviceLedger
from tsliced.host.rescue import Case, Patient, Rescue, case_of, cases_in


def run(options: argparse.Namespace) -> int:
    """Finds, and brings back, what can be."""
    try:
        usual = user_config(os.environ) if options.user else DEFAULT_PATH
        defaults = user_defaults(os.environ) if options.user else None
        optional = options.config is None
        config = load(options.config or usual, optional=optional, defaults=defaults)
    except ConfigError as exc:
        raise CommandError(str(exc), code="bad_config", status=USAGE) from exc
    try:
        cases = asyncio.run(_rescue(options, config))
    except (BackendError, DevicesUnavailable) as exc:
        advice = "" if options.force else "; --force goes without a look at the devices"
        raise CommandError(f"{exc}{advice}", code="unavailable") from exc
    patients = [patient for case in cases for patient in case.patients]
    if options.json:
        print_json({"dry_run": options.dry_run, "ranks": list(map(_facts, patients))})
    elif patients:
        print("\n".join(_lines(patients)))
    else:
        say("no rank that lives is in the journal; name processes with --pid")
    left = [patient for patient in patients if patient.now is not RankState.RUNNING]
    return FAILED if left and not options.dry_run else DONE


async def _rescue(options: argparse.Namespace, config: Config) -> list[Case]:
    directory = Path(config.daemon.state_dir)
    async with contextlib.AsyncExitStack() as stack:
        journal, records = _open(directory, options)
        if journal is not None:
            stack.callback(journal.close)
        nvml = Devices(config.daemon.nvml_library, timeout_s=config.scan.nvml_timeout_s)
        backend = make_backend(config.ways(), _context(directory, config, nvml))
        devices = nvml if backend.seen_by_nvml and not options.force else None
        if devices is not None:
            await devices.start()
            stack.push_async_callback(devices.close)
        await backend.start()
        stack.push_async_callback(backend.close)
        rescuer = Rescue(
            records=records,
            backend=backend,
            eye=devices,
            ledger=DeviceLedger(margin_bytes=config.memory.device_margin_bytes),
            query_limit_s=options.limit,
            keep=journal.write if journal is not None else lambda _: None,
        )
        inventory = devices.inventory() if devices is not None else ()
        cases = cases_in(records)
        cases = _chosen(options, cases, HostName(config.daemon.host), [d.uuid for d in inventory])
        for case in cases:
            await rescuer.examine(case)
        for case in cases:
            if not options.dry_run:
                await rescuer.treat(case)
    return cases


def _context(directory: Path, config: Config, devices: Devices) -> BackendContext:
    workers = directory / "workers"
    workers.mkdir(mode=0o700, parents=True, exist_ok=True)
    return BackendContext(
        directory=workers,
        cuda_library=config.daemon.cuda_library,
        settings=config.backends,
        measure=Measuring(devices).bytes_of,
    )


def _open(
    directory: Path, options: argparse.Namespace
) -> tuple[Journal | None, tuple[Record, ...]]:
    """Returns the journal, unless nothing is to be changed, and what stands in it.

    Without a journal that can be read there is still what --pid names.
    """
    try:
        if not directory.is_dir():
            raise JournalError(JournalCode.IO, f"there is no journal in {directory}")
        if options.dry_run:
            check_unused(directory)
            return None, read_records(directory)
        journal = Journal.open(directory, now_unix=time.time())
    except (JournalError, PermissionError) as exc:
        code = exc.code if isinstance(exc, JournalError) else JournalCode.READ_ONLY
        if code is JournalCode.LOCKED:
            raise CommandError(str(exc), code="daemon_runs", status=BUSY) from exc
        if code is JournalCode.READ_ONLY and os.geteuid() != 0:
            advice = "; run this as root, or as the daemon's user"
            raise CommandError(
                f"{exc}{advice}", code="not_permitted", status=NOT_PERMITTED
            ) from exc
        if not options.pid:
            advice = "; name the processes with --pid"
            raise CommandError(f"{exc}{advice}", code="no_journal") from exc
        say(f"{exc}; going by --pid alone")
        return None, ()
    for warning in journal.warnings:
        say(warning)
    return journal, journal.load()


def _chosen(
    options: argparse.Namespace, cases: list[Case], host: HostName, devices: Sequence[DeviceId]
) -> list[Case]:
    """Returns what is asked for: all jobs, one, or single processes."""
    if options.pid:
        known = {p.rank.process.pid: p for case in cases for p in case.patients}
        by_job = [
            Case(
                job=case.job,
                patients=[p for p in case.patients if p.rank.process.pid in options.pid],
            )
            for case in cases
        ]
        try:
            rest = case_of((each for each in options.pid if each not in known), host, devices)
        except LookupError as exc:
            raise CommandError(str(exc), code="no_such_process", status=NOT_FOUND) from exc
        return [case for case in (*by_job, rest) if case.patients]
    if options.job:
        named = [case for case in cases if case.job is not None and case.job.is_called(options.job)]
        if not named:
            known_jobs = ", ".join(str(case.job) for case in cases) or "none"
            raise CommandError(
                f"no rank of job {options.job!r} lives; there are: {known_jobs}",
                code="not_found",
                status=NOT_FOUND,
            )
        return named
    return cases


def _facts(patient: Patient) -> Message:
    tenancy = patient.tenancy
    return {
        "job": str(tenancy.job) if tenancy is not None else None,
        "groups": list(tenancy.groups) if tenancy is not None else [],
        "pid": patient.rank.process.pid,
        "start_time": patient.rank.process.start_time,
        "device_bytes": patient.record.device_bytes if patient.record is not None else None,
        "was": patient.was.value if patient.was is not None else None,
        "state": patient.now.value if patient.now is not None else None,
        "reason": patient.reason,
    }


def _lines(patients: Sequence[Patient]) -> list[str]:
    rows = []
    for patient in patients:
        facts = _facts(patient)
        rows.append(
            [
                printable(facts["job"] or NOTHING),
                str(facts["pid"]),
                facts["was"] or NOTHING,
                facts["state"] or NOTHING,
                size(facts["device_bytes"]),
                printable(facts["reason"] or NOTHING),
            ]
        )
    return table(["JOB", "PID", "WAS", "IS", "MEMORY", "REASON"], rows, right=["PID", "MEMORY"])
