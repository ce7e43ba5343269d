"""What a process knows of PyTorch's watchdogs in it, and tells the daemon."""

from __future__ import annotations

import asyncio
import sys
import types
from datetime import timedelta

import pytest
from fake_daemon import FakeDaemon

from libtimeslice import connect, watchdogs
from libtimeslice.aio import connect as aio_connect

HEARTBEAT, MONITORING = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING"


class Group:
    """A process group over NCCL, or another one."""

    def __init__(self, timeout_s: float, name: str = "nccl") -> None:
        options = types.SimpleNamespace(_timeout=timedelta(seconds=timeout_s))
        self.backend = types.SimpleNamespace(name=lambda: name, options=options)

    def _get_backend(self, _device: str) -> object:
        return self.backend


class OnHost(Group):
    """One that knows no devices."""

    def _get_backend(self, _device: str) -> object:
        raise RuntimeError("no backend for device type cuda")


class Distributed(types.ModuleType):
    """torch.distributed of a process."""

    def __init__(self, *groups: Group, initialized: bool = True) -> None:
        super().__init__("torch.distributed")
        self.initialized = initialized
        world = types.SimpleNamespace(pg_map=dict.fromkeys(groups))
        self.distributed_c10d = types.SimpleNamespace(_world=world)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized


def use(monkeypatch: pytest.MonkeyPatch, distributed: Distributed) -> None:
    torch = types.ModuleType("torch")
    torch.__dict__.update(
        device=str,
        distributed=distributed,
        cuda=types.SimpleNamespace(is_initialized=lambda: False),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)


@pytest.mark.parametrize(
    ("environ", "limit_s"),
    [
        ({}, None),
        ({HEARTBEAT: "90"}, 90.0),
        ({HEARTBEAT: "90", MONITORING: "1"}, 90.0),
        ({HEARTBEAT: "90", MONITORING: "0"}, None),
        ({HEARTBEAT: "90", MONITORING: "False"}, None),
        ({HEARTBEAT: "soon"}, None),
        ({HEARTBEAT: "0"}, None),
        ({HEARTBEAT: "inf"}, None),
        ({HEARTBEAT: "nan"}, None),
    ],
)
def test_without_nccl_only_what_was_set_is_known(
    environ: dict[str, str], limit_s: float | None
) -> None:
    assert watchdogs.limit_s(environ) == limit_s


@pytest.mark.parametrize(
    ("groups", "environ", "limit_s"),
    [
        ([Group(600)], {}, 480.0),
        ([Group(600)], {HEARTBEAT: "1800"}, 600.0),
        ([Group(600), Group(45)], {}, 45.0),
        ([Group(600)], {MONITORING: "0"}, 600.0),
        ([Group(600), OnHost(1), Group(1, name="gloo")], {}, 480.0),
        ([OnHost(1)], {}, None),
        ([Group(1e10)], {MONITORING: "0"}, None),
    ],
)
def test_with_nccl_the_shortest_of_monitor_and_process_groups_counts(
    monkeypatch: pytest.MonkeyPatch,
    groups: list[Group],
    environ: dict[str, str],
    limit_s: float | None,
) -> None:
    use(monkeypatch, Distributed(*groups))
    assert watchdogs.limit_s(environ) == limit_s


def test_groups_that_are_not_there_yet_or_that_torch_does_not_show_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distributed = Distributed(Group(600), initialized=False)
    use(monkeypatch, distributed)
    assert watchdogs.limit_s({}) is None
    distributed.initialized = True
    assert watchdogs.limit_s({}) == 480.0
    del distributed.distributed_c10d
    assert watchdogs.limit_s({}) is None


def test_the_daemon_is_told_at_the_beginning_and_when_it_changes(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT, "90")
    with connect(daemon.path, job="j") as ts:
        with ts.lease("n1"):
            assert daemon.last("hello")["watchdog_s"] == 90.0
        use(monkeypatch, Distributed(Group(60)))
        for _ in range(2):
            with ts.lease("n1"):
                pass
        assert daemon.last("watchdog") == {"t": "watchdog", "limit_s": 60.0}
        assert daemon.count("watchdog") == 1


def test_an_agent_tells_while_the_caller_computes(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(daemon.path, job="j") as ts:
        ts.register()
        daemon.wait_until(daemon.agent_caps)
        assert daemon.last("hello")["watchdog_s"] is None
        use(monkeypatch, Distributed(Group(600)))
        daemon.wait_until(lambda: daemon.count("watchdog") >= 1)
        assert daemon.last("watchdog")["limit_s"] == 480.0


def test_the_asyncio_client_tells_too(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with aio_connect(daemon.path, job="j") as ts:
            async with ts.lease("n1"):
                pass
            use(monkeypatch, Distributed(Group(60)))
            async with ts.lease("n1"):
                pass

    asyncio.run(main())
    assert daemon.last("watchdog")["limit_s"] == 60.0


def test_what_the_daemon_warns_of_is_logged(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(daemon.path, job="j") as ts, ts.lease("n1") as lease:
        for session in daemon.sessions.values():
            session.send({"t": "warning", "code": "watchdog", "message": "it may end itself"})
        assert not lease.contended
    assert "it may end itself" in caplog.text
