"""What can be configured: one frozen dataclass for each section of tsliced.toml.

Each class is handed to the part of the daemon that it is about, and to no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tsliced.config.backends import BackendSettings
from tsliced.config.reader import Origin, Rule, ruled
from tsliced.config.ways import WAY_MEANING, WAY_PATTERN, Ways, parse_way
from tsliced.core.model import CoreLimits, GroupName

_NAME_RULE: Final = {
    "pattern": r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?",
    "meaning": "a host name: letters, digits, . and -",
}
_PATH_RULE: Final = {"pattern": r"/[^\0]*", "meaning": "an absolute path"}
_WAYS_RULE: Final = {"pattern": WAY_PATTERN, "meaning": WAY_MEANING, "may_be_one": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """``[daemon]``: this daemon and its place on the host."""

    #: The kernel limits the path of a Unix socket to 107 bytes.
    socket: str = ruled(
        "/run/tsliced/tsliced.sock",
        pattern=r"/[^\0]{0,106}",
        meaning="an absolute path of at most 107 bytes",
    )
    state_dir: str = ruled("/var/lib/tsliced", **_PATH_RULE)
    #: This host's name in groups and among peers; left out: what ``hostname`` says.
    host: str = ruled("", **_NAME_RULE)
    #: Part of every job's key; set it where one user's job ids of two clusters may meet.
    cluster: str = ruled(
        "", pattern=r"[A-Za-z0-9._-]{0,64}", meaning="at most 64 letters, digits and . _ -"
    )
    log_level: str = ruled("info", choices=("debug", "info", "warning", "error"))
    #: Left out: the system's libnvidia-ml.so.1 and libcuda.so.1.
    nvml_library: str | None = ruled(None, **_PATH_RULE)
    cuda_library: str | None = ruled(None, **_PATH_RULE)
    #: What moves a rank, unless its group or job has backends of its own: the first of these that
    #: finds something to move in it. Each is an entry of ``tsliced.backends``, or a class as
    #: ``module:Class``, or two, as ``torch+cuda``: the second moves what the first one leaves.
    backend: tuple[str, ...] = ruled(("endpoint+cuda", "torch+cuda", "cuda"), **_WAYS_RULE)
    loop: str = ruled("auto", choices=("auto", "uvloop", "asyncio"))
    #: After a request the daemon stays awake for so many microseconds, and answers a client that
    #: goes on at once in half the time. 0: never.
    linger_us: int = ruled(150, least=0, most=10_000)
    #: Serve only these devices: what CUDA_VISIBLE_DEVICES may hold. Left out: all.
    visible_devices: str | None = None
    #: Its members may do what root may do here.
    admin_group: str = ruled("tsliced", pattern=r"[^\s:]+", meaning="the name of a Unix group")
    #: Take an unknown key for a mistake; otherwise it is a warning.
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthoritySettings:
    """``[authority]``: who may do what, beyond the lists of the groups."""

    #: Whether a job may lease only devices that its cgroup lets it open. ``auto``: where that can
    #: be found out; ``require``: nothing may be leased where it cannot.
    device_cgroup: str = ruled("auto", choices=("auto", "off", "require"))
    #: ``own``: nobody but the user who runs the daemon, and root.
    clients: str = ruled("all", choices=("all", "own"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """``[groups.NAME]``: devices that are arbitrated as one, and who may lease them."""

    name: str
    #: ``HOST:0-3``, ``HOST:*``, ``0-1`` on this host, or UUIDs.
    devices: tuple[str, ...] = ()
    #: Names, uids, and Unix groups as ``@name``; left out: everybody.
    users: tuple[str, ...] = ()
    #: Accounts of Slurm: whose job runs on one of them may lease the group, besides `users`.
    accounts: tuple[str, ...] = ()
    #: Longest hold while others wait; left out: ``limits.max_hold_s``.
    max_hold_s: float | None = None
    #: A lease over several groups reserves them in this order; left out: after the others.
    order: int | None = ruled(None, least=0)
    #: What moves ranks on its devices; left out: ``daemon.backend``.
    backend: tuple[str, ...] = ruled((), **_WAYS_RULE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """``[jobs.NAME]``: what holds for jobs whose id fits a name with ``*`` and ``?``."""

    name: str
    #: What moves their ranks; left out: what their groups have.
    backend: tuple[str, ...] = ruled((), **_WAYS_RULE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The part of ``[limits]`` that the socket and the tables around the core keep."""

    #: 1 MiB is the protocol's own limit.
    max_frame_bytes: int = ruled(1 << 20, least=4096, most=1 << 20)
    #: A client that doesn't read what is sent to it is dropped beyond this.
    max_send_buffer_bytes: int = ruled(4 << 20, least=1 << 16)
    #: From connecting to a complete hello.
    handshake_timeout_s: float = 5.0
    max_clients: int = 4096
    max_clients_per_uid: int = 1024
    #: Connections beyond `max_clients` that root alone may have.
    reserved_clients: int = ruled(16, least=0)
    #: Sessions outlive their connections, for `grace_s` at least.
    max_sessions: int = 16_384
    max_sessions_per_uid: int = 4096
    #: Requests of one session that are not answered yet, ...
    max_pending_requests: int = 256
    #: ... and of all sessions of a user.
    max_pending_requests_per_uid: int = 16_384
    #: Of all clients together, what could not be sent and what came of frames that are not
    #: complete; beyond this those are dropped that have most.
    max_buffered_bytes: int = ruled(256 << 20, least=4 << 20)
    #: A connect with a time-out fails at once when this queue of the kernel is full.
    backlog: int = ruled(4096, most=65_535)
    #: A holder behind whom others have waited for so long is named, once for each job.
    yield_warning_s: float = 600.0
    #: Processes whose death is watched or whose job is remembered; one descriptor each.
    max_processes: int = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``[limits]``: every bound that is not about memory, scans or history."""

    core: CoreLimits = field(default_factory=CoreLimits)
    server: ServerLimits = field(default_factory=ServerLimits)


#: For the fields of `CoreLimits`, which is below configuration and carries no rules.
CORE_RULES: Final[Mapping[str, Rule]] = {
    "barrier_margin_s": Rule(least=0),
    "courtesy_turn_s": Rule(least=0),
    "ending_turn_s": Rule(least=0),
    "stranger_turn_s": Rule(least=0),
    "end_grace_s": Rule(least=0),
    "on_rank_lost": Rule(choices=("wait", "kill")),
    "grace_s": Rule(least=0),
    "max_passed_over": Rule(least=0),
    "retry_min_s": Rule(least=0.01),
    "block": Rule(least=16, most=1 << 24),
}


#: Fields of `CoreLimits` that are configured with what they are about, under ``[memory]``.
CORE_ELSEWHERE: Final = ("max_residue_bytes",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """``[memory]``: what is reserved and what stays free."""

    #: A snapshot needs the device memory that NVML sees, this share of it more, ...
    snapshot_margin_ratio: float = ruled(0.05, least=0, most=10)
    #: ... and this for each rank.
    snapshot_margin_bytes: int = ruled(512 << 20, least=0)
    #: Host memory that no snapshot may take.
    host_margin_bytes: int = ruled(1 << 30, least=0)
    #: Ray kills workers when less than this share of the memory of its host or container is free.
    ray_margin_ratio: float = ruled(0.05, least=0, most=1)
    #: Whether that share stays free where a raylet runs, on the host in any case too, or nowhere.
    ray_margin: str = ruled("auto", choices=("auto", "always", "never"))
    #: With more than 0, a job that fills a device whole can't come back to it.
    device_margin_bytes: int = ruled(0, least=0)
    #: Device readings older than this admit nobody.
    max_reading_age_s: float = 5.0
    #: A snapshot that leaves more than this on the devices counts as none: see `CoreLimits`.
    max_residue_bytes: int = ruled(64 << 20, least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSettings:
    """``[scan]``: looking at the devices."""

    #: Strangers on a device are promised to be seen within 2 s.
    interval_s: float = ruled(1.0, least=0.1, most=2)
    #: Processes of no known job on the devices of groups: ``report`` tells of them and leaves them
    #: alone, ``freeze`` takes them off like a job when somebody is let on.
    strangers: str = ruled("report", choices=("report", "freeze"))
    #: NVML blocks when a driver is in trouble: beyond this, the last reading has to do.
    nvml_timeout_s: float = ruled(2.0, least=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """``[history]``: events kept for reports."""

    #: In memory, for `tslicectl events`. A start reads the latest of them back.
    max_events: int = 5_000
    #: On disk; beyond it the oldest go.
    max_bytes: int = ruled(1 << 30, least=1 << 20)
    #: What is older goes too.
    max_age_s: float = ruled(30 * 86_400.0, least=60.0)
    #: Events are written in batches; the last one is lost when the machine loses power.
    flush_interval_s: float = 1.0
    #: Without it there are no events, no report, and hardly any metrics.
    record: bool = True
    #: How busy each device was is recorded so often, while it is busy.
    sample_s: float = ruled(10.0, least=1.0)
    #: What jobs tell of themselves, for each of them: so many events a second; what comes faster is
    #: put together.
    max_job_events_per_s: float = ruled(2.0, least=0.01)
    #: Names that one job may give to its own figures and queues, and phases, each.
    max_job_names: int = ruled(64, most=1024)
    #: Jobs whose own figures are kept, the latest ones.
    max_jobs: int = ruled(1024, most=65_536)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings:
    """``[metrics]``: figures for Prometheus."""

    #: ``ADDRESS:PORT``, ``[IPv6]:PORT``, or the path of a Unix socket. Left out: there are none.
    listen: str | None = ruled(
        None,
        pattern=r"/[^\0]{0,106}|[^\s:\[\]/]{1,253}:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}",
        meaning="ADDRESS:PORT, [IPv6]:PORT, or an absolute path of at most 107 bytes",
    )
    #: Connections at once; more are turned away.
    max_clients: int = ruled(8, most=1024)
    #: From connecting to having read the answer.
    timeout_s: float = ruled(10.0, least=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """``[slurm]``: what Slurm's own records are told of jobs."""

    #: What a job had of the devices is put into its ``AdminComment`` so often; 0: never.
    comment_s: float = ruled(300.0, least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """``[peers]``: links to the daemons of other hosts. None without `auth`."""

    #: How daemons prove to each other who they are. Left out: MUNGE where it is set up and `hosts`
    #: are listed; else there are no links, and nothing listens on TCP. ``none`` is for loopback, or
    #: with `insecure`.
    auth: str | None = ruled(None, choices=("tls", "psk", "munge", "none"))
    #: The hosts of the cluster: ``NAME``, ``NAME=ADDRESS`` or ``NAME=ADDRESS:PORT``. Hosts that
    #: share a group with this one need not be listed if their names are their addresses.
    hosts: tuple[str, ...] = ()
    #: ``ADDRESS`` or ``ADDRESS:PORT``; left out: as `hosts` has it for this host.
    listen: str | None = None
    port: int = ruled(7423, most=65_535)
    #: Let ``none`` reach beyond loopback.
    insecure: bool = False
    ca_file: str = ruled("/etc/tsliced/peers/ca.crt", **_PATH_RULE)
    cert_file: str = ruled("/etc/tsliced/peers/host.crt", **_PATH_RULE)
    key_file: str = ruled("/etc/tsliced/peers/host.key", **_PATH_RULE)
    #: The key that all hosts share, for ``psk``.
    secret_file: str = ruled("/etc/tsliced/peers/secret", **_PATH_RULE)
    #: Of munged; left out: where its library looks for it.
    munge_socket: str | None = ruled(None, **_PATH_RULE)
    heartbeat_s: float = ruled(1.0, least=0.05)
    #: Silence after which a host is suspected, ...
    suspect_s: float = 3.0
    #: ... and after which it is given up and its connection dropped.
    lost_s: float = 10.0
    connect_timeout_s: float = 5.0
    #: From a connection to both sides knowing each other.
    greeting_timeout_s: float = 5.0
    #: For an answer that waits for nothing but the other daemon.
    answer_timeout_s: float = 5.0
    #: Between two tries to connect, growing from the one to the other.
    reconnect_min_s: float = ruled(0.2, least=0.01)
    reconnect_max_s: float = 5.0
    max_peer_frame_bytes: int = ruled(1 << 20, least=1 << 16, most=1 << 20)
    #: A host that does not read what is sent to it loses its connection beyond this.
    max_unsent_bytes: int = ruled(8 << 20, least=1 << 16)
    #: Connections whose other side is not known yet.
    max_greetings: int = ruled(64, most=4096)
    #: Questions to one host that are not answered yet.
    max_asks: int = ruled(64, most=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration, checked. Two are equal if their values are."""

    daemon: DaemonSettings
    groups: tuple[GroupSettings, ...] = ()
    jobs: tuple[JobSettings, ...] = ()
    limits: Limits = field(default_factory=Limits)
    memory: MemorySettings = field(default_factory=MemorySettings)
    scan: ScanSettings = field(default_factory=ScanSettings)
    authority: AuthoritySettings = field(default_factory=AuthoritySettings)
    history: HistorySettings = field(default_factory=HistorySettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    peers: PeerSettings = field(default_factory=PeerSettings)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    backends: BackendSettings = field(default_factory=BackendSettings)
    #: Sentences to be logged; each begins with its file and line.
    warnings: tuple[str, ...] = field(default=(), compare=False)
    #: The files that were read, in order.
    files: tuple[str, ...] = field(default=(), compare=False)
    #: Where each value that is not a default was set, by its dotted key.
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)

    def ways(self) -> Ways:
        """Return which backends move whose ranks."""
        return Ways(
            default=tuple(map(parse_way, self.daemon.backend)),
            groups={
                GroupName(group.name): tuple(map(parse_way, group.backend))
                for group in self.groups
                if group.backend
            },
            jobs=tuple(
                (job.name, tuple(map(parse_way, job.backend))) for job in self.jobs if job.backend
            ),
        )

    def origin(self, *path: str) -> Origin:
        """Return where a value was set."""
        return self.origins.get(".".join(path), Origin("default"))
