"""Looks from within a cgroup at what devices it lets its processes open; a program of its own.

    device_probe.py NODE[:NODE...] [CGROUP...]

It moves itself into the given cgroups (directories) and asks access(2), which obeys the device
controller as open(2) does, but does not wake a device. It writes one letter for each node: ``y``,
``n``, or ``?`` where it could not open the node from outside of the cgroup either. If it may not
join a cgroup it writes the error's number alone.

Nothing is imported that a bare interpreter does not have: it is started with ``-I -S``.
"""

from __future__ import annotations

import os
import sys


def main(nodes: list[str], cgroups: list[str]) -> None:
    """Write what this process may open once it is in the cgroups."""
    before = [os.access(node, os.R_OK | os.W_OK) for node in nodes]
    try:
        for directory in cgroups:
            with open(f"{directory}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
    except OSError as exc:
        sys.stdout.write(f"{exc.errno}\n")
        return
    after = [os.access(node, os.R_OK | os.W_OK) for node in nodes]
    letters = ("?" if not b else "ny"[a] for b, a in zip(before, after, strict=True))
    sys.stdout.write("".join(letters) + "\n")


if __name__ == "__main__":
    main(sys.argv[1].split(":"), sys.argv[2:])
