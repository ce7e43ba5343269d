"""A snapshot backend that claims success and moves nothing. The tests must not believe it."""

from __future__ import annotations

import tsliced.host.scan
from bench.instant import InstantBackend
from tsliced.core.model import ProcessId

# How long the daemon lets a device take to show that its memory is free.
tsliced.host.scan.GONE_LIMIT_S = 0.3  # type: ignore[misc]  # this daemon is the test's own


class NoopBackend(InstantBackend):
    """Says that everything is done, and that NVML would show it."""

    seen_by_nvml = True


class BlindNoopBackend(NoopBackend):
    """The same, and says that NVML would not show it."""

    seen_by_nvml = False


class BrokenBackend(NoopBackend):
    """Breaks a promise that the daemon relies on."""

    def prepare(self, process: ProcessId) -> None:
        raise RuntimeError(f"not for process {process.pid}")
