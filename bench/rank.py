"""A process that can be registered as a rank: it does nothing, if asked to with a device context.

python -m bench.rank [LIBCUDA ORDINAL]
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

from bench.server import ROOT

STOP_LIMIT_S = 10.0

Self = TypeVar("Self", bound="RankProcess")


class RankProcess:
    """A rank from outside: a Python that says by a line when it is ready, and takes lines then.

    It also ends when this process does, since it reads until there is nothing more to read.
    """

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, first: str = ""
    ) -> None:
        """Waits until it is ready. `first`: what it is told before."""
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if first:
            self._tell(first)
        self._line()

    @property
    def pid(self) -> int:
        """The rank's process."""
        return self._process.pid

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a rank ended with status {self._process.wait(STOP_LIMIT_S)}")
        return line

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A rank whose state is parked never comes back from a driver call.
        self._process.kill()
        self._process.communicate()


class Rank(RankProcess):
    """The process of this module."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("-m", "bench.rank", *arguments, environment=environment)


def make_context(library: str, ordinal: int) -> None:
    """Makes a context on a device, which lasts as long as this process."""
    driver = ctypes.CDLL(library)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for code in (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), ordinal),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    ):
        if code:
            raise RuntimeError(f"the driver answers with error {code}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make_context(sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.read()
