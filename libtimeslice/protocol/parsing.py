"""Checks what a client sent, by the rules for fields in `libtimeslice.fields`."""

from __future__ import annotations

import math
from collections.abc import Callable

from libtimeslice.errors import ProtocolError
from libtimeslice.fields import (
    MAX_CAPS,
    MAX_EVENTS,
    MAX_FIELD_TEXT,
    MAX_FIELDS,
    MAX_GROUPS,
    MAX_ID,
    MAX_INSTANT,
    MAX_NAME,
    MAX_PID,
    MAX_RANKS,
    MAX_SECRET,
    MAX_SLURM_DIGITS,
    MAX_TIMEOUT_S,
    MAX_UID,
    MIN_HEARTBEAT_S,
    Message,
    choices_field,
    flag_field,
    groups_field,
    id_field,
    id_or_none,
    int_field,
    is_name,
    name_field,
    names_field,
    number_field,
    optional_int_field,
    optional_number_field,
    optional_text_field,
    refuse_field,
    text_field,
)
from libtimeslice.protocol.answers import ErrorCode
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

#: Major and minor. The same major understands each other; a minor only adds names.
PROTOCOL_VERSION = (1, 1)
#: What a process has between being asked to end and its end, unless its killer says otherwise.
KILL_GRACE_S = 10.0


def parse_untrusted(message: Message) -> Request:
    """Checks what a client sent and returns it as a value that needs no further checks of form.

    Fields that are unknown are ignored: a newer client may send them. Raises ProtocolError with
    `request_id` set where there is a request to answer, and one of these codes:

    * `bad_request`: a field is missing, of the wrong type, or beyond its limit;
    * `unknown_request`: no such message; ignore it if there is no request to answer;
    * `unsupported_version`: a hello of another major version.
    """
    kind = message.get("t")
    parse = PARSERS.get(kind) if kind.__class__ is str else None
    if parse is not None:
        return parse(message)
    if kind is None and "re" in message:
        return _parse_reply(message)
    raise ProtocolError(
        f"there is no message {kind!r:.80}",
        code=ErrorCode.UNKNOWN_REQUEST,
        request_id=id_or_none(message),
    )


# The two on the hot path come first, with their checks spelled out rather than shared: the daemon
# has some fifteen microseconds for a request in all.


def _parse_acquire(message: Message) -> Acquire:
    get = message.get
    arrive = get("arrive", "all")
    if arrive != "all" and arrive != "first":
        refuse_field(message, "arrive", "must be 'all' or 'first'")
    # Most are absent, and a call to find that out costs as much as the rest.
    return Acquire(
        id_field(message),
        groups_field(message),
        None if get("phase") is None else name_field(message, "phase"),
        None if get("ranks") is None else int_field(message, "ranks", 1, MAX_RANKS),
        arrive,
        None if get("timeout_s") is None else number_field(message, "timeout_s", 0, MAX_TIMEOUT_S),
        () if get("inside") is None else names_field(message, "inside", MAX_GROUPS, least=0),
    )


def _parse_release(message: Message) -> Release:
    return Release(id_field(message), text_field(message, "lease"))


def _parse_hello(message: Message) -> Hello:
    version = message.get("version")
    if not (isinstance(version, list) and [type(part) for part in version[:2]] == [int, int]):
        refuse_field(message, "version", "must be [major, minor]")
    if version[0] != PROTOCOL_VERSION[0]:
        older = "libtimeslice in the job" if version[0] < PROTOCOL_VERSION[0] else "tsliced"
        raise _unsupported_version(version, older)
    role = message.get("role", "client")
    if role not in ("client", "agent", "tool"):
        refuse_field(message, "role", "must be 'client', 'agent' or 'tool'")
    secret = message.get("secret")
    if secret is not None and not (isinstance(secret, bytes) and len(secret) <= MAX_SECRET):
        refuse_field(message, "secret", f"must be at most {MAX_SECRET} bytes")
    return Hello(
        version=(version[0], version[1]),
        client=text_field(message, "client"),
        caps=names_field(message, "caps", MAX_CAPS, least=0) if "caps" in message else (),
        job=optional_text_field(message, "job"),
        uid=optional_int_field(message, "uid", 0, MAX_UID),
        role=role,
        session=optional_text_field(message, "session"),
        secret=secret,
        ranks=optional_int_field(message, "ranks", 1, MAX_RANKS),
        heartbeat_s=optional_number_field(message, "heartbeat_s", MIN_HEARTBEAT_S, MAX_TIMEOUT_S),
        watchdog_s=optional_number_field(message, "watchdog_s", 0, MAX_TIMEOUT_S),
    )


def check_version_untrusted(welcome: Message) -> None:
    """Raises ProtocolError (`unsupported_version`) if a welcome is of another major version."""
    version = welcome.get("version")
    if not (isinstance(version, list) and [type(part) for part in version[:2]] == [int, int]):
        raise ProtocolError("a welcome without a version", code=ErrorCode.BAD_REQUEST)
    if version[0] != PROTOCOL_VERSION[0]:
        older = "tsliced" if version[0] < PROTOCOL_VERSION[0] else "libtimeslice in the job"
        raise _unsupported_version(version, older)


def _unsupported_version(theirs: list[int], older: str) -> ProtocolError:
    return ProtocolError(
        f"protocol version {theirs[0]}.{theirs[1]} is not spoken here, "
        f"{PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]} is; update {older}, which is the older side",
        code=ErrorCode.UNSUPPORTED_VERSION,
    )


def _parse_last_turn(message: Message) -> LastTurn:
    return LastTurn(
        id=id_field(message),
        leaving=flag_field(message, "leaving", absent=False),
        timeout_s=optional_number_field(message, "timeout_s", 0, MAX_TIMEOUT_S),
    )


def _parse_cancel(message: Message) -> Cancel:
    return Cancel(id=id_field(message), acquire=int_field(message, "acquire", 1, MAX_ID))


def _parse_register(message: Message) -> Register:
    return Register(id=id_field(message), pid=optional_int_field(message, "pid", 1, MAX_PID))


def _parse_attach(message: Message) -> Attach:
    return Attach(
        id=id_field(message),
        pid=int_field(message, "pid", 1, MAX_PID),
        groups=groups_field(message),
    )


def _parse_phase(message: Message) -> PhaseMark:
    return PhaseMark(name=name_field(message, "name"), begin=flag_field(message, "begin"))


def _parse_progress(message: Message) -> Progress:
    fields = message.get("fields")
    if not isinstance(fields, dict) or len(fields) > MAX_FIELDS:
        refuse_field(message, "fields", f"must be a map of at most {MAX_FIELDS} fields")
    for name, value in fields.items():
        if not is_name(name):
            refuse_field(
                message, "fields", f"must have names of 1 to {MAX_NAME} printable characters"
            )
        if isinstance(value, str) and len(value) > MAX_FIELD_TEXT:
            refuse_field(
                message, "fields", f"has a string of more than {MAX_FIELD_TEXT} characters"
            )
        if not isinstance(value, (bool, int, float, str)):
            refuse_field(
                message, "fields", "must have values that are numbers, strings or booleans"
            )
    return Progress(fields=fields)


def _parse_queue(message: Message) -> QueueDepth:
    return QueueDepth(
        name=name_field(message, "name"),
        depth=number_field(message, "depth", 0, math.inf),
        target=optional_number_field(message, "target", 0, math.inf),
    )


def _parse_watchdog(message: Message) -> WatchdogNotice:
    return WatchdogNotice(limit_s=optional_number_field(message, "limit_s", 0, MAX_TIMEOUT_S))


def _parse_events(message: Message) -> EventsQuery:
    limit = optional_int_field(message, "limit", 1, MAX_EVENTS)
    return EventsQuery(
        id=id_field(message),
        since=optional_int_field(message, "since", 0, MAX_ID),
        follow=flag_field(message, "follow", absent=False),
        limit=MAX_EVENTS if limit is None else limit,
        after=optional_number_field(message, "after", 0, MAX_INSTANT),
        before=optional_number_field(message, "before", 0, MAX_INSTANT),
        groups=choices_field(message, "groups"),
        jobs=choices_field(message, "jobs"),
        kinds=choices_field(message, "kinds"),
        host=_host_field(message),
    )


def _parse_status(message: Message) -> StatusQuery:
    return StatusQuery(id=id_field(message), host=_host_field(message))


def _host_field(message: Message) -> str | None:
    return None if message.get("host") is None else name_field(message, "host")


def _parse_show(message: Message) -> ShowQuery:
    kind = message.get("kind")
    if kind not in ("job", "group", "device", "session", "lease", "host"):
        rule = "must be 'job', 'group', 'device', 'session', 'lease' or 'host'"
        refuse_field(message, "kind", rule)
    return ShowQuery(id=id_field(message), kind=kind, name=text_field(message, "name"))


def _parse_job_order(message: Message) -> JobOrder:
    grace_s = optional_number_field(message, "grace_s", 0, MAX_TIMEOUT_S)
    return JobOrder(
        id=id_field(message),
        verb=message["t"],
        job=text_field(message, "job"),
        grace_s=KILL_GRACE_S if grace_s is None else grace_s,
    )


def _parse_drain_order(message: Message) -> DrainOrder:
    return DrainOrder(
        id=id_field(message),
        open=message["t"] == "undrain",
        groups=groups_field(message),
        device=optional_text_field(message, "device"),
        park=flag_field(message, "park", absent=False),
        why=optional_text_field(message, "why"),
    )


def _parse_host_death(message: Message) -> HostDeath:
    return HostDeath(
        id=id_field(message),
        host=name_field(message, "host"),
        why=optional_text_field(message, "why"),
    )


def _parse_slurm_notice(message: Message) -> SlurmNotice:
    verb, job = message.get("verb"), text_field(message, "job")
    if verb not in ("began", "ended"):
        refuse_field(message, "verb", "must be 'began' or 'ended'")
    if not (job.isascii() and job.isdecimal() and len(job) <= MAX_SLURM_DIGITS):
        refuse_field(message, "job", "must be the number of a Slurm job, as text")
    return SlurmNotice(
        id=id_field(message),
        verb=verb,
        job=job,
        uid=int_field(message, "uid", 0, MAX_UID),
        nodes=optional_text_field(message, "nodes"),
        node=optional_text_field(message, "node"),
        account=optional_text_field(message, "account"),
    )


def _parse_reply(message: Message) -> Reply:
    error = message.get("err")
    if error is not None and not isinstance(error, dict):
        refuse_field(message, "err", "must be a map with code and message")
    return Reply(re=int_field(message, "re", 1, MAX_ID), error=error, fields=message)


PARSERS: dict[object, Callable[[Message], Request]] = {
    "acquire": _parse_acquire,
    "release": _parse_release,
    "hello": _parse_hello,
    "last_turn": _parse_last_turn,
    "cancel": _parse_cancel,
    "register": _parse_register,
    "attach": _parse_attach,
    "phase": _parse_phase,
    "progress": _parse_progress,
    "queue": _parse_queue,
    "heartbeat": lambda _message: Heartbeat(),
    "watchdog": _parse_watchdog,
    "status": _parse_status,
    "ps": lambda message: PsQuery(id=id_field(message)),
    "events": _parse_events,
    "show": _parse_show,
    "retry": _parse_job_order,
    "clear": _parse_job_order,
    "kill": _parse_job_order,
    "qualify": _parse_job_order,
    "drain": _parse_drain_order,
    "undrain": _parse_drain_order,
    "host_dead": _parse_host_death,
    "slurm_job": _parse_slurm_notice,
    "ping": lambda message: Ping(id=id_field(message)),
    "bye": lambda _message: Bye(),
    "ack": lambda message: Ack(lease=text_field(message, "lease")),
}
