"""Where a process is in the cgroup hierarchies, version 1, version 2 and both at once.

A hybrid host (Debian's default for long) has its controllers in version 1 hierarchies and an
empty version 2 hierarchy beside them, so nothing here asks which of the two a host "is": each
controller is looked for in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from tsliced.host.procfs import PROC, read_file

#: Stands for the version 2 hierarchy where a version 1 controller is named.
UNIFIED: Final = ""

#: Of so many processes' cgroups it is remembered what they mean.
_MAX_KNOWN: Final = 1024

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mounted hierarchy."""

    #: The cgroup that is visible at `point`; not ``/`` for a bind mount into a container.
    root: str
    point: str

    def directory(self, path: str) -> str | None:
        """Return where a cgroup is in the file system, or None if this mount doesn't show it."""
        root = "" if self.root == "/" else self.root
        if path != root and not path.startswith(root + "/"):
            return None
        below = path[len(root) :].rstrip("/")
        # Outside of our cgroup namespace the kernel writes "/.." for what it won't show.
        return None if "/.." in below else self.point + below


class Cgroups:
    """Finds cgroup paths and their directories.

    `proc` is where /proc is mounted; a test gives a directory with the same files, whose
    ``self/mountinfo`` then leads to directories of its own.
    """

    def __init__(self, proc: str = PROC) -> None:
        self.proc = proc
        self._mounts: dict[str, Mount] = {}
        #: By what the kernel says of a process: the same again and again.
        self._known: dict[bytes, Mapping[str, str]] = {}
        #: By controller and path; of what is mounted once.
        self._lineages: dict[tuple[str, str], list[str]] = {}

    def paths(self, pid: int) -> Mapping[str, str]:
        """Return a process's cgroup path for each controller; empty if the process is gone.

        Keys are controllers of version 1 (``name=systemd`` among them) and `UNIFIED`.
        """
        return self.paths_in(read_file(f"{self.proc}/{pid}/cgroup") or b"")

    def paths_in(self, data: bytes) -> Mapping[str, str]:
        """Return the same of what ``/proc/PID/cgroup`` holds."""
        paths = self._known.get(data)
        if paths is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            paths = self._known[data] = _paths_in(data)
        return paths

    def directory(self, controller: str, path: str) -> str | None:
        """Return the directory of a cgroup, or None if it is not mounted here."""
        mount = self._mount(controller)
        return mount.directory(path) if mount else None

    def lineage(self, controller: str, path: str) -> Sequence[str]:
        """Return the directories of a cgroup and of its ancestors, nearest first.

        It ends at the mount's root, which may be a container's and not the host's.
        """
        if (known := self._lineages.get((controller, path))) is not None:
            return known
        mount = self._mount(controller)
        directory = mount.directory(path) if mount else None
        if mount is None or directory is None:
            return []
        if len(self._lineages) >= _MAX_KNOWN:
            self._lineages.clear()
        lineage = self._lineages[controller, path] = [directory]
        while len(directory) > len(mount.point):
            directory = directory.rpartition("/")[0]
            lineage.append(directory)
        return lineage

    def _mount(self, controller: str) -> Mount | None:
        if controller not in self._mounts:
            # Slurm mounts what it misses when slurmd starts, which is after us: look again.
            self._mounts = _read_mounts(self.proc)
            self._lineages.clear()
        return self._mounts.get(controller)


def _paths_in(data: bytes) -> dict[str, str]:
    """Parse what the kernel says of a process's cgroups (man 7 cgroups)."""
    paths: dict[str, str] = {}
    for line in data.decode(errors="surrogateescape").splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A removed cgroup with a process still in it is marked so; its directory is gone.
        path = path.removesuffix(" (deleted)")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _read_mounts(proc: str) -> dict[str, Mount]:
    """Parse mountinfo (man 5 proc_pid_mountinfo) for cgroup mounts; whole hierarchies first."""
    data = read_file(f"{proc}/self/mountinfo") or b""
    mounts: dict[str, Mount] = {}
    for line in data.decode(errors="surrogateescape").splitlines():
        place, _, kind = line.partition(" - ")
        fields, types = place.split(" "), kind.split(" ")
        if len(fields) < 6 or len(types) < 3 or types[0] not in ("cgroup", "cgroup2"):
            continue
        mount = Mount(_unescape(fields[3]), _unescape(fields[4]))
        controllers = [UNIFIED] if types[0] == "cgroup2" else types[2].split(",")
        for controller in controllers:
            known = mounts.get(controller)
            if known is None or (known.root != "/" and mount.root == "/"):
                mounts[controller] = mount
    return mounts


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 8)), text)
