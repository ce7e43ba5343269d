"""Stands ``cuda-ckpt`` in for NVIDIA's cuda-checkpoint of a driver generation."""

from __future__ import annotations

import sys
from pathlib import Path

from harness import REPOSITORY, Host

#: Driver 550 knows a single call.
_ONLY_TOGGLE = '[ "$1" = --toggle ] || { echo "unrecognized option $1" >&2; exit 1; }\n'


def write_utility(host: Host, softcuda: Path, *, calls: str) -> Path:
    """Writes the utility, with toggles alone or with all ``actions``, and returns its path.

    `softcuda`: the directory of the driver that it finds, whatever the daemon has.
    """
    path = host.directory / f"cuda-checkpoint-{calls}"
    path.write_text(
        "#!/bin/sh\n"
        + (_ONLY_TOGGLE if calls == "toggle" else "")
        + f"export LD_LIBRARY_PATH={softcuda} PYTHONPATH={REPOSITORY}\n"
        + f'exec {sys.executable} -m cuda_ckpt "$@"\n'
    )
    path.chmod(0o755)
    return path
