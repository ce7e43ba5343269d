"""What `tslicectl doctor` finds on hosts that are well, and on broken ones."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from harness import LIMIT_S, Host, MakeHost, until

CTL = [sys.executable, "-m", "tsliced.ctl"]


def doctor(host: Host, **environment: str) -> dict[str, list[dict[str, Any]]]:
    """Returns what is found, by check; the exit code must be that of the worst."""
    command = [*CTL, "doctor", "--config", str(host.config), "--json"]
    done = subprocess.run(
        command,
        env=host.variables(**environment),
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )
    document = json.loads(done.stdout)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in document["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    verdicts = {finding["verdict"] for finding in document["findings"]}
    expected = 2 if "fault" in verdicts else int("warning" in verdicts)
    assert (done.returncode, document["exit_code"]) == (expected, expected), done.stderr
    return found


def verdict(found: dict[str, list[dict[str, Any]]], check: str) -> str:
    (finding,) = found[check]
    return str(finding["verdict"])


def test_a_host_that_is_well_has_no_fault_and_a_line_for_each_check(host: Host) -> None:
    found = doctor(host)
    faults = [
        finding for lines in found.values() for finding in lines if finding["verdict"] == "fault"
    ]
    assert not faults
    assert {
        "config", "socket", "daemon", "rights", "sandbox", "peers", "jobs", "journal", "driver",
        "persistence", "mig", "compute mode", "clocks", "api", "memory", "cgroups", "huge pages",
        "numa", "clock", "mps", "ray", "tracing", "nccl", "torch",
    } == set(found)  # fmt: skip
    done = subprocess.run(
        [*CTL, "doctor", "--config", str(host.config)],
        env=host.variables(),
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == sum(map(len, found.values())), "one line each"
    assert all(line.startswith(("good ", "unknown ", "warning ")) for line in lines)
    assert "good" in done.stderr


def test_broken_devices_are_found_with_and_without_a_daemon(make_host: MakeHost) -> None:
    host = make_host(
        SOFTCUDA_PERSISTENCE="0",
        SOFTCUDA_UNSUPPORTED="mig",
        SOFTCUDA_CLOCK_REASONS="64",
        SOFTCUDA_DRIVER="570.86.15",
    )
    for has_daemon in (True, False):
        if not has_daemon:
            host.stop_daemon()
        found = doctor(host)
        assert verdict(found, "persistence") == "warning"
        assert "nvidia-smi -pm 1" in found["persistence"][0]["remedy"]
        assert verdict(found, "mig") == "fault"
        assert verdict(found, "clocks") == "warning"
        assert "heat" in found["clocks"][0]["text"]
        assert verdict(found, "driver") == "warning"
        assert verdict(found, "socket") == ("good" if has_daemon else "fault")
    host.start_daemon()


def test_a_daemon_that_was_killed_leaves_a_socket_and_leases_which_are_found(host: Host) -> None:
    host.trainer("a", mib=8)
    host.kill_daemon()
    found = doctor(host)
    assert "nobody listens" in found["socket"][0]["text"]
    assert "tslicectl rescue" in " ".join(finding["remedy"] for finding in found["journal"])
    host.start_daemon()


def test_a_host_without_a_driver_says_what_to_install(host: Host) -> None:
    host.write_config(
        host.config,
        {"daemon": {"nvml_library": "/nowhere/nvml.so", "cuda_library": "/nowhere/cuda.so"}},
    )
    found = doctor(host)
    assert verdict(found, "driver") == "fault"
    assert "/nowhere/nvml.so" in found["driver"][0]["text"]
    assert verdict(found, "api") == "fault"


def test_a_configuration_with_a_mistake_does_not_hide_the_rest(host: Host) -> None:
    host.write_config(host.config, {"scan": {"interval_s": "soon"}})
    found = doctor(host)
    assert verdict(found, "config") == "fault"
    assert "interval_s" in found["config"][0]["text"]
    assert verdict(found, "socket") == "good"


def test_the_environment_of_running_ranks_and_what_stands_still_are_looked_at(host: Host) -> None:
    ranks = [host.rank("a", WORLD_SIZE="2", NCCL_CUMEM_ENABLE="0") for _ in range(2)]
    for started in [rank.start("initialise", group="g1", mib=8, seed=0) for rank in ranks]:
        started.wait()
    rank = ranks[0]
    found = doctor(host)
    assert "NCCL_NVLS_ENABLE" in found["nccl"][0]["text"]
    assert str(rank.pid) in found["nccl"][0]["text"]
    assert verdict(found, "torch") == "warning"
    host.fault(f"checkpoint {rank.pid} * error:801")
    host.rank("b").start("acquire", groups="g1", timeout=60)
    until(lambda: host.events("pinned"), "it is pinned")
    texts = [f"{f['text']}; {f['remedy']}" for f in doctor(host)["jobs"]]
    assert any("tslicectl retry" in text for text in texts)
    host.fault()
