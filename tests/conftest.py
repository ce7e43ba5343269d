"""What holds for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


def pytest_configure() -> None:
    """Has Ctrl-C interrupt tests and what they start, as in a terminal.

    A script's shell starts what it runs in the background with SIGINT ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """Lets this process end without asking for a last turn.

    Tests load the stand-in driver into it and leave clients behind whose daemons are gone; it is no
    job whose device state somebody could have parked.
    """
    if (leaving := sys.modules.get("libtimeslice.leaving")) is not None:
        leaving._last_asks.clear()


ROOT = Path(__file__).parents[1]

MakeMunged = Callable[[], str]


@pytest.fixture
def make_munged() -> Iterator[MakeMunged]:
    """Starts munged with a key of its own, and returns the path of its socket."""
    program = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("munged is not installed; on Debian: apt-get install munge")
    with ExitStack() as stack:

        def make() -> str:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="munged-")))
            # Whoever is to reach the socket must be let through.
            place.chmod(0o755)
            key = place / "key"
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(64))
            names = {"socket": "s", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            files = [f"--{option}={place / name}" for option, name in names.items()]
            process = subprocess.Popen(
                [program, "--foreground", "--force", f"--key-file={key}", *files],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait, 10)
            stack.callback(process.terminate)
            end = time.monotonic() + 20
            while not (place / "s").exists():
                assert process.poll() is None, (place / "log").read_text()
                assert time.monotonic() < end, "munged makes its socket"
                time.sleep(0.01)
            return str(place / "s")

        yield make


@pytest.fixture(scope="session")
def bundle() -> Path:
    """The directory that `make package` makes an archive of."""
    # What an outer make handed down is for its own children.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    made = subprocess.run(
        ["make", "--silent", "package"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    archive = max((ROOT / "build/package").glob("*.tar.gz"), key=os.path.getmtime)
    return archive.with_name(archive.name.removesuffix(".tar.gz"))
