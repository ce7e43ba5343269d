"""Checks of the daemon: its configuration, socket, rights, sandbox, journal and peers."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from libtimeslice import __version__
from libtimeslice.protocol import Message
from tsliced.config import Config
from tsliced.ctl.cluster import problem_of
from tsliced.ctl.output import size
from tsliced.doctor.findings import Finding, fault, good, unknown, warning
from tsliced.host.journal import JournalCode, JournalError, check_unused, read_records
from tsliced.host.procfs import PROC, read_permitted_file, read_status_field

#: Bits of capabilities(7) that a daemon needs to act for others' processes.
_CAPABILITIES: Final[Mapping[str, int]] = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_KILL": 5,
    "CAP_SYS_PTRACE": 19,
}
#: File systems that other machines serve: a lock or an fsync there may hang.
_REMOTE: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs"}
)
#: Below this the journal soon cannot write.
_LEAST_FREE_BYTES: Final = 256 << 20
#: The driver's node that every process with a context opens.
_NODE: Final = "dev/nvidiactl"


def check_config(config: Config) -> list[Finding]:
    """Look at what the files say."""
    if config.warnings:
        return [warning("config", text, "see tsliced --check-config") for text in config.warnings]
    where = ", ".join(config.files) or "no file: all devices are one group"
    return [good("config", where)]


def check_socket(path: str, error: Exception | None, round_trip_s: float | None) -> list[Finding]:
    """Look whether a daemon answers; `error` is what a connection met instead."""
    if error is None and round_trip_s is not None:
        return [good("socket", f"{path} answers within {1000 * round_trip_s:.1f} ms")]
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        text = f"there is no {path}: no daemon runs"
        return [fault("socket", text, "systemctl enable --now tsliced.socket tsliced.service")]
    except OSError as exc:
        text = f"{path} cannot be reached: {exc.strerror}"
        return [fault("socket", text, "make the directory open to those who use it")]
    if not is_socket:
        return [fault("socket", f"{path} is no socket", "remove it and start the daemon")]
    cause = error.__cause__ if error is not None else None
    if isinstance(cause, ConnectionRefusedError):
        text = f"nobody listens at {path}: the daemon ended without taking it away"
        return [fault("socket", text, "systemctl restart tsliced; journalctl -u tsliced says why")]
    if isinstance(cause, PermissionError):
        return [
            fault("socket", f"{path} may not be opened by you", "see the socket's mode and owner")
        ]
    return [fault("socket", f"{path}: {error}", "journalctl -u tsliced says more")]


def check_daemon(status: Message) -> list[Finding]:
    """Look at what runs."""
    text = f"version {status['version']}, pid {status['pid']}, backend {status['backend']}"
    if status["version"] != __version__:
        text = f"version {status['version']} runs, and {__version__} is installed"
        return [warning("daemon", text, "systemctl restart tsliced: jobs do not notice")]
    return [good("daemon", text)]


def check_rights(pid: int, *, proc: str = PROC) -> list[Finding]:
    """Look whether the daemon may see and act on processes of others."""
    words = read_status_field(pid, "CapEff", proc=proc)
    uids = read_status_field(pid, "Uid", proc=proc)
    if not words or not uids:
        return [unknown("rights", f"process {pid} cannot be looked at", "run this as root")]
    held = int(words[0], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if not missing:
        return [good("rights", "it may see, stop and move processes of all users")]
    if uids[1] != "0":
        text = f"it runs as uid {uids[1]}, for processes of that user alone"
        return [good("rights", text)]
    text = f"it lacks {', '.join(missing)}: processes of other users are out of its reach"
    remedy = "see CapabilityBoundingSet= of its unit (systemctl cat tsliced)"
    return [fault("rights", text, remedy)]


def check_sandbox(pid: int, *, root: str = "/", proc: str = PROC) -> list[Finding]:
    """Look whether the unit's sandbox keeps devices or processes from the daemon."""
    mapping = read_permitted_file(f"{proc}/{pid}/uid_map")
    mounts = read_permitted_file(f"{proc}/{pid}/mountinfo")
    if mapping is None or mounts is None:
        return [unknown("sandbox", f"process {pid} cannot be looked at", "run this as root")]
    found = []
    ours = read_permitted_file(f"{proc}/self/uid_map")
    if mapping.split() != (ours or mapping).split():
        text = "it is in a user namespace, where other users do not exist"
        found.append(fault("sandbox", text, "set PrivateUsers=no in its unit"))
    has_node = os.path.exists(os.path.join(root, _NODE))
    if has_node and not os.path.exists(f"{proc}/{pid}/root/{_NODE}"):
        text = f"it has no /{_NODE}, so it sees no device"
        found.append(fault("sandbox", text, "set PrivateDevices=no in its unit"))
    if hidden := _hides_processes(mounts.decode(errors="replace")):
        text = f"its /proc is mounted with {hidden}: it may not see jobs of others"
        found.append(warning("sandbox", text, "set ProtectProc=default in its unit"))
    return found or [good("sandbox", "devices and processes are within its reach")]


def _hides_processes(mountinfo: str) -> str | None:
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        if fields.split()[4:5] == ["/proc"] and tail.startswith("proc "):
            options = tail.split()[-1].split(",")
            found = [
                o
                for o in options
                if o.startswith("hidepid=") and o not in ("hidepid=0", "hidepid=off")
            ]
            if found:
                return found[0]
    return None


def check_journal(directory: Path, *, runs: bool, mountinfo: str | None = None) -> list[Finding]:
    """Look at where leases and parked ranks are remembered; `runs`: a daemon has it open."""
    try:
        usage = os.statvfs(directory)
        os.listdir(directory)
    except FileNotFoundError:
        return [good("journal", f"{directory} is not there yet: no daemon ever ran")]
    except PermissionError:
        return [unknown("journal", f"{directory} is not yours to read", "run this as root")]
    found = []
    free = usage.f_bavail * usage.f_frsize
    if free < _LEAST_FREE_BYTES:
        text = f"{size(free)} are free in {directory}; without room nobody is granted anything"
        found.append(fault("journal", text, "make room, or lower history.max_bytes"))
    kind = _file_system(directory, mountinfo)
    if kind in _REMOTE:
        text = f"{directory} is on {kind}, where a write may hang"
        found.append(warning("journal", text, "set daemon.state_dir to a local disk"))
    if kind in ("tmpfs", "ramfs"):
        text = f"{directory} is on {kind}: what happened before a reboot is forgotten"
        found.append(warning("journal", text, "set daemon.state_dir to a disk"))
    if not runs:
        found += _readable(directory)
    return found or [good("journal", f"{directory}, {size(free)} free")]


def _readable(directory: Path) -> list[Finding]:
    try:
        check_unused(directory)
        records = read_records(directory)
    except JournalError as exc:
        if exc.code is JournalCode.LOCKED:
            return []
        return [fault("journal", str(exc), "tslicectl rescue brings back what is parked")]
    if records:
        text = f"{len(records)} records of a daemon that is gone, of leases and ranks"
        remedy = "start the daemon, which goes on with them; where it cannot: tslicectl rescue"
        return [warning("journal", text, remedy)]
    return []


def _file_system(directory: Path, mountinfo: str | None) -> str:
    """Return the kind of file system that a directory is on."""
    if mountinfo is None:
        mountinfo = (read_permitted_file(f"{PROC}/self/mountinfo") or b"").decode(errors="replace")
    path = os.path.realpath(directory)
    best, kind = "", ""
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        words = fields.split()
        if len(words) > 4 and tail:
            point = words[4].rstrip("/")
            if (path + "/").startswith(point + "/") and len(point) >= len(best):
                best, kind = point, tail.split()[0]
    return kind


def check_peers(peers: Sequence[Message]) -> list[Finding]:
    """Look at the links to other hosts."""
    if not peers:
        return [good("peers", "no links to other hosts are configured")]
    found = [
        (fault if peer["state"] != "connected" else warning)(
            "peers", f"{peer['host']}: {problem}", f"see tslicectl show host {peer['host']}"
        )
        for peer in peers
        if (problem := problem_of(peer)) is not None
    ]
    return found or [good("peers", f"{len(peers)} hosts are connected")]
