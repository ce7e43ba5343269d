"""A driver of a Ray experiment, under test: it has no device state, its actors have.

It takes commands as ``rank.py`` does, those of Ray besides. The driver asks for leases; its actors,
which are children of Ray's raylet and not of the driver, never call anything of ours.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from typing import Any

import rank
import ray

LIMIT_S = 60


class Trainer:
    """Holds device state."""

    def hide_environment(self) -> int:
        """Overwrites what the kernel shows of this process's environment; returns its pid.

        setproctitle does so with its titles, but where Ray tells it not to (SPT_NOENV), as its
        newer versions do.
        """
        for name, value in os.environ.copy().items():
            os.environ[name] = value  # a copy elsewhere, for those who ask the C library
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        # env_start and env_end are fields 50 and 51 (man 5 proc); the first one here is field 3.
        start, end = int(fields[47]), int(fields[48])
        ctypes.memset(start, ord("x"), end - start)
        return os.getpid()

    def load(self, mib: int, seed: int) -> str:
        rank.context()
        rank.fill(mib, seed)
        return self.digest()

    def digest(self) -> str:
        digest: str = rank.digest()
        return digest


actors: list[Any] = []


@rank.command
def start(count: int) -> list[int]:
    """Starts a cluster of its own, and actors in it; returns their pids."""
    ray.init(
        num_cpus=1,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=80 * 1000 * 1000,
        # The kernel limits paths of sockets, and Ray's are long.
        _temp_dir=tempfile.mkdtemp(prefix="r", dir=os.environ["RAY_ROOT"]),
        log_to_driver=False,
    )
    remote = ray.remote(num_cpus=0, num_gpus=1 / count)(Trainer)
    actors.extend(remote.remote() for _ in range(count))
    return [ray.get(actor.hide_environment.remote(), timeout=LIMIT_S) for actor in actors]


@rank.command
def load(mib: int, seed: int) -> list[str]:
    """Makes device state in all actors; returns the digests."""
    loading = [actor.load.remote(mib, seed + number) for number, actor in enumerate(actors)]
    digests: list[str] = ray.get(loading, timeout=LIMIT_S)
    return digests


@rank.command
def digests() -> list[str]:
    """Returns the digests of what the actors have on their devices."""
    found: list[str] = ray.get([actor.digest.remote() for actor in actors], timeout=LIMIT_S)
    return found


if __name__ == "__main__":
    rank.main()
