"""Fixtures of the tests in a real systemd: bundles, and a box in which they are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from box import NEXT_VERSION, Box, why_not
from harness import build_softcuda


@pytest.fixture(scope="session")
def next_bundle(bundle: Path) -> Path:
    """A bundle of a later version."""
    target = bundle.with_name(f"tsliced-{NEXT_VERSION}")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(bundle, target)
    (old,) = (target / "wheels").glob("tsliced-*.whl")
    before = bundle.name.removeprefix("tsliced-")
    source = target / "source"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", old, source], check=True, timeout=60)
    for path in (source / "libtimeslice/__init__.py", *source.glob("*.dist-info/METADATA")):
        path.write_text(path.read_text().replace(before, NEXT_VERSION, 1))
    (info,) = source.glob("*.dist-info")
    info = info.rename(source / f"tsliced-{NEXT_VERSION}.dist-info")
    # pip does not insist on hashes in a wheel's record.
    names = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    old.unlink()
    wheel = target / "wheels" / f"tsliced-{NEXT_VERSION}-py3-none-any.whl"
    parts = sorted(str(path) for path in source.iterdir())
    command = [sys.executable, "-m", "zipfile", "-c", str(wheel), *parts]
    subprocess.run(command, check=True, timeout=60)
    shutil.rmtree(source)
    return target


@pytest.fixture(scope="session")
def machine(bundle: Path, next_bundle: Path) -> Iterator[Box]:
    """A box with tsliced installed in it."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    build_softcuda()
    box = Box()
    try:
        box.install(bundle.name)
        yield box
    finally:
        box.close()


@pytest.fixture
def box(machine: Box) -> Iterator[Box]:
    """The box, with nothing started and no state."""
    machine.fresh()
    yield machine
    # pytest shows this for a test that failed.
    sys.stdout.write(machine.journal())
    machine.end_ranks()
