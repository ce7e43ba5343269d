"""Making processes known as ranks: who may name whom, and what of a process must be there."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import D1, D2, GROUPS, LIMIT_S, MIB, Inside, inside, job, process_of, until

from libtimeslice.protocol import Attach, Message, Register
from tsliced.config import GroupSettings
from tsliced.core.model import GroupConfig, GroupName, HostName, JobKey, ProcessId
from tsliced.host.backends.base import BackendError
from tsliced.host.devices import DeviceError
from tsliced.host.processes import identify
from tsliced.net.authority import Authority
from tsliced.net.connection import Peer
from tsliced.net.enrolment import Enrolment

ME = identify(os.getpid())


def enrol(
    tmp_path: Path,
    request: Register | Attach,
    *,
    peer: Peer | None = None,
    users: tuple[str, ...] = (),
    groups: tuple[GroupConfig, ...] = GROUPS,
    of: JobKey | None = None,
    prepare: Callable[[Inside], object] = lambda _daemon: None,
    then: Callable[[Inside], Awaitable[object]] | None = None,
) -> Message:
    """Enrol a process for job "a", and return the answer."""

    async def run() -> Message:
        async with asyncio.timeout(LIMIT_S), inside(tmp_path) as daemon:
            settings = [GroupSettings(name=group.name, users=users) for group in groups]
            around = daemon.driver.around
            authority = Authority(groups, settings, "no-such-group")
            enrolment = Enrolment(daemon.driver, authority, around.membership, around.scanner)
            prepare(daemon)
            assert ME is not None
            who = peer or Peer(process=ME, uid=os.getuid())
            answer = await enrolment.enrol(who, of or job("a"), request)
            if then is not None:
                await then(daemon)
            return answer

    return asyncio.run(run())


def error(answer: Message) -> tuple[str, str]:
    found: dict[str, Any] = answer["err"]
    return found["code"], found["message"]


def test_a_process_with_a_context_is_a_rank_where_that_is(tmp_path: Path) -> None:
    with process_of("elsewhere") as rank:

        async def is_known(daemon: Inside) -> None:
            await until(lambda: rank in daemon.machine.tenancies.home, "it is known")
            assert daemon.machine.tenancies.home[rank].job == job("a"), "as who names it says"
            assert rank in daemon.backend.prepared

        answer = enrol(
            tmp_path,
            Attach(id=7, pid=rank.pid, groups=None),
            prepare=lambda daemon: daemon.devices.put(rank, MIB, D2),
            then=is_known,
        )
    assert answer == {
        "re": 7,
        "rank": {"pid": rank.pid, "start_time": rank.start_time},
        "groups": ["g2"],
    }


def test_a_process_without_a_context_may_register_for_what_is_to_come(tmp_path: Path) -> None:
    answer = enrol(tmp_path, Register(id=1, pid=None))
    assert answer["rank"]["pid"] == os.getpid()
    assert answer["groups"] == ["g1", "g2"]


def test_a_process_is_no_rank_of_a_group_that_has_no_devices_on_its_host(tmp_path: Path) -> None:
    far = GroupConfig(name=GroupName("far"), devices=(), order=2, hosts=(HostName("n2"),))
    groups = (*GROUPS, far)
    assert enrol(tmp_path, Register(id=1, pid=None), groups=groups)["groups"] == ["g1", "g2"]
    attach = Attach(id=1, pid=os.getpid(), groups=("g1", "far"))
    code, message = error(enrol(tmp_path / "again", attach, groups=groups))
    assert code == "unknown_group"
    assert message == f"group far has no devices on this host, where process {os.getpid()} is"


def test_a_process_without_a_context_cannot_be_attached(tmp_path: Path) -> None:
    code, message = error(enrol(tmp_path, Attach(id=1, pid=os.getpid(), groups=None)))
    assert code == "not_cuda"
    assert str(os.getpid()) in message


def test_a_process_that_nobody_has_is_named(tmp_path: Path) -> None:
    with process_of("a") as gone:
        pass
    code, message = error(enrol(tmp_path, Register(id=1, pid=gone.pid)))
    assert (code, message) == ("no_such_process", f"there is no process {gone.pid}")


def test_a_thread_is_not_a_process_and_its_process_is_named(tmp_path: Path) -> None:
    end, named = threading.Event(), threading.Event()

    def stay() -> None:
        named.set()
        end.wait(LIMIT_S)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert named.wait(LIMIT_S)
        code, message = error(enrol(tmp_path, Register(id=1, pid=thread.native_id)))
    finally:
        end.set()
        thread.join()
    assert code == "no_such_process"
    assert str(os.getpid()) in message


def test_a_process_of_another_user_cannot_be_named_g10(tmp_path: Path) -> None:
    with process_of("a") as theirs:
        # This user is no admin: the test's own uid would be root's, or the daemon's.
        peer = Peer(process=ProcessId(1, 1), uid=os.getuid() + 12345)
        code, message = error(enrol(tmp_path, Register(id=1, pid=theirs.pid), peer=peer))
    assert code == "not_permitted"
    assert f"belongs to uid {os.getuid()}" in message


def test_groups_that_the_job_may_not_lease_are_unknown_to_it_g10(tmp_path: Path) -> None:
    request = Attach(id=1, pid=os.getpid(), groups=("g1", "g9"))
    code, message = error(enrol(tmp_path, request))
    assert code == "unknown_group"
    assert "'g9'" in message
    assert "g1, g2" in message


def test_a_backend_that_cannot_tell_just_now_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(daemon: Inside) -> None:
        async def fail(_process: ProcessId) -> bool:
            raise BackendError("its driver does not answer")

        monkeypatch.setattr(daemon.backend, "probe", fail)

    code, message = error(
        enrol(tmp_path, Attach(id=1, pid=os.getpid(), groups=None), prepare=prepare)
    )
    assert code == "unavailable"
    assert "its driver does not answer" in message


def test_devices_that_cannot_be_read_make_it_unavailable(tmp_path: Path) -> None:
    def prepare(daemon: Inside) -> None:
        daemon.devices.error = DeviceError(D1, "fell off the bus")

    code, message = error(enrol(tmp_path, Register(id=1, pid=None), prepare=prepare))
    assert code == "unavailable"
    assert "fell off the bus" in message


def test_more_processes_than_are_kept_are_refused_g9(tmp_path: Path) -> None:
    def prepare(daemon: Inside) -> None:
        daemon.driver.around.membership._limit = 0

    code, _ = error(enrol(tmp_path, Register(id=1, pid=None), prepare=prepare))
    assert code == "would_exceed_limit"


def test_a_job_that_may_lease_no_group_is_told_that_there_is_none_g10(tmp_path: Path) -> None:
    theirs = JobKey("", os.getuid() + 12345, "a")
    request = Attach(id=1, pid=os.getpid(), groups=("g1",))
    code, message = error(enrol(tmp_path, request, users=("somebody-else",), of=theirs))
    assert code == "unknown_group"
    assert "there are: none" in message
