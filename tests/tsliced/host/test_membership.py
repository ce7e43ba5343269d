"""To which job a process belongs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_trees import FakeHost

from tsliced.core.model import JobKey, ProcessId
from tsliced.host.cgroups import Cgroups
from tsliced.host.membership import FoundProcess, Membership, SlurmJob, check_job_id
from tsliced.host.processes import ProcessLimitError, identify

UID = 1000


def pid(number: int) -> ProcessId:
    """Return the identity that `FakeHost.process` gives by default."""
    return ProcessId(number, 100 * number)


def job(name: str, uid: int = UID) -> JobKey:
    return JobKey("lab", uid, name)


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    for controller in ("freezer", "memory", ""):
        host.mount(controller)
    host.process(1, parent=0, uid=0, name="init", env={"PATH": "/bin"})
    return host


def membership_of(host: FakeHost, *, limit: int = 1000) -> Membership:
    return Membership("lab", cgroups=Cgroups(host.proc), limit=limit, root_uid=os.getuid())


def in_slurm(host: FakeHost, number: str = "123", uid: int = UID) -> str:
    """Make a job's cgroup as Slurm does, and return the line of its processes."""
    path = f"/slurm_n1/uid_{uid}/job_{number}"
    host.cgroup(host.root / f"cgroup/freezer{path}/step_0")
    return f"6:freezer:{path}/step_0\n0::/\n"


class TestSlurmCgroups:
    """Paths as the plugins of several versions and builds make them."""

    @pytest.mark.parametrize(
        ("line", "directory", "expected"),
        [
            (
                "6:freezer:/slurm_n1/uid_1000/job_7/step_0",
                "freezer/slurm_n1/uid_1000/job_7",
                SlurmJob("7", "0"),
            ),
            (
                "6:freezer:/slurm/uid_1000/job_7/step_batch/task_0",
                "freezer/slurm/uid_1000/job_7",
                SlurmJob("7", "batch"),
            ),
            (
                "4:memory:/slurm/uid_1000/job_70/step_extern",
                "memory/slurm/uid_1000/job_70",
                SlurmJob("70", "extern"),
            ),
            ("6:freezer:/slurm/uid_1/job_7", "freezer/slurm/uid_1/job_7", SlurmJob("7", None)),
            (
                "0::/system.slice/slurmstepd.scope/job_7/step_3/user/task_0",
                "unified/system.slice/slurmstepd.scope/job_7",
                SlurmJob("7", "3"),
            ),
            (
                "0::/system.slice/n1_slurmstepd.scope/job_7/step_interactive/user/task_special",
                "unified/system.slice/n1_slurmstepd.scope/job_7",
                SlurmJob("7", "interactive"),
            ),
        ],
    )
    def test_the_job_and_step_are_read_from_the_path(
        self, host: FakeHost, line: str, directory: str, expected: SlurmJob
    ) -> None:
        host.cgroup(host.root / "cgroup" / directory)
        host.process(7, cgroups=f"9:pids:/\n{line}\n")
        assert membership_of(host).slurm_job_of(7) == expected

    @pytest.mark.parametrize(
        "line",
        [
            "6:freezer:/",
            "0::/system.slice/slurmd.service",
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice"
            "/system.slice/slurmstepd.scope/job_7/step_0",
            "0::/user.slice/slurmstepd.scope/job_7/step_0",
            "6:freezer:/mine/slurm/uid_1000/job_7/step_0",
            "6:freezer:/slurm/uid_1000/job_7x/step_0",
            "6:freezer:/slurm/uid_1000/job_",
        ],
    )
    def test_other_paths_are_no_slurm_jobs(self, host: FakeHost, line: str) -> None:
        _controllers, path = line.split(":")[1:]
        host.cgroup(host.root / "cgroup" / (line.split(":")[1] or "unified") / path.lstrip("/"))
        host.cgroup(host.root / "cgroup/freezer/slurm/uid_1000/job_7")
        host.process(7, cgroups=line + "\n")
        assert membership_of(host).slurm_job_of(7) is None

    def test_a_path_that_root_did_not_make_proves_nothing(self, host: FakeHost) -> None:
        host.process(7, cgroups=in_slurm(host))
        forged = Membership("lab", cgroups=Cgroups(host.proc), root_uid=os.getuid() + 1)
        assert forged.slurm_job_of(7) is None

    def test_a_path_that_cannot_be_seen_proves_nothing(self, host: FakeHost) -> None:
        host.process(7, cgroups="6:freezer:/slurm/uid_1000/job_7/step_0\n")
        assert membership_of(host).slurm_job_of(7) is None


class TestJobOf:
    """The order in which signs count."""

    def test_a_registration_comes_first(self, host: FakeHost) -> None:
        host.process(7, cgroups=in_slurm(host), env={"TSLICE_JOB_ID": "env"})
        members = membership_of(host)
        members.register(pid(7), job("said"))
        assert members.job_of(pid(7)) == job("said")
        members.forget(pid(7))
        assert members.job_of(pid(7)) == job("123.env")

    def test_a_slurm_cgroup_beats_what_the_environment_claims(self, host: FakeHost) -> None:
        host.process(7, cgroups=in_slurm(host), env={"SLURM_JOB_ID": "999"})
        assert membership_of(host).job_of(pid(7)) == job("123")

    @pytest.mark.parametrize("named", ["b", "999", "123.b"])
    def test_the_environment_refines_a_slurm_job_and_never_widens_it(
        self, host: FakeHost, named: str
    ) -> None:
        host.process(7, cgroups=in_slurm(host), env={"TSLICE_JOB_ID": named})
        expected = named if named.startswith("123.") else f"123.{named}"
        assert membership_of(host).job_of(pid(7)) == job(expected)

    def test_naming_the_slurm_job_itself_refines_nothing(self, host: FakeHost) -> None:
        host.process(7, cgroups=in_slurm(host), env={"TSLICE_JOB_ID": "123"})
        assert membership_of(host).job_of(pid(7)) == job("123")

    def test_a_slurm_job_is_refined_by_an_ancestor_within_it_only(self, host: FakeHost) -> None:
        lines = in_slurm(host)
        host.process(5, env={"TSLICE_JOB_ID": "outside"})
        host.process(6, parent=5, cgroups=lines, env={"TSLICE_JOB_ID": "inside"})
        host.process(7, parent=6, cgroups=lines)
        host.process(8, parent=5, cgroups=lines)
        members = membership_of(host)
        assert members.job_of(pid(7)) == job("123.inside")
        assert members.job_of(pid(8)) == job("123")

    def test_a_slurm_job_is_refined_by_the_registered_driver_of_its_ranks(
        self, host: FakeHost
    ) -> None:
        lines = in_slurm(host)
        host.process(6, cgroups=lines, env={"SLURM_JOB_ID": "123"})
        host.process(7, parent=6, cgroups=lines, env={"SLURM_JOB_ID": "123"})
        members = membership_of(host)
        members.register(pid(6), members.default_job(pid(6), "exp"))
        assert members.job_of(pid(7)) == job("123.exp")

    def test_without_a_cgroup_the_own_environment_names_the_job(self, host: FakeHost) -> None:
        host.process(7, env={"TSLICE_JOB_ID": "a", "SLURM_JOB_ID": "123"})
        host.process(8, env={"SLURM_JOB_ID": "123"})
        members = membership_of(host)
        assert members.job_of(pid(7)) == job("a")
        assert members.job_of(pid(8)) == job("123")

    def test_a_wiped_environment_is_made_up_for_by_the_nearest_ancestor(
        self, host: FakeHost
    ) -> None:
        host.process(4, env={"TSLICE_JOB_ID": "far"})
        host.process(5, parent=4, name="raylet", env={"TSLICE_JOB_ID": "near"})
        host.process(6, parent=5)
        host.process(7, parent=6)
        assert membership_of(host).job_of(pid(7)) == job("near")

    def test_an_ancestor_of_another_uid_does_not_count(self, host: FakeHost) -> None:
        host.process(4, uid=UID, env={"TSLICE_JOB_ID": "mine"})
        host.process(5, parent=4, uid=2000, env={"TSLICE_JOB_ID": "theirs"})
        host.process(6, parent=5, uid=UID)
        members = membership_of(host)
        assert members.job_of(pid(6)) == job("mine")
        host.process(7, parent=4, uid=2000)
        assert members.job_of(pid(7)) is None

    def test_a_registered_ancestor_of_another_uid_does_not_count(self, host: FakeHost) -> None:
        host.process(5, uid=0)
        host.process(6, parent=5)
        members = membership_of(host)
        members.register(pid(5), job("root's", uid=0))
        assert members.job_of(pid(6)) is None

    def test_who_was_registered_for_another_user_does_not_take_its_children_along(
        self, host: FakeHost
    ) -> None:
        host.process(5)
        host.process(6, parent=5)
        members = membership_of(host)
        members.register(pid(5), job("theirs", uid=2000))
        assert members.job_of(pid(5)) == job("theirs", uid=2000)
        assert members.job_of(pid(6)) is None

    def test_descendants_belong_to_the_nearest_registered_ancestor(self, host: FakeHost) -> None:
        for number, parent in ((5, 1), (6, 5), (7, 6), (8, 7)):
            host.process(number, parent=parent)
        members = membership_of(host)
        members.register(pid(5), job("outer"))
        members.register(pid(7), job("inner"))
        assert members.job_of(pid(6)) == job("outer")
        assert members.job_of(pid(8)) == job("inner")

    def test_what_a_driver_said_beats_the_coarser_slurm_variable(self, host: FakeHost) -> None:
        host.process(5, env={"SLURM_JOB_ID": "123"})
        host.process(6, parent=5, env={"SLURM_JOB_ID": "123"})
        members = membership_of(host)
        members.register(pid(5), job("exp"))
        assert members.job_of(pid(6)) == job("exp")

    def test_a_process_without_any_sign_is_a_stranger(self, host: FakeHost) -> None:
        host.process(7, env={"HOME": "/"})
        assert membership_of(host).job_of(pid(7)) is None

    @pytest.mark.parametrize("text", ["", "a b", "a/b", "x" * 129, "ä", "a\nb"])
    def test_an_id_that_cannot_be_is_passed_over(self, host: FakeHost, text: str) -> None:
        host.process(7, env={"TSLICE_JOB_ID": text, "SLURM_JOB_ID": "123; rm"})
        assert membership_of(host).job_of(pid(7)) is None
        with pytest.raises(ValueError, match="cannot be a job's id"):
            check_job_id(text)

    def test_nothing_is_said_of_a_process_whose_pid_was_reused(self, host: FakeHost) -> None:
        host.process(7, env={"TSLICE_JOB_ID": "a"}, start_time=5)
        members = membership_of(host)
        assert members.job_of(ProcessId(7, 4)) is None
        assert members.job_of(ProcessId(8, 4)) is None
        assert members.job_of(ProcessId(7, 5)) == job("a")
        host.process(8, cgroups=in_slurm(host), start_time=5)
        assert members.job_of(ProcessId(8, 4)) is None
        assert members.job_of(ProcessId(8, 5)) == job("123")

    def test_a_registration_is_not_inherited_by_the_next_owner_of_the_pid(
        self, host: FakeHost
    ) -> None:
        host.process(5, start_time=2)
        host.process(6, parent=5)
        members = membership_of(host)
        members.register(ProcessId(5, 1), job("old"))
        assert members.job_of(pid(6)) is None

    def test_the_table_of_registrations_is_bounded(self, host: FakeHost) -> None:
        members = membership_of(host, limit=1)
        members.register(pid(5), job("a"))
        members.register(pid(5), job("b"))
        with pytest.raises(ProcessLimitError, match="1 processes are registered"):
            members.register(pid(6), job("a"))


class TestDefaultJob:
    """The job of a client that says hello."""

    def test_a_requested_job_is_taken(self, host: FakeHost) -> None:
        host.process(7, env={"TSLICE_JOB_ID": "env"})
        assert membership_of(host).default_job(pid(7), "asked") == job("asked")

    def test_a_request_inside_a_slurm_job_is_a_part_of_it(self, host: FakeHost) -> None:
        host.process(7, cgroups=in_slurm(host))
        members = membership_of(host)
        assert members.default_job(pid(7), "asked") == job("123.asked")
        assert members.default_job(pid(7), "123") == job("123")
        assert members.default_job(pid(7)) == job("123")

    def test_without_a_request_it_is_what_is_found(self, host: FakeHost) -> None:
        host.process(7, env={"TSLICE_JOB_ID": "env"})
        assert membership_of(host).default_job(pid(7), ranks=8) == job("env")

    def test_a_process_that_became_another_user_is_not_in_the_job_of_the_former(
        self, host: FakeHost
    ) -> None:
        host.process(7, uid=0)
        members = membership_of(host)
        members.register(pid(7), members.default_job(pid(7), "launcher"))
        host.process(7, uid=1000)
        assert members.default_job(pid(7)) == job("pid-7")

    def test_without_any_sign_a_client_is_a_job_of_its_own(self, host: FakeHost) -> None:
        host.process(6)
        host.process(7, parent=6)
        members = membership_of(host)
        assert members.default_job(pid(7)) == job("pid-7")
        assert members.default_job(pid(7), ranks=1) == job("pid-7")

    def test_ranks_without_any_sign_share_the_job_of_their_agent(self, host: FakeHost) -> None:
        host.process(6)
        host.process(7, parent=6)
        host.process(8, parent=6)
        members = membership_of(host)
        first, second = (members.default_job(pid(number), ranks=2) for number in (7, 8))
        assert first == second == job("group-6")

    def test_orphans_do_not_share_init(self, host: FakeHost) -> None:
        host.process(7, parent=1)
        assert membership_of(host).default_job(pid(7), ranks=2) == job("pid-7")

    def test_a_bad_request_and_a_client_that_is_gone_are_told_apart(self, host: FakeHost) -> None:
        host.process(7)
        members = membership_of(host)
        with pytest.raises(ValueError, match="cannot be a job's id"):
            members.default_job(pid(7), "a b")
        with pytest.raises(ProcessLookupError, match="process 8 is gone"):
            members.default_job(pid(8))
        with pytest.raises(ProcessLookupError, match="process 7 is gone"):
            members.default_job(ProcessId(7, 1))


class TestClassify:
    """A scan of the pids on the devices."""

    def test_the_living_are_listed_with_job_uid_and_name(self, host: FakeHost) -> None:
        host.process(5, env={"TSLICE_JOB_ID": "a"}, name="rank")
        host.process(6, uid=0, name="Xorg")
        host.process(7, state="Z")
        found = membership_of(host).classify([5, 6, 7, 8])
        assert found == [
            FoundProcess(pid(5), job("a"), UID, "rank"),
            FoundProcess(pid(6), None, 0, "Xorg"),
        ]

    def test_what_a_process_was_started_with_tells_how_long_its_watchdog_waits(
        self, host: FakeHost
    ) -> None:
        waits = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "90"}
        host.process(5, env={"TSLICE_JOB_ID": "a", **waits})
        host.process(6, env=waits)
        host.process(7, env={**waits, "TORCH_NCCL_ENABLE_MONITORING": "0"})
        found = membership_of(host).classify([5, 6, 7])
        assert [process.watchdog_s for process in found] == [90.0, 90.0, None]

    def test_a_known_process_is_not_looked_up_again(self, host: FakeHost) -> None:
        host.process(5, env={"TSLICE_JOB_ID": "a"})
        members = membership_of(host)
        first = members.classify([5])
        (host.root / "proc/5/environ").unlink()
        (host.root / "proc/5/status").unlink()
        assert members.classify([5]) == first

    def test_a_stranger_is_looked_up_each_time(self, host: FakeHost) -> None:
        host.process(5)
        members = membership_of(host)
        assert members.classify([5])[0].job is None
        host.process(5, env={"TSLICE_JOB_ID": "a"})
        assert members.classify([5])[0].job == job("a")

    def test_the_next_owner_of_a_pid_is_looked_up(self, host: FakeHost) -> None:
        host.process(5, env={"TSLICE_JOB_ID": "a"}, start_time=1)
        members = membership_of(host)
        members.classify([5])
        host.process(5, env={"TSLICE_JOB_ID": "b"}, start_time=2)
        assert members.classify([5])[0].job == job("b")

    def test_a_new_registration_is_seen_at_once(self, host: FakeHost) -> None:
        host.process(5)
        host.process(6, parent=5)
        members = membership_of(host)
        members.register(pid(5), job("a"))
        assert members.classify([6])[0].job == job("a")
        members.register(pid(6), job("b"))
        assert members.classify([6])[0].job == job("b")

    def test_the_ranks_of_a_driver_that_died_stay_in_its_job(self, host: FakeHost) -> None:
        host.process(5)
        host.process(6, parent=5)
        members = membership_of(host)
        members.register(pid(5), job("a"))
        members.classify([6])
        members.forget(pid(5))
        host.end(5)
        host.process(6, parent=1)
        assert members.classify([6])[0].job == job("a")

    def test_what_is_remembered_is_bounded(self, host: FakeHost) -> None:
        members = membership_of(host, limit=2)
        for number in (5, 6, 7):
            host.process(number, env={"TSLICE_JOB_ID": "a"})
        assert len(members.classify([5, 6, 7])) == 3
        assert len(members._known) == 2


@contextlib.contextmanager
def python(code: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_a_real_actor_that_overwrote_its_environment_is_found_through_its_parent() -> None:
    actor = (
        "import os, setproctitle; setproctitle.setproctitle('ray::Actor' + ' ' * 2000); "
        "print(os.getpid(), flush=True); input()"
    )
    raylet = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {actor!r}])"
    with python(raylet, {"TSLICE_JOB_ID": "exp-1"}) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert b"TSLICE_JOB_ID" not in Path(f"/proc/{child}/environ").read_bytes()
            found = Membership("").classify([child])
            assert [entry.job for entry in found] == [JobKey("", os.getuid(), "exp-1")]
        finally:
            os.kill(child, 9)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_real_process_in_a_cgroup_made_like_slurms_is_in_that_job() -> None:
    root = Cgroups().directory("freezer", "/")
    if root is None or not os.access(root, os.W_OK):
        pytest.skip("no writable version 1 freezer hierarchy here")
    # Named after a node that is not this one, so as not to meet a Slurm that runs here.
    node = Path(root, f"slurm_tsliced-test-{os.getpid()}")
    step = node / "uid_0/job_77/step_0"
    step.mkdir(parents=True)
    try:
        with python("input()", {"TSLICE_JOB_ID": "exp"}) as process:
            (step / "cgroup.procs").write_text(str(process.pid))
            members = Membership("lab")
            assert members.slurm_job_of(process.pid) == SlurmJob("77", "0")
            (found,) = members.classify([process.pid])
            assert found.job == job("77.exp", uid=0)
    finally:
        for directory in (step, step.parent, step.parent.parent, node):
            directory.rmdir()


def test_a_real_rescan_of_known_processes_costs_microseconds() -> None:
    with python("print('ready', flush=True); input()", {"TSLICE_JOB_ID": "exp"}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        members = Membership("")
        assert identify(process.pid) == members.classify([process.pid])[0].process
        best_s = min(_seconds(members, process.pid) for _ in range(20))
    assert best_s < 200e-6, "one small file is read; ten times as much would be a second look-up"


def _seconds(members: Membership, pid: int) -> float:
    started = time.perf_counter()
    members.classify([pid])
    return time.perf_counter() - started
