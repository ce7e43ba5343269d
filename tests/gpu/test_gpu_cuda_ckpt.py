"""The scenarios of ``tests/cuda_ckpt`` on a real driver, each in a process group with a time limit.

They need a device that nobody else uses, a driver of 570 or later and the right to attach to
processes. A scenario that hangs is killed with its target, so that the next one starts clean.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCENARIOS = Path(__file__).resolve().parent.parent / "cuda_ckpt" / "cuda_scenarios.py"
LIMIT_S = 90.0
PROBE = """
from cuda_ckpt import Driver
driver = Driver()
print(driver.device_count(), driver.version)
"""


def _load(name: str) -> ModuleType:
    """Imports a module of tests/cuda_ckpt, which is no package."""
    if str(SCENARIOS.parent) not in sys.path:
        sys.path.append(str(SCENARIOS.parent))
    return importlib.import_module(name)


CONTRACT = list(_load("cuda_scenarios").CONTRACT)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment as it is, if there is a device behind it; a skip with the reason if not."""
    if importlib.util.find_spec("cuda_ckpt") is None:
        pytest.skip("needs cuda_ckpt")
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SOFTCUDA_")}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], env=plain, capture_output=True, text=True, timeout=LIMIT_S
    )
    if probe.returncode != 0:
        pytest.skip(f"needs a CUDA device: {probe.stderr.strip().splitlines()[-1]}")
    return plain


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONTRACT)
def test_on_the_real_driver(name: str, environment: dict[str, str]) -> None:
    lab = _load("cuda_lab")
    skipped: int = _load("cuda_scenarios").SKIPPED
    ended = lab.run_limited([sys.executable, str(SCENARIOS), name], environment, LIMIT_S)
    if ended.returncode == skipped:
        pytest.skip(ended.stdout.strip())
    assert ended.returncode == 0, ended.stdout + ended.stderr
