"""Two jobs that take turns, seen by others than the daemon."""

from __future__ import annotations

from harness import MIB, Host, resident_bytes

#: Two of these do not fit on a device of 64 MiB.
STATE_MIB = 40
STATE_BYTES = STATE_MIB * MIB


def assert_alternates(host: Host, *, turns: int = 3, limit_s: float = 20.0) -> None:
    """Lets two jobs take turns on one device, and checks each switch by what others than the
    daemon say: NVML, the kernel, and a hash of the contents.
    """
    first, second = host.trainer("a", mib=STATE_MIB, seed=1), host.rank("b")
    expected = {first.pid: first.do("digest")}
    before = resident_bytes(first.pid)
    second.do("initialise", group="g1", mib=STATE_MIB, seed=2, timeout=limit_s)
    assert resident_bytes(first.pid) - before > STATE_BYTES * 0.9, "it has its state in host memory"
    expected[second.pid] = second.do("digest")
    assert expected[first.pid] != expected[second.pid]
    tokens = [0]
    comes, leaves = first, second
    for _ in range(turns * 2):
        parked = resident_bytes(comes.pid)
        lease = comes.do("acquire", groups="g1", timeout=limit_s)
        assert lease["restored"] is True
        assert 0 < lease["switch_s"] <= lease["waited_s"]
        tokens.append(lease["tokens"]["g1"])
        assert host.states() == {comes.pid: "running", leaves.pid: "parked"}
        # One job's state and a context's worth: of the other's nothing is left on the device.
        assert STATE_BYTES <= host.used_bytes() < STATE_BYTES + 8 * MIB
        assert parked - resident_bytes(comes.pid) > STATE_BYTES * 0.9, "its host copy is gone"
        assert comes.do("digest") == expected[comes.pid]
        comes.do("release")
        comes, leaves = leaves, comes
    assert tokens == sorted(set(tokens)), "each grant has a higher token"
