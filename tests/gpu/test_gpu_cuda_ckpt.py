"""The scenarios of ``tests/cuda_ckpt`` on a real driver, each in a process group with a time limit.

They need a device that nobody else uses, a driver of 570 or later and the right to attach to
processes. A scenario that hangs is killed with its target, so that the next one starts clean.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCENARIOS = Path(__file__).resolve().parent.parent / "cuda_ckpt" / "cuda_scenarios.py"
LIMIT_S = 90.0


def _load(name: str) -> ModuleType:
    """Imports a module of tests/cuda_ckpt, which is no package."""
    if str(SCENARIOS.parent) not in sys.path:
        sys.path.append(str(SCENARIOS.parent))
    return importlib.import_module(name)


CONTRACT = list(_load("cuda_scenarios").CONTRACT)


@pytest.mark.gpu
@pytest.mark.parametrize("hardware", ["nvidia"], indirect=True)
@pytest.mark.parametrize("name", CONTRACT)
def test_on_the_real_driver(name: str, hardware: str) -> None:
    lab = _load("cuda_lab")
    environment = {key: val for key, val in os.environ.items() if not key.startswith("SOFTCUDA_")}
    skipped: int = _load("cuda_scenarios").SKIPPED
    ended = lab.run_limited([sys.executable, str(SCENARIOS), name], environment, LIMIT_S)
    if ended.returncode == skipped:
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stdout + ended.stderr
