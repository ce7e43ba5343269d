"""What devices a process may open, by its cgroups.

Neither version of cgroups tells: the ``devices.list`` of version 1 does not show what was taken
from a cgroup that may open everything else, which is how Slurm confines jobs, and version 2 has
programs in place of lists. So a helper (`device_probe`) joins the cgroups of the process and looks.
What it saw holds for all processes there, for a while.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import time
from collections.abc import Mapping
from errno import EACCES, EOPNOTSUPP, EPERM, EROFS
from pathlib import Path
from typing import Final

from tsliced.core.model import DeviceId, ProcessId
from tsliced.host.cgroups import UNIFIED, Cgroups
from tsliced.host.processes import is_alive

_PROBE: Final = str(Path(__file__).with_name("device_probe.py"))
#: The daemon may not join other cgroups at all, so another try will not do better.
_NOT_ALLOWED: Final = frozenset({EACCES, EPERM, EROFS, EOPNOTSUPP})
#: Helpers that run at the same time.
_MAX_PROBES: Final = 4
_MAX_REMEMBERED: Final = 4096
_NONE: Final[frozenset[DeviceId]] = frozenset()

#: The directories of a process's cgroups, with their inodes: names are used again.
_Key = tuple[tuple[str, int], ...]


class AccessUnknownError(Exception):
    """What a process may open could not be found out; the text says why."""


class DeviceAccess:
    """Finds out which devices the cgroups of a process keep from it.

    `nodes` are the device files. Where this daemon may not look (it is not root, or sandboxed),
    nothing counts as kept from anybody, or everything if it is `required`; `problem` says why.
    All methods belong to the event loop.
    """

    def __init__(
        self,
        nodes: Mapping[DeviceId, str],
        *,
        required: bool = False,
        cgroups: Cgroups | None = None,
        limit_s: float = 5.0,
        max_age_s: float = 30.0,
    ) -> None:
        self._nodes = {device: node for device, node in nodes.items() if _is_device(node)}
        self._required = required
        self._cgroups = cgroups or Cgroups()
        self._limit_s = limit_s
        self._max_age_s = max_age_s
        self._known: dict[_Key, tuple[float, frozenset[DeviceId]]] = {}
        self._asking: dict[_Key, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_MAX_PROBES)
        #: Why nothing can be found out on this host; None while it can.
        self.problem: str | None = None

    def denied(self, process: ProcessId) -> frozenset[DeviceId] | None:
        """Return the devices that are kept from a process; None: it must be asked for by `learn`.

        Raises `AccessUnknownError`.
        """
        key = self._key(process)
        return _NONE if not key else self._remembered(key)

    async def learn(self, process: ProcessId) -> None:
        """Find out what `denied` is to return. Raises `AccessUnknownError`."""
        key = self._key(process)
        if not key or self._remembered(key) is not None:
            return
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._probe(key), name="device access")
            task.add_done_callback(lambda _: self._asking.pop(key))
        # Others may wait for the same answer: who stops waiting does not take it from them.
        await asyncio.shield(task)

    def _remembered(self, key: _Key) -> frozenset[DeviceId] | None:
        at, found = self._known.get(key, (0.0, None))
        return found if time.monotonic() - at < self._max_age_s else None

    def _key(self, process: ProcessId) -> _Key:
        """Return the cgroups that may confine a process, none if it is in none but the roots."""
        if not self._nodes:
            return ()
        paths = self._cgroups.paths(process.pid)
        places: list[tuple[str, int]] = []
        for controller in ("devices", UNIFIED):
            path = paths.get(controller, "/")
            if path == "/":
                continue
            directory = self._cgroups.directory(controller, path)
            if directory is None:
                self._give_up(f"cgroup {path} is not visible to the daemon")
                return ()
            try:
                places.append((directory, os.stat(directory).st_ino))
            except FileNotFoundError as exc:
                raise AccessUnknownError(f"cgroup {path} is gone") from exc
        # What was read must have been of this process.
        if not is_alive(process, proc=self._cgroups.proc):
            raise AccessUnknownError(f"process {process.pid} is gone")
        return tuple(places)

    def _give_up(self, text: str) -> None:
        self.problem = f"what devices jobs may open cannot be found out: {text}"
        if self._required:
            raise AccessUnknownError(self.problem)

    async def _probe(self, key: _Key) -> None:
        async with self._slots:
            answer = await self._ask([directory for directory, _ in key])
        found = self._understood(answer)
        if len(self._known) >= _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known.pop(key, None)
        self._known[key] = (time.monotonic(), found)

    def _understood(self, answer: str) -> frozenset[DeviceId]:
        if answer.isdigit():
            number = int(answer)
            if number not in _NOT_ALLOWED:
                raise AccessUnknownError(f"its cgroup cannot be joined: {os.strerror(number)}")
            self._give_up(f"the daemon may not join their cgroups: {os.strerror(number)}")
            return _NONE
        kept_from = "n?" if self._required else "n"
        pairs = zip(self._nodes, answer, strict=True)
        return frozenset(device for device, letter in pairs if letter in kept_from)

    async def _ask(self, directories: list[str]) -> str:
        helper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _PROBE, ":".join(self._nodes.values()), *directories),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            out, _ = await asyncio.wait_for(helper.communicate(), self._limit_s)
        except TimeoutError as exc:
            # A cgroup may be frozen, and whoever joins it with it.
            text = f"nothing runs in its cgroup within {self._limit_s:g} s"
            raise AccessUnknownError(text) from exc
        finally:
            if helper.returncode is None:
                helper.kill()
        answer = out.decode("ascii").strip()
        if not answer:
            raise AccessUnknownError(f"nothing lives in its cgroup: status {helper.returncode}")
        return answer


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
