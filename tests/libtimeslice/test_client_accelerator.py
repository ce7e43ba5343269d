"""Device work before a release, seen through a stand-in for torch."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon

from libtimeslice import accelerator, connect


class FakeCuda:
    """torch.cuda of a process with contexts on some of its devices."""

    def __init__(self, *, initialized: bool = True) -> None:
        self.initialized = initialized
        self.calls: list[str] = []
        self.reserved = {0: 100, 1: 0, 2: 50}
        self.fails = False

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return 3

    def current_device(self) -> int:
        return 0

    def synchronize(self, index: int) -> None:
        self.calls.append(f"synchronize {index}")
        if self.fails:
            raise RuntimeError("device-side assert")

    def memory_reserved(self, index: int) -> int:
        return self.reserved[index]

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.reserved = dict.fromkeys(self.reserved, 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    torch = types.ModuleType("torch")
    torch.__dict__["cuda"] = fake
    torch.__dict__["_C"] = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda i: i != 1)
    monkeypatch.setitem(sys.modules, "torch", torch)
    yield fake
    fake.initialized = False  # this process has nothing to tear down at its exit


def test_a_release_finishes_device_work_and_keeps_the_cache_if_nobody_waits(
    daemon: FakeDaemon, cuda: FakeCuda
) -> None:
    with connect(daemon.path) as ts:
        with ts.lease("n1"), ts.lease("n1"):
            assert cuda.calls == []
        assert cuda.calls == ["synchronize 0", "synchronize 2"]


def test_a_release_empties_the_cache_if_somebody_waits(daemon: FakeDaemon, cuda: FakeCuda) -> None:
    with connect(daemon.path) as ts:
        with ts.lease("n1"):
            daemon.queue_up(("n1",))
        assert cuda.calls == ["synchronize 0", "synchronize 2", "empty_cache"]


def test_a_fault_on_the_device_is_raised_and_the_lease_released_all_the_same(
    daemon: FakeDaemon, cuda: FakeCuda
) -> None:
    cuda.fails = True
    with connect(daemon.path) as ts:
        with pytest.raises(RuntimeError, match="device-side assert"), ts.lease("n1"):
            pass
        assert daemon.held == {}
        assert not ts.holding


def test_a_client_may_leave_devices_alone(daemon: FakeDaemon, cuda: FakeCuda) -> None:
    with connect(daemon.path, synchronize=False) as ts:
        with ts.lease("n1"):
            pass
        assert cuda.calls == []


def test_closing_finishes_device_work_before_the_bye(daemon: FakeDaemon, cuda: FakeCuda) -> None:
    ts = connect(daemon.path)
    ts.acquire("n1")
    ts.close()
    assert cuda.calls == ["synchronize 0", "synchronize 2"]


def test_emptying_the_cache_tells_the_bytes(cuda: FakeCuda) -> None:
    assert accelerator.empty_cache() == 150


def test_torch_without_a_context_is_left_alone(cuda: FakeCuda) -> None:
    cuda.initialized = False
    assert not accelerator.synchronize()
    assert accelerator.empty_cache() == 0
    assert not accelerator.in_use()
    assert cuda.calls == []


def test_a_torch_that_cannot_tell_contexts_has_its_current_device_synchronized(
    cuda: FakeCuda,
) -> None:
    del sys.modules["torch"]._C._cuda_hasPrimaryContext
    accelerator.synchronize()
    assert cuda.calls == ["synchronize 0"]


def test_a_process_without_torch_and_driver_uses_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not accelerator.synchronize()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    assert accelerator.in_use() == ("/libcuda.so" in maps)
