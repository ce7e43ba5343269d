"""What the blocking and the asyncio client have in common: settings, names and checks, no I/O."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterable

from libtimeslice import __version__
from libtimeslice.agent import Agent, Overheard
from libtimeslice.callbacks import (
    Callback,
    Callbacks,
    Contended,
    HoldWarning,
    Lost,
    Notice,
    Pause,
    Resume,
    Waiting,
)
from libtimeslice.environment import Mode, Settings, check_name
from libtimeslice.errors import (
    AcquireTimeout,
    Cancelled,
    DaemonUnreachable,
    TimeSliceError,
    error_from,
)
from libtimeslice.fields import MAX_FIELD_TEXT, MAX_FIELDS, MAX_TIMEOUT_S
from libtimeslice.parking import Parking
from libtimeslice.protocol import Message
from libtimeslice.session import Arrive, Ask, Grant, Session
from libtimeslice.torch import ManagedTensors

logger = logging.getLogger("libtimeslice")

#: How much longer than the daemon this side waits for an acquire with a time-out, seconds: the
#: daemon's own answer says more, and no grant can cross it.
TIMEOUT_SLACK_S = 1.0
#: How long a caller that gave up waits to hear that nothing is left behind, seconds.
SETTLE_LIMIT_S = 2.0
#: Losses of the connection in a row, without an answer in between, before a request gives up.
MAX_LOSSES = 20

#: Of the promised time, what may pass before the next call of `heartbeat` sends one.
_BEAT_SHARE = 0.25
#: Different asks that a client keeps.
_MAX_ASKS = 256

Names = str | Iterable[str] | None
Field = bool | int | float | str


class NotNeeded(Exception):  # noqa: N818 - an answer
    """The daemon says that this process needs no last turn."""


class BaseClient:
    """Configuration, checks and callbacks of a client. See `client.TimeSlice`."""

    _session: Session
    _line: Overheard

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.callbacks = Callbacks()
        self._parking = Parking()
        self._agent: Agent | None = None
        self._closed = False
        self._warned = False
        self._asks: dict[object, Ask] = {}
        #: Monotonic instant of the latest heartbeat.
        self._beat_at = 0.0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} socket={self.settings.path()!r} job={self.job!r}>"

    @property
    def job(self) -> str | None:
        """The job's id: as configured, or as the daemon found out, or None as long as unknown."""
        return self.settings.job or self._session.job

    @property
    def shared(self) -> bool:
        """Whether leases are the daemon's. False: mode `off`, or `auto` and there is no daemon."""
        if self.settings.mode is Mode.REQUIRE:
            return True
        if self.settings.mode is Mode.OFF:
            return False
        return self._session.answered or os.path.exists(self.settings.path())

    @property
    def holding(self) -> bool:
        """Whether this client has any live lease."""
        return bool(self._session.grants)

    def _drop_agent_after_fork(self) -> None:
        if self._agent is not None:
            self._agent.abandon_after_fork()
            self._agent = None
        self.callbacks.start_afresh_in_child()
        self._parking = Parking()

    # -- callbacks

    def on_contended(self, function: Callback) -> Callback:
        """Registers a function of a `Contended`: others wait for what this job holds, or no longer.

        Callbacks run in a small thread of this process; it starts with the first of them. They work
        as decorators too.
        """
        return self._register(Contended, function)

    def on_lost(self, function: Callback) -> Callback:
        """Registers a function of a `Lost`: a lease ended before its release."""
        return self._register(Lost, function)

    def on_hold_warning(self, function: Callback) -> Callback:
        """Registers a function of a `HoldWarning`: a lease may be taken back soon, or is held long.

        A job that releases in time and acquires again goes on where it was, behind those who wait.
        """
        return self._register(HoldWarning, function)

    def on_waiting(self, function: Callback) -> Callback:
        """Registers a function of a `Waiting`: how far the move has come that a lease waits for."""
        return self._register(Waiting, function)

    def on_pause(self, function: Callback) -> Callback:
        """Registers a function of a `Pause`, run before this rank's device work is frozen.

        It must return within the pause's `timeout_s`. What it raises stops the move. Of ranks that
        wait for one another all must stop behind the same step: see `TimeSlice.pausable_step`.
        """
        return self._register(Pause, function)

    def on_resume(self, function: Callback) -> Callback:
        """Registers a function of a `Resume`, run when this rank's device work runs again."""
        return self._register(Resume, function)

    def _register(self, kind: type[Notice], function: Callback, *, last: bool = False) -> Callback:
        self.callbacks.add(kind, function, last=last)
        if self.shared:
            self._start_agent()
        return function

    def _start_agent(self, *, registered: bool = False) -> None:
        if self._closed:
            return
        if self._agent is None:
            self._agent = Agent(self.settings, self.callbacks, self._line, self._parking)
        self._agent.job = self.job
        self._agent.registered = self._agent.registered or registered
        self._agent.start()

    # -- tensors

    @property
    def torch(self) -> ManagedTensors:
        """The tensors that this process lets the daemon move without the driver's help."""
        return ManagedTensors(self._parking, self.callbacks, self._announce_tensors)

    def _announce_tensors(self) -> None:
        """Waits until the daemon knows this process: the first eviction may be about to come."""
        if not self.shared:
            return
        self._start_agent(registered=True)
        limit_s = self.settings.connect_timeout_s
        if self._agent is not None and not self._agent.wait_until_known(limit_s):
            logger.warning("the daemon does not know of managed tensors after %g s", limit_s)

    # -- signs of life

    def _heartbeat_is_due(self) -> bool:
        promised_s = self.settings.heartbeat_s
        now = time.monotonic()
        if promised_s is None or now - self._beat_at < promised_s * _BEAT_SHARE:
            return False
        self._beat_at = now
        return True

    # -- what is asked

    def _ask(
        self,
        groups: Names,
        timeout: float | None,
        phase: str | None,
        ranks: int | None,
        arrive: Arrive,
    ) -> Ask:
        """Checks and resolves what a caller asks for. Phases repeat, so the result is kept."""
        if not (groups is None or isinstance(groups, str)):
            groups = tuple(groups)
        key = (groups, timeout, phase, ranks, arrive)
        ask = self._asks.get(key)
        if ask is None:
            if len(self._asks) >= _MAX_ASKS:
                self._asks.clear()
            ask = self._asks[key] = self._fresh_ask(groups, timeout, phase, ranks, arrive)
        return ask

    def _fresh_ask(
        self,
        groups: str | tuple[str, ...] | None,
        timeout: float | None,
        phase: str | None,
        ranks: int | None,
        arrive: Arrive,
    ) -> Ask:
        if arrive not in ("all", "first"):
            raise ValueError(f"arrive must be 'all' or 'first', not {arrive!r}")
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be at least 0 seconds, or None, not {timeout!r}")
        return Ask(
            groups=self.settings.groups_of(groups),
            phase=None if phase is None else check_name("a phase", phase),
            ranks=self.settings.round_of(ranks),
            arrive=arrive,
            timeout_s=None if timeout is None or timeout > MAX_TIMEOUT_S else float(timeout),
        )

    def _warn_unshared(self) -> None:
        """Says once that a client in mode `auto` runs unshared."""
        if self.settings.mode is Mode.AUTO and not self._warned:
            self._warned = True
            warnings.warn(
                f"no tsliced at {self.settings.path()}: this job does not share its devices "
                "(TSLICE_MODE=auto)",
                RuntimeWarning,
                stacklevel=4,
            )

    def _join(self) -> bool:
        """Whether to talk to a daemon at all; warns once if not for lack of one."""
        if not self.shared:
            self._warn_unshared()
            return False
        if self._agent is None and self.callbacks.any:
            self._start_agent()
        return True


def tell_lost(callbacks: Callbacks, lost: Iterable[Grant]) -> None:
    """Logs the loss of leases and has their callbacks run."""
    for grant in lost:
        notice = Lost(lease=grant.lease, reason=grant.reason or "no reason given")
        logger.warning("lease %s of %s was lost: %s", grant.lease, grant.groups, notice.reason)
        callbacks.post(notice)


def tell_notice(callbacks: Callbacks, message: Message) -> None:
    """Passes on what the daemon says about leases beyond what the session's books need."""
    kind = message.get("t")
    if kind == "contended":
        callbacks.post(
            Contended(
                lease=str(message.get("lease")),
                groups=tuple(message.get("groups") or ()),
                waiters=int(message.get("waiters") or 0),
            )
        )
    elif kind == "hold_warning":
        warning = HoldWarning(
            lease=str(message.get("lease")),
            groups=tuple(message.get("groups") or ()),
            ends_in_s=float(message.get("ends_in_s") or 0.0),
            waiters=int(message.get("waiters") or 0),
        )
        logger.warning(
            "lease %s of %s was held for long: in %.0f s it is taken back as soon as others wait",
            warning.lease,
            warning.groups,
            warning.ends_in_s,
        )
        callbacks.post(warning)
    elif kind == "moving":
        callbacks.post(_waiting(message))
    elif kind == "warning":
        logger.warning("the daemon warns: %s", message.get("message"))
    elif kind in ("stalled", "rank_lost"):
        # Nothing that a program could do about it, and what a person will look for.
        logger.warning("%s: lease %s: %s", kind, message.get("lease"), message.get("reason"))


def _waiting(message: Message) -> Waiting:
    job = message.get("job") or {}
    return Waiting(
        lease=str(message.get("lease")),
        job=str(job.get("id")),
        step=str(message.get("step")),
        done_bytes=int(message.get("done_bytes") or 0),
        total_bytes=int(message.get("total_bytes") or 0),
        bytes_per_s=message.get("bytes_per_s"),
        left_s=message.get("left_s"),
    )


def tell_contended(callbacks: Callbacks, grant: Grant) -> None:
    """Has callbacks run for a lease for which others waited from the beginning."""
    if grant.waiters > 0:
        callbacks.post(Contended(lease=grant.lease, groups=grant.groups, waiters=grant.waiters))


def client_hello(settings: Settings, session: Session) -> Message:
    """The hello of a client, in whichever session it is by now."""
    return session.hello(
        client=f"libtimeslice/{__version__}",
        role="client",
        job=settings.job or session.job,
        caps=(),
        ranks=settings.round_of(None),
        heartbeat_s=settings.heartbeat_s,
    )


def answer_of(answer: Message) -> Message:
    """Returns an answer that is good, or raises the error in it."""
    if "err" in answer:
        raise error_from(answer["err"])
    return answer


def acquire_error(answer: Message, ask: Ask) -> TimeSliceError:
    """The exception for an acquire that was refused, with what was asked for."""
    error = error_from(answer["err"])
    error.facts.setdefault("groups", ask.groups)
    return error


def acquire_timeout(ask: Ask) -> AcquireTimeout:
    """The exception for an acquire that this side gave up."""
    named = "all groups of the job" if ask.groups is None else ", ".join(ask.groups)
    return AcquireTimeout(
        f"no lease of {named} within {ask.timeout_s:g} s",
        groups=ask.groups,
        timeout_s=ask.timeout_s,
    )


def cancelled(ask: Ask) -> Cancelled:
    """The exception for an acquire that its own caller cancelled."""
    return Cancelled("the acquire was cancelled by its caller", groups=ask.groups)


def no_answer(what: str, limit_s: float) -> DaemonUnreachable:
    """The exception for a daemon that is connected and silent."""
    return DaemonUnreachable(f"the daemon did not answer {what!r} within {limit_s:g} s")


def progress_message(fields: dict[str, object]) -> Message:
    """The notice for `progress`. Raises ValueError or TypeError for what the wire cannot carry."""
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"at most {MAX_FIELDS} fields can be told at a time, not {len(fields)}")
    return {
        "t": "progress",
        "fields": {check_name("a field", name): _plain(name, fields[name]) for name in fields},
    }


def queue_message(name: str, depth: float, target: float | None) -> Message:
    """The notice for `queue`. Raises ValueError for what makes no sense."""
    for what, value in (("depth", depth), ("target", target)):
        if value is not None and not value >= 0:
            raise ValueError(f"{what} must be a number of at least 0, not {value!r}")
    return {
        "t": "queue",
        "name": check_name("a queue", name),
        "depth": _plain("depth", depth),
        "target": None if target is None else _plain("target", target),
    }


def _plain(name: str, value: object) -> Field:
    """A value that msgpack knows. Numbers of numpy and torch come out of their boxes."""
    item = getattr(value, "item", None)
    if not isinstance(value, (bool, int, float, str)) and callable(item):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # more than one element
            value = item()
    if isinstance(value, str):
        if len(value) > MAX_FIELD_TEXT:
            raise ValueError(f"{name} has {len(value)} characters; {MAX_FIELD_TEXT} is the limit")
        return str(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else float(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{name} must be a number, a string or a bool, not {type(value).__name__}")
