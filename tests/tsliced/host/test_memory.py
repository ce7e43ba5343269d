"""Admission to host DRAM and device memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from host_trees import UNLIMITED, FakeHost

from tsliced.core.model import DeviceId, ProcessId
from tsliced.host.cgroups import Cgroups
from tsliced.host.devices import DeviceReading
from tsliced.host.memory import (
    HOST,
    Demand,
    DeviceLedger,
    DramLedger,
    Granted,
    HostMemory,
    Shortage,
    SnapshotMargin,
)

MIB = 1 << 20
A, B = ProcessId(11, 1100), ProcessId(12, 1200)
GPU0, GPU1 = DeviceId("GPU-0"), DeviceId("GPU-1")


def memory_of(host: FakeHost) -> HostMemory:
    return HostMemory(Cgroups(host.proc))


def test_the_default_need_is_the_device_memory_and_five_percent_and_512_mib() -> None:
    assert SnapshotMargin().need_bytes(1000 * MIB) == 1050 * MIB + 512 * MIB
    assert SnapshotMargin(ratio=0.5, bytes=1).need_bytes(10) == 16
    assert SnapshotMargin(ratio=0.0, bytes=0).need_bytes(7) == 7


def test_the_host_has_what_the_kernel_says_is_available_without_swap() -> None:
    seen = HostMemory().host_available_bytes()
    assert seen == pytest.approx(psutil.virtual_memory().available, abs=256 * MIB)


def test_version_1_counts_every_ancestor_and_credits_inactive_file_cache(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.set_available(1000 * MIB)
    point = host.mount("memory")
    host.process(11, cgroups="4:memory:/slurm/job/step\n")
    unlimited = {"memory_limit_in_bytes": UNLIMITED, "memory_usage_in_bytes": 900 * MIB}
    host.cgroup(point, **unlimited, memory_stat="total_inactive_file 0")
    host.cgroup(
        point / "slurm/job",
        memory_limit_in_bytes=500 * MIB,
        memory_usage_in_bytes=400 * MIB,
        memory_stat=f"inactive_file 1\ntotal_inactive_file {30 * MIB}\ntotal_active_file 99",
    )
    host.cgroup(point / "slurm/job/step", **unlimited)
    headroom = memory_of(host).headroom(11)
    assert headroom.available_bytes == 130 * MIB
    assert headroom.limited_by == str(point / "slurm/job")


def test_version_2_counts_the_lower_of_max_and_high_on_every_level(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.set_available(1000 * MIB)
    point = host.mount("")
    host.process(11, cgroups="0::/a/b\n")
    host.cgroup(
        point / "a",
        memory_max=900 * MIB,
        memory_high=800 * MIB,
        memory_current=300 * MIB,
        memory_stat=f"anon 5\ninactive_file {50 * MIB}",
    )
    host.cgroup(point / "a/b", memory_max="max", memory_high="max", memory_current=300 * MIB)
    assert memory_of(host).available(11) == {HOST: 1000 * MIB, f"{point}/a": 550 * MIB}
    host.cgroup(point / "a/b", memory_max=310 * MIB, memory_stat="inactive_file 0")
    headroom = memory_of(host).headroom(11)
    assert (headroom.available_bytes, headroom.limited_by) == (10 * MIB, f"{point}/a/b")


def test_a_hybrid_host_has_its_limits_in_version_1_beside_an_empty_version_2(
    tmp_path: Path,
) -> None:
    host = FakeHost(tmp_path)
    host.set_available(1000 * MIB)
    point = host.mount("memory")
    host.cgroup(host.mount("") / "init.scope", cgroup_freeze=0)
    host.process(11, cgroups="4:memory:/job\n0::/init.scope\n")
    host.cgroup(
        point / "job",
        memory_limit_in_bytes=100 * MIB,
        memory_usage_in_bytes=40 * MIB,
        memory_stat="total_inactive_file 0",
    )
    assert memory_of(host).available(11) == {HOST: 1000 * MIB, f"{point}/job": 60 * MIB}


def test_a_cgroup_beyond_its_limit_leaves_nothing_and_never_less(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    point = host.mount("")
    host.process(11, cgroups="0::/a\n")
    host.cgroup(point / "a", memory_max=10, memory_current=99, memory_stat="inactive_file 5")
    assert memory_of(host).headroom(11).available_bytes == 0


def test_cache_is_credited_only_as_far_as_it_is_in_use(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.set_available(1 << 30)
    point = host.mount("")
    host.process(11, cgroups="0::/a\n")
    host.cgroup(point / "a", memory_max=100, memory_current=10, memory_stat="inactive_file 500")
    assert memory_of(host).headroom(11).available_bytes == 100


def test_a_process_that_is_gone_is_limited_by_the_host_alone(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.mount("memory")
    assert memory_of(host).headroom(11).limited_by == HOST


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_the_memory_that_a_real_process_takes_shows_in_its_real_cgroup() -> None:
    root = Cgroups().directory("memory", "/")
    if root is None or not os.access(root, os.W_OK):
        pytest.skip("no writable version 1 memory cgroup hierarchy here")
    outer = Path(root, f"tsliced-test-{os.getpid()}")
    inner = outer / "inner"
    inner.mkdir(parents=True)
    code = (
        "import sys; sys.stdin.readline(); data = bytearray(b'x') * (40 << 20); "
        "print('ready', flush=True); sys.stdin.readline()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        (outer / "memory.limit_in_bytes").write_text(str(96 * MIB))
        (inner / "cgroup.procs").write_text(str(child.pid))
        before = HostMemory().headroom(child.pid)
        assert before.limited_by == str(outer)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "ready\n"
        after = HostMemory().headroom(child.pid)
        taken = before.available_bytes - after.available_bytes
        assert taken == pytest.approx(40 * MIB, abs=8 * MIB)
    finally:
        child.kill()
        child.communicate(timeout=20)
        inner.rmdir()
        outer.rmdir()


class TestDramLedger:
    """Two processes in one job's cgroup, one of them in a tighter cgroup of its own."""

    @pytest.fixture
    def host(self, tmp_path: Path) -> FakeHost:
        host = FakeHost(tmp_path)
        host.set_available(1000 * MIB)
        self.point = host.mount("")
        host.process(A.pid, cgroups="0::/job/a\n")
        host.process(B.pid, cgroups="0::/job/b\n")
        host.process(13, cgroups="0::/other\n")
        host.cgroup(self.point / "job", memory_max=600 * MIB, memory_current=100 * MIB)
        host.cgroup(self.point / "job/a", memory_max=300 * MIB, memory_current=0)
        return host

    def test_what_one_group_was_promised_is_not_promised_to_another(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        assert ledger.reserve("first", [Demand(A, 300 * MIB)]) == Granted(bytes=300 * MIB)
        assert ledger.reserve("second", [Demand(B, 201 * MIB)]) == Shortage(
            need_bytes=201 * MIB, have_bytes=200 * MIB, where=f"{self.point}/job"
        )
        assert ledger.reserve("second", [Demand(B, 200 * MIB)]) == Granted(bytes=200 * MIB)

    def test_the_tightest_place_is_named(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        shortage = ledger.reserve("first", [Demand(A, 301 * MIB)])
        assert str(shortage) == (
            "315,621,376 bytes (301 MiB) needed, 314,572,800 bytes (300 MiB) available in "
            f"{self.point}/job/a"
        )

    def test_demands_of_one_request_share_their_ancestors(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        shortage = ledger.reserve("k", [Demand(A, 300 * MIB), Demand(B, 300 * MIB)])
        assert isinstance(shortage, Shortage)
        assert (shortage.need_bytes, shortage.where) == (600 * MIB, f"{self.point}/job")
        assert ledger.promised() == {}

    def test_two_demands_of_one_process_add_up(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        assert isinstance(
            ledger.reserve("k", [Demand(A, 200 * MIB), Demand(A, 101 * MIB)]), Shortage
        )

    def test_asking_again_replaces_the_reservation(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        assert ledger.reserve("k", [Demand(B, 400 * MIB)]) == Granted(bytes=400 * MIB)
        assert ledger.reserve("k", [Demand(B, 500 * MIB)]) == Granted(bytes=500 * MIB)
        assert ledger.promised() == {HOST: 500 * MIB, f"{self.point}/job": 500 * MIB}

    def test_a_refusal_leaves_the_earlier_reservation(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        ledger.reserve("k", [Demand(B, 400 * MIB)])
        assert isinstance(ledger.reserve("k", [Demand(B, 501 * MIB)]), Shortage)
        assert ledger.promised()[HOST] == 400 * MIB

    def test_settled_bytes_are_counted_by_the_kernel_and_not_twice(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        ledger.reserve("k", [Demand(B, 300 * MIB)])
        host.cgroup(self.point / "job", memory_current=400 * MIB)
        assert isinstance(ledger.reserve("other", [Demand(A, 200 * MIB)]), Shortage)
        ledger.settle("k")
        assert ledger.reserve("other", [Demand(A, 200 * MIB)]) == Granted(bytes=200 * MIB)
        host.cgroup(self.point / "job", memory_current=100 * MIB)
        ledger.unsettle("k")
        assert isinstance(ledger.reserve("third", [Demand(B, 1 * MIB)]), Shortage)

    def test_one_rank_may_be_settled_before_the_others(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        ledger.reserve("k", [Demand(A, 100 * MIB), Demand(B, 200 * MIB)])
        ledger.settle("k", A)
        assert ledger.promised() == {HOST: 200 * MIB, f"{self.point}/job": 200 * MIB}

    def test_released_bytes_are_free_and_releasing_again_is_harmless(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        ledger.reserve("k", [Demand(B, 500 * MIB)])
        ledger.release("k")
        ledger.release("k")
        ledger.settle("k")
        assert ledger.promised() == {}
        assert ledger.reserve("other", [Demand(B, 500 * MIB)]) == Granted(bytes=500 * MIB)

    def test_the_margin_stays_free_on_the_host(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host), margin_bytes=100 * MIB)
        stranger = ProcessId(13, 1300)
        assert ledger.reserve("k", [Demand(stranger, 901 * MIB)]) == Shortage(
            need_bytes=901 * MIB, have_bytes=900 * MIB, where=HOST
        )
        assert ledger.reserve("k", [Demand(stranger, 900 * MIB)]) == Granted(bytes=900 * MIB)

    def test_reservations_are_bounded(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host), limit=1)
        ledger.reserve("k", [Demand(B, 1)])
        shortage = ledger.reserve("other", [Demand(B, 1)])
        assert isinstance(shortage, Shortage)
        assert "1 reservations exist" in str(shortage)
        assert isinstance(ledger.reserve("k", [Demand(B, 2)]), Granted)

    def test_threads_that_ask_at_once_are_not_promised_the_same_bytes(self, host: FakeHost) -> None:
        ledger = DramLedger(memory_of(host))
        start = threading.Barrier(8)
        answers: list[Granted | Shortage] = []

        def ask(key: int) -> None:
            start.wait()
            answers.append(ledger.reserve(key, [Demand(B, 200 * MIB)]))

        threads = [threading.Thread(target=ask, args=(key,)) for key in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(isinstance(answer, Granted) for answer in answers) == 2

    @pytest.mark.parametrize("seed", range(20))
    def test_no_history_promises_more_than_any_place_has(self, host: FakeHost, seed: int) -> None:
        """The oracle keeps its own books, by place, from the answers alone."""
        chance = random.Random(seed)
        ledger = DramLedger(memory_of(host), margin_bytes=50 * MIB)
        job, a = f"{self.point}/job", f"{self.point}/job/a"
        room = {HOST: 950 * MIB, job: 500 * MIB, a: 300 * MIB}
        above = {A: (HOST, job, a), B: (HOST, job), ProcessId(13, 1): (HOST,)}
        books: dict[int, dict[ProcessId, int]] = {}
        for _ in range(40):
            key = chance.randrange(4)
            if chance.random() < 0.3:
                ledger.release(key)
                books.pop(key, None)
                continue
            demands = {
                process: chance.randrange(1, 200) * MIB
                for process in chance.sample(list(above), chance.randint(1, 3))
            }
            answer = ledger.reserve(key, [Demand(*item) for item in demands.items()])
            wanted = {**books, key: demands}
            sums: defaultdict[str, int] = defaultdict(int)
            for promises in wanted.values():
                for process, count in promises.items():
                    for place in above[process]:
                        sums[place] += count
            fits = all(sums[place] <= count for place, count in room.items())
            assert isinstance(answer, Granted if fits else Shortage)
            if fits:
                books = wanted


def reading(uuid: DeviceId, free: int, *, stale_s: float = 0.0) -> DeviceReading:
    return DeviceReading(
        uuid=uuid, total_bytes=100, used_bytes=100 - free, free_bytes=free, stale_s=stale_s
    )


class TestDeviceLedger:
    """Device memory before a restore."""

    def test_all_devices_are_reserved_or_none(self) -> None:
        ledger = DeviceLedger()
        readings = {GPU0: reading(GPU0, 100), GPU1: reading(GPU1, 10)}
        assert ledger.reserve("k", {GPU0: 50, GPU1: 11}, readings) == Shortage(
            need_bytes=11, have_bytes=10, where="device GPU-1"
        )
        assert ledger.promised() == {}
        assert ledger.reserve("k", {GPU0: 50, GPU1: 10}, readings) == Granted(bytes=60)

    def test_a_job_that_filled_its_device_whole_comes_back_to_it(self) -> None:
        assert DeviceLedger().reserve("k", {GPU0: 100}, {GPU0: reading(GPU0, 100)}) == Granted(
            bytes=100
        )

    def test_two_restores_are_not_promised_the_same_bytes(self) -> None:
        ledger = DeviceLedger()
        readings = {GPU0: reading(GPU0, 100)}
        ledger.reserve("k", {GPU0: 60}, readings)
        assert ledger.reserve("other", {GPU0: 50}, readings) == Shortage(
            need_bytes=50, have_bytes=40, where="device GPU-0"
        )
        ledger.settle("k", GPU0)
        after = {GPU0: reading(GPU0, 40)}
        assert isinstance(ledger.reserve("other", {GPU0: 41}, after), Shortage)
        assert ledger.reserve("other", {GPU0: 40}, after) == Granted(bytes=40)

    def test_a_device_that_was_not_read_lately_is_not_believed(self) -> None:
        ledger = DeviceLedger(max_age_s=5)
        old = {GPU0: reading(GPU0, 100, stale_s=7.25)}
        assert "last read 7.2 s ago" in str(ledger.reserve("k", {GPU0: 1}, old))
        assert "was not read" in str(ledger.reserve("k", {GPU0: 1}, {}))
        fresh_enough = {GPU0: reading(GPU0, 100, stale_s=4)}
        assert ledger.reserve("k", {GPU0: 1}, fresh_enough) == Granted(bytes=1)

    def test_a_margin_stays_free_on_each_device(self) -> None:
        ledger = DeviceLedger(margin_bytes=30)
        readings = {GPU0: reading(GPU0, 100)}
        assert isinstance(ledger.reserve("k", {GPU0: 71}, readings), Shortage)
        assert ledger.reserve("k", {GPU0: 70}, readings) == Granted(bytes=70)
