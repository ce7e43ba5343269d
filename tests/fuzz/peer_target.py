"""What the daemon of another host says, damaged: it is understood or refused, and nothing else.

It has proved who it is, so what damages its words is another version, or somebody who has its key.
"""

from __future__ import annotations

from collections.abc import Callable

from choices import Choices
from file_targets import damaged

from tsliced.core.events import AcquireRequested, SessionOpened
from tsliced.core.messages import HeldLeases, PeerMessage, Presence, PresentRank
from tsliced.core.model import (
    Cause,
    Counter,
    Goal,
    GroupName,
    HostName,
    JobKey,
    LeaseId,
    ProcessId,
    RankState,
    Reason,
    RequestId,
    SessionId,
    Stamp,
    TenancyKey,
)
from tsliced.core.signals import Order, Report
from tsliced.net.peer_codec import decode_untrusted, encode
from tsliced.net.peer_messages import Frames, PeerRefused, Say

SPEAKER, LISTENER = HostName("n1"), HostName("n2")
GROUP, JOB, PROCESS = GroupName("both"), JobKey("", 1000, "train"), ProcessId(4711, 99)
TENANCY, STAMP = TenancyKey(JOB, (GROUP,)), Stamp(0, Counter(1, 2), 3)
SESSION = SessionId("s-1")
SAID: list[PeerMessage] = [
    Order(host=LISTENER, tenancy=TENANCY, stamp=STAMP, goal=Goal.FROZEN),
    Report(
        host=SPEAKER,
        tenancy=TENANCY,
        stamp=STAMP,
        failure=Reason(cause=Cause.DRIVER, text="no"),
        states=((PROCESS, RankState.FROZEN),) * 3,
    ),
    Presence(
        group=GROUP,
        ranks=(
            PresentRank(
                process=PROCESS,
                job=JOB,
                state=RankState.PARKED,
                device_bytes=1 << 33,
                groups=(GROUP,),
                lead=HostName("n1"),
                term=0,
                home=(GROUP,),
            ),
        ),
        clients=(JOB,),
        shortages=((JOB, "no memory"),),
    ),
    HeldLeases(leases=((SESSION, LeaseId("s-1.2")),)),
    SessionOpened(session=SESSION, job=JOB, process=PROCESS, secret=b"", groups=(GROUP,)),
    AcquireRequested(session=SESSION, request=RequestId(2), groups=(GROUP,), timeout_s=1.5),
]


def peer_target() -> Callable[[bytes], str]:
    """Returns a function that hears something changed by an input, and says what came of it."""
    bodies = [encode(message) for message in SAID]
    frames = Frames(max_bytes=1 << 20)

    def run(data: bytes) -> str:
        choices = Choices(data)
        body = damaged(choices.one_of(bodies), choices)
        try:
            message = frames.decode_untrusted(body)
            if isinstance(message, Say):
                heard = decode_untrusted(message, speaker=SPEAKER, listener=LISTENER)
                # What is let in can be said again.
                encode(heard)
                return type(heard).__name__
        except PeerRefused as exc:
            return f"refused: {exc.code}"
        return type(message).__name__

    return run
