"""The checks of `tslicectl doctor`, each on facts that are good and on facts that are not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from host_trees import FakeHost

from libtimeslice import __version__
from libtimeslice.connection import Connection
from libtimeslice.errors import TimeSliceError
from libtimeslice.protocol import Message
from tsliced.config import Config, MemorySettings
from tsliced.config.settings import DaemonSettings
from tsliced.core.model import DeviceId
from tsliced.doctor import daemon, devices, host, jobs
from tsliced.doctor.findings import Finding, Verdict, exit_code
from tsliced.host.cgroups import Cgroups
from tsliced.host.devices import Device, DeviceHealth
from tsliced.host.journal import Journal
from tsliced.host.memory import HostMemory

MIB = 1 << 20
DEVICE = Device(
    uuid=DeviceId("GPU-0"),
    index=0,
    name="Model",
    total_bytes=100 * MIB,
    driver_version="580.95.05",
    persistence=True,
    mig=False,
    compute_mode="default",
)
OTHER = replace(DEVICE, uuid=DeviceId("GPU-1"), index=1)


def verdicts(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.check: finding.verdict.value for finding in findings}


def only(findings: list[Finding], verdict: Verdict, *words: str) -> None:
    """Asserts that there is one finding, of this verdict and with these words, and a remedy."""
    (finding,) = findings
    assert finding.verdict is verdict, finding
    assert bool(finding.remedy) is (verdict is not Verdict.GOOD), finding
    for word in words:
        assert word in f"{finding.text}; {finding.remedy}"


@pytest.fixture
def tree(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


# --- devices --------------------------------------------------------------------------------------


def test_a_good_driver_is_told_with_its_version_and_devices() -> None:
    only(devices.check_driver([DEVICE, OTHER], ()), Verdict.GOOD, "580.95.05", "2 devices")


@pytest.mark.parametrize(
    ("version", "verdict"), [("565.57.01", Verdict.FAULT), ("570.86.15", Verdict.WARNING)]
)
def test_an_old_driver_is_at_fault_or_warned_of(version: str, verdict: Verdict) -> None:
    old = replace(DEVICE, driver_version=version)
    only(devices.check_driver([old], ()), verdict, version, "upgrade")


def test_a_device_that_cannot_be_described_and_no_device_at_all_are_faults() -> None:
    only(devices.check_driver([DEVICE], ["device 1 cannot be used"]), Verdict.FAULT, "device 1")
    only(devices.check_driver([], ()), Verdict.FAULT, "no device")


def test_modes_are_told_once_for_all_devices_that_have_them() -> None:
    assert set(verdicts(devices.check_modes([DEVICE])).values()) == {"good"}
    off = [replace(DEVICE, persistence=False), replace(OTHER, persistence=False, mig=True)]
    found = {f.check: f for f in devices.check_modes(off)}
    assert found["persistence"].verdict is Verdict.WARNING
    assert found["persistence"].text.startswith("device 0, 1: ")
    assert found["mig"].verdict is Verdict.FAULT
    assert found["mig"].text.startswith("device 1: ")
    assert found["compute mode"].verdict is Verdict.GOOD
    shared = devices.check_modes([replace(DEVICE, compute_mode="exclusive_process")])
    assert verdicts(shared)["compute mode"] == "warning"
    assert devices.check_modes([]) == []


def test_devices_that_are_slowed_down_are_named() -> None:
    def health(slowed_by: tuple[str, ...] | None) -> dict[DeviceId, DeviceHealth]:
        return {DEVICE.uuid: DeviceHealth(slowed_by=slowed_by, pci_address=None)}

    only(devices.check_clocks([DEVICE], health(())), Verdict.GOOD)
    only(devices.check_clocks([DEVICE], health(("power brake",))), Verdict.WARNING, "power brake")
    only(devices.check_clocks([DEVICE], health(None)), Verdict.UNKNOWN)
    only(devices.check_clocks([DEVICE], {}), Verdict.UNKNOWN)


def test_the_drivers_library_is_loaded_and_asked_for_its_version(softcuda_build: Path) -> None:
    library = str(softcuda_build / "libcuda.so.1")
    only(devices.check_api(["cuda"], library), Verdict.GOOD, "CUDA 13.0")
    only(
        devices.check_api(["cuda"], "/nowhere/libcuda.so.1"), Verdict.FAULT, "/nowhere/libcuda.so.1"
    )
    nvml = str(softcuda_build / "libnvidia-ml.so.1")
    only(devices.check_api(["cuda"], nvml), Verdict.FAULT, "is not the CUDA driver")
    only(devices.check_api(["torch"], None), Verdict.GOOD)


# --- the machine ----------------------------------------------------------------------------------


def test_host_memory_is_held_against_a_job_that_fills_all_devices(tree: FakeHost) -> None:
    memory = HostMemory(Cgroups(tree.proc))
    settings = MemorySettings(
        snapshot_margin_ratio=0.0, snapshot_margin_bytes=0, host_margin_bytes=MIB
    )
    tree.set_available(201 * MIB)
    only(host.check_memory(memory, settings, 200 * MIB, 2), Verdict.GOOD, "200.0 MiB of")
    tree.set_available(200 * MIB)
    only(host.check_memory(memory, settings, 200 * MIB, 2), Verdict.WARNING, "takes 200.0 MiB")


def test_a_cgroup_without_room_for_what_its_process_has_on_the_devices_is_named(
    tree: FakeHost,
) -> None:
    tree.set_available(900 * MIB)
    directory = tree.cgroup(
        tree.mount("memory") / "job_1",
        memory_limit_in_bytes=100 * MIB,
        memory_usage_in_bytes=60 * MIB,
        memory_stat="total_inactive_file 0",
    )
    # Only the first underscore is a dot in these names.
    for name in ("limit_in_bytes", "usage_in_bytes"):
        assert (directory / f"memory.{name}").exists()
    tree.process(7, cgroups="3:memory:/job_1\n")
    memory = HostMemory(Cgroups(tree.proc))
    only(host.check_cgroups(memory, {7: 40 * MIB}), Verdict.GOOD)
    only(host.check_cgroups(memory, {7: 41 * MIB}), Verdict.WARNING, "process 7", "job_1")
    only(host.check_cgroups(memory, {}), Verdict.GOOD)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("[always] madvise never", Verdict.GOOD),
        ("always [madvise] never", Verdict.WARNING),
        ("always madvise [never]", Verdict.WARNING),
    ],
)
def test_huge_pages_are_best_when_always_used(tree: FakeHost, text: str, verdict: Verdict) -> None:
    tree.write("kernel/mm/transparent_hugepage/enabled", text)
    only(host.check_huge_pages(str(tree.root)), verdict)


def test_a_kernel_without_huge_pages_is_unknown(tmp_path: Path) -> None:
    only(host.check_huge_pages(str(tmp_path)), Verdict.UNKNOWN)


def test_a_memory_node_without_room_for_its_devices_is_named(tree: FakeHost) -> None:
    sys = str(tree.root)
    only(host.check_numa({0: "0000:17:00.0"}, MIB, sys), Verdict.GOOD, "one memory node")
    for node, free in ((0, 5), (1, 100)):
        text = f"Node {node} MemTotal: 999999 kB\nNode {node} MemFree: {free * 1024} kB\n"
        tree.write(f"devices/system/node/node{node}/meminfo", text)
    for place, node in (("0000:17:00.0", 0), ("0000:9a:00.0", 1)):
        tree.write(f"bus/pci/devices/{place}/numa_node", f"{node}\n")
    places = {0: "0000:17:00.0", 1: "0000:9a:00.0"}
    only(host.check_numa(places, 5 * MIB, sys), Verdict.GOOD, "2 memory nodes")
    only(host.check_numa(places, 6 * MIB, sys), Verdict.WARNING, "node 0", "(0)")


def test_a_clock_that_nobody_keeps_matters_where_there_are_several_hosts() -> None:
    only(host.check_clock(0, has_peers=True), Verdict.GOOD)
    only(host.check_clock(5, has_peers=False), Verdict.GOOD)
    only(host.check_clock(5, has_peers=True), Verdict.WARNING, "chronyd")
    assert 0 <= host.clock_state() <= 5


def test_mps_is_a_fault(tree: FakeHost) -> None:
    tree.write("proc/41/comm", "python\n")
    only(host.check_mps(tree.proc), Verdict.GOOD)
    tree.write("proc/42/comm", "nvidia-cuda-mps\n")
    only(host.check_mps(tree.proc), Verdict.FAULT, "process 42")


@pytest.mark.parametrize(
    ("env", "margin", "verdict"),
    [
        ({"A": "b"}, MemorySettings(), Verdict.GOOD),
        ({"A": "b"}, MemorySettings(ray_margin="never"), Verdict.WARNING),
        ({"RAY_memory_usage_threshold": "0.8"}, MemorySettings(), Verdict.WARNING),
        ({"RAY_memory_usage_threshold": "0.8"}, MemorySettings(ray_margin_ratio=0.2), Verdict.GOOD),
        ({"RAY_memory_usage_threshold": "much"}, MemorySettings(), Verdict.GOOD),
        (
            {"RAY_memory_monitor_refresh_ms": "0"},
            MemorySettings(ray_margin="never"),
            Verdict.GOOD,
        ),
    ],
)
def test_rays_monitor_must_be_left_what_it_wants(
    tree: FakeHost, env: dict[str, str], margin: MemorySettings, verdict: Verdict
) -> None:
    only(host.check_ray(margin, tree.proc), Verdict.GOOD, "no raylet")
    tree.process(50, name="raylet", env=env)
    tree.write("proc/50/comm", "raylet\n")
    only(host.check_ray(margin, tree.proc), verdict)


def test_a_kernel_that_lets_nobody_trace_is_a_fault(tree: FakeHost) -> None:
    only(host.check_tracing(is_root=True, proc=tree.proc), Verdict.GOOD)
    tree.write("proc/sys/kernel/yama/ptrace_scope", "1\n")
    only(host.check_tracing(is_root=True, proc=tree.proc), Verdict.GOOD)
    only(host.check_tracing(is_root=False, proc=tree.proc), Verdict.WARNING, "root")
    tree.write("proc/sys/kernel/yama/ptrace_scope", "3\n")
    only(host.check_tracing(is_root=True, proc=tree.proc), Verdict.FAULT)


# --- jobs -----------------------------------------------------------------------------------------

RANK = {"WORLD_SIZE": "2", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
PATIENT = {**RANK, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "36000"}


def test_nccl_must_be_told_of_each_rank_of_several() -> None:
    only(jobs.check_nccl({1: RANK, 2: {"WORLD_SIZE": "1"}}, ["cuda"]), Verdict.GOOD)
    wrong = {1: RANK, 2: {**RANK, "NCCL_NVLS_ENABLE": "1"}, 3: {"WORLD_SIZE": "2"}}
    found = jobs.check_nccl(wrong, ["cuda"])
    assert [f.verdict for f in found] == [Verdict.WARNING] * 2
    assert "NCCL_CUMEM_ENABLE is not 0 in process 3" in found[0].text
    assert "NCCL_NVLS_ENABLE is not 0 in process 2, 3" in found[1].text
    only(jobs.check_nccl(wrong, ["torch"]), Verdict.GOOD)
    only(jobs.check_nccl({1: None}, ["cuda"]), Verdict.UNKNOWN, "process 1", "root")
    only(jobs.check_nccl({}, ["cuda"]), Verdict.GOOD, "no process")


def test_watchdogs_of_pytorch_and_other_savers_of_memory_are_named() -> None:
    only(jobs.check_torch({1: PATIENT}), Verdict.GOOD)
    only(jobs.check_torch({1: RANK}), Verdict.WARNING, "process 1", "8m00s")
    unwatched = {**RANK, "TORCH_NCCL_ENABLE_MONITORING": "0"}
    only(jobs.check_torch({1: unwatched, 2: None}), Verdict.GOOD)
    other = {**PATIENT, "LD_PRELOAD": "/x/torch_memory_saver_hook.so"}
    only(jobs.check_torch({1: other}), Verdict.FAULT, "torch_memory_saver", "LD_PRELOAD")


def test_what_stands_still_is_a_fault_with_the_daemons_own_word_on_it() -> None:
    job: Message = {"job": {"id": "a"}, "state": "held", "reason": None}
    status: Message = {"groups": [{"name": "g", "state": "held", "reason": None}], "jobs": [job]}
    only(jobs.check_standstills(status), Verdict.GOOD, "1 known")
    faulted = {**job, "state": "faulted", "reason": "no room; tslicectl retry a"}
    only(jobs.check_standstills({**status, "jobs": [faulted]}), Verdict.FAULT, "tslicectl retry a")
    parked = {**job, "state": "parked", "reason": "asked for nothing"}
    only(jobs.check_standstills({**status, "jobs": [parked]}), Verdict.WARNING, "asked for nothing")
    blocked = {"name": "g", "state": "blocked", "reason": "pid 9; tslicectl kill b"}
    only(jobs.check_standstills({**status, "groups": [blocked]}), Verdict.FAULT, "g is blocked")


# --- the daemon -----------------------------------------------------------------------------------


def test_warnings_of_the_configuration_are_passed_on() -> None:
    config = Config(daemon=DaemonSettings(), files=("/etc/tsliced/tsliced.toml",))
    only(daemon.check_config(config), Verdict.GOOD, "/etc/tsliced/tsliced.toml")
    odd = replace(config, warnings=("tsliced.toml:3: an unknown key",))
    only(daemon.check_config(odd), Verdict.WARNING, "tsliced.toml:3")


def connected(path: Path) -> Exception | None:
    """Returns what a connection to a socket meets."""
    try:
        Connection.open(str(path), role="tool", limit_s=1.0).close()
    except TimeSliceError as exc:
        return exc
    return None


def test_each_way_in_which_a_socket_does_not_answer_has_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "s"
    only(daemon.check_socket(str(path), None, 0.001), Verdict.GOOD, "1.0 ms")
    only(daemon.check_socket(str(path), connected(path), None), Verdict.FAULT, "no daemon runs")
    path.write_text("")
    only(daemon.check_socket(str(path), connected(path), None), Verdict.FAULT, "is no socket")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    only(daemon.check_socket(str(path), connected(path), None), Verdict.FAULT, "nobody listens")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every socket")
def test_a_socket_that_one_may_not_open_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        only(daemon.check_socket(str(path), connected(path), None), Verdict.FAULT, "by you")


def test_another_version_than_the_installed_one_is_warned_of() -> None:
    status: Message = {"version": __version__, "pid": 1, "backend": "cuda"}
    only(daemon.check_daemon(status), Verdict.GOOD)
    only(daemon.check_daemon({**status, "version": "0.0.1"}), Verdict.WARNING, "0.0.1 runs")


@pytest.mark.parametrize(
    ("capabilities", "uid", "verdict"),
    [
        ("00000000000800a6", 0, Verdict.GOOD),
        ("0000000000000000", 1000, Verdict.GOOD),
        ("0000000000000020", 0, Verdict.FAULT),
    ],
)
def test_a_daemon_of_root_needs_its_capabilities(
    tree: FakeHost, capabilities: str, uid: int, verdict: Verdict
) -> None:
    ids = "\t".join([str(uid)] * 4)
    tree.write("proc/9/status", f"Name:\tx\nUid:\t{ids}\nCapEff:\t{capabilities}\n")
    only(daemon.check_rights(9, proc=tree.proc), verdict)
    only(daemon.check_rights(10, proc=tree.proc), Verdict.UNKNOWN)


def test_what_a_sandbox_takes_away_is_named(tree: FakeHost) -> None:
    whole = "0 0 4294967295\n"
    tree.write("proc/self/uid_map", whole)
    tree.write("proc/9/uid_map", whole)
    tree.write("proc/9/mountinfo", "1 1 0:5 / /proc rw - proc proc rw\n")

    def found() -> list[Finding]:
        return daemon.check_sandbox(9, root=str(tree.root), proc=tree.proc)

    only(found(), Verdict.GOOD)
    tree.write("dev/nvidiactl", "")
    only(found(), Verdict.FAULT, "PrivateDevices=no")
    tree.write("proc/9/root/dev/nvidiactl", "")
    only(found(), Verdict.GOOD)
    tree.write("proc/9/mountinfo", "1 1 0:5 / /proc rw - proc proc rw,hidepid=invisible\n")
    only(found(), Verdict.WARNING, "ProtectProc=default")
    tree.write("proc/9/mountinfo", "1 1 0:5 / /proc rw - proc proc rw\n")
    tree.write("proc/9/uid_map", "0 0 1\n")
    only(found(), Verdict.FAULT, "PrivateUsers=no")
    only(daemon.check_sandbox(10, proc=tree.proc), Verdict.UNKNOWN)


def mounted(directory: Path, kind: str) -> str:
    return f"1 1 0:5 / / rw - ext4 /dev/a rw\n2 1 0:6 / {directory} rw - {kind} x rw\n"


def test_where_the_journal_lies_matters(tmp_path: Path) -> None:
    def found(kind: str) -> list[Finding]:
        return daemon.check_journal(tmp_path, runs=True, mountinfo=mounted(tmp_path, kind))

    only(found("ext4"), Verdict.GOOD, str(tmp_path))
    only(found("nfs4"), Verdict.WARNING, "a write may hang")
    only(found("tmpfs"), Verdict.WARNING, "forgotten")
    only(daemon.check_journal(tmp_path / "none", runs=False), Verdict.GOOD, "not there yet")


def test_a_journal_that_cannot_be_read_is_found_without_a_daemon(tmp_path: Path) -> None:
    on_disk = mounted(tmp_path, "ext4")
    Journal.open(tmp_path, now_unix=time.time()).close()
    only(daemon.check_journal(tmp_path, runs=False, mountinfo=on_disk), Verdict.GOOD)
    (log,) = tmp_path.glob("kept-*")
    log.write_bytes(b"\xff" * len(log.read_bytes()))
    found = daemon.check_journal(tmp_path, runs=False, mountinfo=on_disk)
    only(found, Verdict.FAULT, "tslicectl rescue")


def test_links_that_are_down_or_whose_clocks_are_apart_are_named() -> None:
    peer: Message = {
        "host": "n2", "state": "connected", "since_s": 5.0, "reason": None, "clock_ahead_s": 0.1
    }  # fmt: skip
    only(daemon.check_peers([]), Verdict.GOOD)
    only(daemon.check_peers([peer]), Verdict.GOOD, "1 hosts")
    lost = {**peer, "state": "lost", "reason": "no route"}
    only(daemon.check_peers([lost]), Verdict.FAULT, "n2", "no route")
    only(daemon.check_peers([{**peer, "clock_ahead_s": -7.0}]), Verdict.WARNING, "7.0 s behind")


def test_the_exit_code_is_that_of_the_worst() -> None:
    assert exit_code([]) == 0
    found = {v: Finding(check="c", verdict=v, text="t") for v in Verdict}
    assert exit_code([found[Verdict.GOOD], found[Verdict.UNKNOWN]]) == 0
    assert exit_code([found[Verdict.GOOD], found[Verdict.WARNING]]) == 1
    assert exit_code([found[Verdict.WARNING], found[Verdict.FAULT]]) == 2
