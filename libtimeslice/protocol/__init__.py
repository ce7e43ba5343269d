"""The wire between clients and daemon: frames, messages and their limits. Sans-I/O.

This package is the single definition of the wire, and both sides use it: it turns bytes into
messages and messages into bytes (`frames`), and checks what a client asks for (`parsing`, by the
rules for fields in `libtimeslice.fields`), which is a value then (`requests`). It knows no socket
and no clock. `docs/protocol.md` describes the same for implementers in other languages.

Safety rule: whatever bytes come in, `FrameReader.feed` and `parse_untrusted` return or raise
`ProtocolError`, and nothing else.
"""

from __future__ import annotations

from libtimeslice.fields import Message
from libtimeslice.protocol.answers import (
    ErrorCode,
    error_message,
    error_reply,
    reply,
)
from libtimeslice.protocol.frames import (
    HEADER_BYTES,
    MAX_DEPTH,
    MAX_FRAME,
    FrameReader,
    decode_untrusted,
    encode,
)
from libtimeslice.protocol.parsing import (
    KILL_GRACE_S,
    PROTOCOL_VERSION,
    check_version_untrusted,
    parse_untrusted,
)
from libtimeslice.protocol.requests import (
    Ack,
    Acquire,
    Attach,
    Bye,
    Cancel,
    DrainOrder,
    EventsQuery,
    Heartbeat,
    Hello,
    HostDeath,
    JobOrder,
    LastTurn,
    PhaseMark,
    Ping,
    Progress,
    PsQuery,
    QueueDepth,
    Register,
    Release,
    Reply,
    Request,
    ShowQuery,
    SlurmNotice,
    StatusQuery,
    WatchdogNotice,
)

__all__ = [
    "HEADER_BYTES",
    "KILL_GRACE_S",
    "MAX_DEPTH",
    "MAX_FRAME",
    "PROTOCOL_VERSION",
    "Ack",
    "Acquire",
    "Attach",
    "Bye",
    "Cancel",
    "DrainOrder",
    "ErrorCode",
    "EventsQuery",
    "FrameReader",
    "Heartbeat",
    "Hello",
    "HostDeath",
    "JobOrder",
    "LastTurn",
    "Message",
    "PhaseMark",
    "Ping",
    "Progress",
    "PsQuery",
    "QueueDepth",
    "Register",
    "Release",
    "Reply",
    "Request",
    "ShowQuery",
    "SlurmNotice",
    "StatusQuery",
    "WatchdogNotice",
    "check_version_untrusted",
    "decode_untrusted",
    "encode",
    "error_message",
    "error_reply",
    "parse_untrusted",
    "reply",
]
