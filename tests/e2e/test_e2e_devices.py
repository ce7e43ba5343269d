"""Devices in trouble: lost and back again, or set up so that jobs will suffer from it."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Host, MakeHost, RankError, own, until

#: Jobs come back once before they first make room, as they do unless it is turned off.
QUALIFIES = True
LOST = "nvml:0 * * error:15"


def device(host: Host, group: str = "g1") -> dict[str, Any]:
    found: dict[str, Any] = host.group(group)["devices"][0]
    return found


def test_a_device_that_is_lost_is_named_its_jobs_are_told_and_the_others_go_on_g11(
    host: Host,
) -> None:
    parked, running = host.trainer("a", mib=24, seed=1), host.trainer("b", mib=24, seed=2)
    elsewhere = host.rank("c")
    elsewhere.do("acquire", groups="g2")
    elsewhere.do("context", device=1)
    elsewhere.do("release")
    digest = running.do("digest")
    states = {parked.pid: "parked", running.pid: "running", elsewhere.pid: "running"}
    until(lambda: host.states() == states, "all are known")
    host.fault(LOST)
    lost = until(lambda: host.events("device_lost"), "it is seen", limit_s=10)[0]
    assert lost["device"] == device(host)["uuid"]
    assert lost["groups"] == "g1"
    assert lost["jobs"] == f"{own('a')},{own('b')}"
    assert "nvidia-smi -r" in lost["way_out"]
    group = host.group()
    assert group["state"] == "lost"
    assert "GPU is lost" in group["reason"]
    assert "GPU is lost" in device(host)["problems"][0]
    for rank, words in ((parked, "goes back when the device does"), (running, "is gone")):
        with pytest.raises(RankError, match=words) as refused:
            rank.do("acquire", groups="g1", timeout=20)
        assert refused.value.code == "job_faulted"
        assert lost["device"] in str(refused.value)
    newcomer = host.rank("d").start("acquire", groups="g1", timeout=60)
    assert elsewhere.do("acquire", groups="g2", timeout=20)["state"] == "held"
    until(lambda: host.group()["next"] is not None, "the newcomer keeps its place")
    assert not newcomer.is_over()
    # In reality what was on the device does not outlive it.
    running.kill()
    host.fault()
    assert newcomer.wait()["state"] == "held"
    assert host.events("device_back")[0]["device"] == lost["device"]
    assert host.job("a")["state"] == "parked"
    assert device(host)["problems"] == []
    assert len(digest) == 64


def test_a_parked_job_goes_on_when_its_device_is_back_g12(host: Host) -> None:
    rank, other = host.trainer("a", mib=24, seed=1), host.rank("b")
    digest = rank.do("digest")
    other.do("acquire", groups="g1", timeout=20)
    other.do("release")
    host.fault(LOST)
    until(lambda: host.job("a")["state"] == "faulted", "it is told")
    host.kill_daemon()
    host.start_daemon()
    assert host.job("a")["state"] == "faulted"
    host.fault()
    until(lambda: host.job("a")["state"] == "parked", "the fault is over")
    assert rank.do("acquire", groups="g1", timeout=20)["restored"] is True
    assert rank.do("digest") == digest


def test_nvml_that_does_not_answer_is_said_and_no_grant_is_made_on_its_old_word(
    make_host: MakeHost,
) -> None:
    host = make_host(settings={"scan": {"nvml_timeout_s": 0.3}})
    rank, other = host.trainer("a", mib=8), host.rank("b")
    until(lambda: host.states() == {rank.pid: "running"}, "it is known")
    host.fault("nvml * * stall")
    until(lambda: host.events("devices"), "it is said")
    asked = other.start("acquire", groups="g1", timeout=60)
    failed = until(lambda: host.events("eviction_failed"), "nobody is moved")[0]
    assert "NVML does not answer" in failed["reason"]
    assert host.operations() == []
    host.fault()
    assert asked.wait()["state"] == "held"
    assert host.states() == {rank.pid: "parked"}


def test_how_a_device_is_set_up_is_warned_of_at_start_and_in_the_status(
    make_host: MakeHost,
) -> None:
    host = make_host(SOFTCUDA_PERSISTENCE="0", SOFTCUDA_DRIVER="570.86.15")
    persistence, driver = device(host)["problems"]
    assert "nvidia-smi -pm 1" in persistence
    assert "PyTorch needs 575.57.08" in driver
    log = host.log.read_text()
    assert log.count("persistence mode is off") == 2, "once for each device"
    warned = [event["reason"] for event in host.events("device") if event["level"] == "warning"]
    assert sum("persistence mode is off" in reason for reason in warned) == 2
    # The daemon's helpers initialize the driver, so that jobs come back nevertheless.
    rank, other = host.trainer("a", mib=8), host.rank("b")
    digest = rank.do("digest")
    other.do("acquire", groups="g1", timeout=20)
    other.do("release")
    assert rank.do("acquire", groups="g1", timeout=20)["restored"] is True
    assert rank.do("digest") == digest
