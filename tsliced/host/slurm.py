"""What Slurm's own commands are asked: lists of hosts, a job, and whose processes are here.

And what they are told: a comment on a job.

Each call starts a program and waits for it within a limit, so the daemon makes them in a thread.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

#: Besides PATH, which slurmd's hooks and services have a short one of.
_USUAL_PLACES: Final = "/usr/bin:/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin"
#: A single host, which needs nobody to expand it.
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
#: What `ask_job` asks for. Nothing of it can be chosen freely by the job's user, as its name and
#: its comment can: among all fields, ``Account=`` in a comment could not be told from the account.
_FORMAT: Final = "%A|%i|%U|%N|%e|%b|%a"
#: Of `squeue`'s states those that a job can be changed in.
_STATES_OF_THE_LIVING: Final = ("PD", "CF", "R", "S", "ST")
_NOTHING: Final = ("(null)", "N/A")
_TICKETS: Final = re.compile(r"(?:^|[,:/])tslice(?::(\d+))?(?:,|$)")


class SlurmError(Exception):
    """A command is not there, failed, or did not answer in time; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What the controller knows of one component of a job; of most jobs it is the only one."""

    id: str
    #: The job's own id, that of its first component.
    leader: str
    uid: int
    #: As a list that Slurm abbreviates.
    nodes: str
    account: str | None
    tickets: int | None
    ends_at_unix: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """What an administrator has said of a job in Slurm's own records (``AdminComment``)."""

    #: As Slurm names it where it is changed.
    job: str
    text: str


def expand_hosts(text: str, *, limit_s: float) -> tuple[str, ...]:
    """Return the hosts of a list such as ``n[1-3,7]``. Raises `SlurmError`."""
    if not text or _PLAIN_NAME.fullmatch(text):
        return (text,) if text else ()
    return tuple(_run("scontrol", "show", "hostnames", text, limit_s=limit_s).split())


def ask_job(id: str, *, limit_s: float) -> list[JobFacts]:
    """Return all components of a job, the controller being asked. Raises `SlurmError`.

    `id` may be that of any component.
    """
    end = time.monotonic() + limit_s
    facts = _squeue(id, limit_s)
    leaders = {fact.leader for fact in facts if fact.id == id}
    if leaders and id not in leaders:
        facts = _squeue(leaders.pop(), max(0.1, end - time.monotonic()))
    return facts


def _squeue(id: str, limit_s: float) -> list[JobFacts]:
    text = _run("squeue", "-h", "-j", id, "-o", _FORMAT, limit_s=limit_s)
    facts = []
    for line in text.splitlines():
        number, shown, uid, nodes, ends, tickets, account = (line.split("|", 6) + [""] * 7)[:7]
        if not (number.isdecimal() and uid.isdecimal()):
            continue
        # Components are shown as LEADER+NUMBER, tasks of an array as ARRAY_NUMBER.
        leader, plus, _ = shown.partition("+")
        facts.append(
            JobFacts(
                id=number,
                leader=leader if plus else number,
                uid=int(uid),
                nodes=nodes,
                account=account if account not in ("", "(null)") else None,
                tickets=_tickets(tickets),
                ends_at_unix=_instant(ends),
            )
        )
    return facts


def _tickets(text: str) -> int | None:
    match = _TICKETS.search(text)
    return int(match[1] or 1) if match else None


def _instant(text: str) -> float | None:
    with suppress(ValueError, OverflowError):
        # In local time, as all of Slurm's commands print it.
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None


def list_steps(id: str, node: str, *, limit_s: float) -> dict[int, str]:
    """Return the step of each process of a job that a node's slurmd started. Raises `SlurmError`.

    The node's own daemons are asked, as root, and no other host. Where Slurm tracks processes
    without cgroups this is the only proof of whose they are.
    """
    found: dict[int, str] = {}
    for line in _run("scontrol", "listpids", id, node, limit_s=limit_s).splitlines()[1:]:
        pid, job, step, *_ = (*line.split(), "", "", "")
        if pid.isdecimal() and job == id:
            found[int(pid)] = step
    return found


def ask_remark(id: str, *, limit_s: float) -> Remark | None:
    """Return what stands as the administrator's comment on a job; None: it has ended.

    Slurm 22.05 lets nobody change a job that has ended, be it completing still. Raises
    `SlurmError`.
    """
    form = "JobID:24,JobArrayID:48,StateCompact:16,admin_comment:1024"
    try:
        told = _run("squeue", "-h", "-r", "-j", id, "-O", form, limit_s=limit_s)
    except SlurmError as exc:
        if "Invalid job id" in str(exc):
            return None
        raise
    for line in told.splitlines():
        number, shown, state, *rest = (*line.split(maxsplit=3), "", "", "")
        if number == id and state in _STATES_OF_THE_LIVING:
            text = rest[0].strip()
            # The bare number is that of the whole array, for one of its tasks too.
            name = shown if "_" in shown else id
            return Remark(job=name, text="" if text in _NOTHING else text)
    return None


def write_remark(remark: Remark, *, limit_s: float) -> None:
    """Put a comment on a job that has not ended. Root and Slurm's operators may; `SlurmError`."""
    text = f"AdminComment={remark.text}"
    _run("scontrol", "update", f"JobId={remark.job}", text, limit_s=limit_s)


def ask_stored_remark(id: str, *, limit_s: float) -> Remark | None:
    """Return the comment on a job in the accounting; None: there is none of the job, or at all."""
    try:
        told = _run("sacct", "-n", "-X", "-P", "-j", id, "-o", "AdminComment", limit_s=limit_s)
    except SlurmError as exc:
        if "accounting storage is disabled" in str(exc):
            return None
        raise
    return Remark(job=id, text=told.splitlines()[-1].strip()) if told else None


def write_stored_remark(remark: Remark, *, limit_s: float) -> None:
    """Put a comment on a job in the accounting, ended or not. Raises `SlurmError`."""
    chosen, text = f"jobid={remark.job}", f"AdminComment={remark.text}"
    _run("sacctmgr", "-i", "modify", "job", chosen, "set", text, limit_s=limit_s)


def _run(command: str, *arguments: str, limit_s: float) -> str:
    path = os.pathsep.join(filter(None, (os.environ.get("PATH"), _USUAL_PLACES)))
    program = shutil.which(command, path=path)
    if program is None:
        raise SlurmError(f"there is no {command} in PATH")
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as exc:
        raise SlurmError(f"{command} did not answer within {limit_s:g} s") from exc
    except OSError as exc:
        raise SlurmError(f"{program} cannot be run: {exc}") from exc
    if done.returncode:
        *_, last = ("it failed", *filter(None, done.stderr.splitlines()))
        raise SlurmError(f"{command} {' '.join(arguments)}: {last}")
    return done.stdout
