"""The blocking client: leases on groups of devices, over the daemon's Unix socket.

Threads may share a client. It has no reader thread: see `connection.py` for who reads, and
`keeper.py` for the thread that reconnects. A forked child has nothing of its parent's leases: its
copy of a client starts afresh, and its copies of leases are LOST.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast, overload

from libtimeslice import accelerator, leaving
from libtimeslice.base import (
    SETTLE_LIMIT_S,
    TIMEOUT_SLACK_S,
    BaseClient,
    Names,
    NotNeeded,
    acquire_error,
    acquire_timeout,
    answer_of,
    cancelled,
    logger,
    progress_message,
    queue_message,
    tell_contended,
)
from libtimeslice.callbacks import Resume
from libtimeslice.connection import Connection
from libtimeslice.environment import Mode, Settings, check_name, settings_from
from libtimeslice.lease import Lease, LeaseContext, OffAccelerators, PlainLeases
from libtimeslice.line import Line
from libtimeslice.link import TICK_S, OutOfTime, remaining
from libtimeslice.nesting import enter, inside_of
from libtimeslice.protocol import Message
from libtimeslice.session import Arrive, Ask, Grant, LeaseState, Released
from libtimeslice.steps import Agree, PausableStep
from libtimeslice.usage import Function, OnAccelerators

__all__ = ["Connection", "TimeSlice", "connect"]


def connect(
    socket: str | os.PathLike[str] | None = None,
    job: str | None = None,
    *,
    mode: str | Mode | None = None,
    groups: Mapping[str, str | Iterable[str]] | None = None,
    ranks: int | None = None,
    connect_timeout_s: float = 10.0,
    reply_limit_s: float = 30.0,
    last_turn_s: float = 600.0,
    heartbeat_s: float | None = None,
    synchronize: bool = True,
) -> TimeSlice:
    """Returns a client of the daemon on this host. It connects when it is first needed.

    socket: path of the daemon's socket; else `TSLICE_SOCKET`, else `/run/tsliced/tsliced.sock` or,
        if that does not exist, the socket of a `tsliced --user`.
    job: the job's id; else `TSLICE_JOB_ID`, else the daemon finds it out from the process.
    mode: `require` (the default) raises where there is no daemon; `auto` runs unshared, with one
        warning, if no socket exists and none ever answered; `off` never shares. Else `TSLICE_MODE`.
    groups: names of roles and their groups, added to those of `TSLICE_GROUPS`.
    ranks: how many ranks make up a round of this job; else `WORLD_SIZE`.
    connect_timeout_s: longest time for a first connection.
    reply_limit_s: longest time for an answer to anything but an acquire.
    last_turn_s: longest time that exit waits for a last turn on the devices; 0 does not ask.
    heartbeat_s: promises a sign of life at least so often while a lease is held: `heartbeat()`, or
        anything else that is told or asked. Without one the lease is lost. Else
        `TSLICE_HEARTBEAT_S`, else none is promised.
    synchronize: finish this process's device work before a release, if it uses torch on CUDA.

    Raises ValueError for arguments or an environment that make no sense.
    """
    return TimeSlice(
        settings_from(
            socket=socket,
            job=job,
            mode=mode,
            groups=groups,
            ranks=ranks,
            connect_timeout_s=connect_timeout_s,
            reply_limit_s=reply_limit_s,
            last_turn_s=last_turn_s,
            heartbeat_s=heartbeat_s,
            synchronize=synchronize,
        )
    )


class TimeSlice(BaseClient):
    """A client of the daemon. Made by `connect`; pickles as its configuration."""

    _line: Line

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._start_afresh()
        leaving.watch(self)

    def _start_afresh(self) -> None:
        self._line = Line(self.settings, self.callbacks)
        self._session = self._line.session
        self._lock = self._line.lock
        #: Where threads wait for a grant that another thread of this client asked for.
        self._gate = threading.Condition(self._lock)
        self._at_gate = 0
        #: Latest last: what `release()` without a lease gives back.
        self._plain: PlainLeases[Lease] = PlainLeases()
        self._asks.clear()
        self._finalizer = weakref.finalize(self, leaving.settle, self._line)
        self._finalizer.atexit = False  # `leaving` has its own order

    def _start_afresh_in_child(self) -> None:
        """After a fork: everything of the parent's is dropped without a word to the daemon."""
        self._finalizer.detach()
        self._line.close_after_fork()
        self._drop_agent_after_fork()
        self._start_afresh()

    def __reduce__(self) -> tuple[object, ...]:
        return TimeSlice, (dataclasses.replace(self.settings, job=self.job),)

    def __enter__(self) -> TimeSlice:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- leases

    def lease(
        self,
        groups: Names = None,
        timeout: float | None = None,
        phase: str | None = None,
        ranks: int | None = None,
        arrive: Arrive = "all",
    ) -> LeaseContext:
        """Returns a context manager: exclusive use of groups for this job inside its `with`.

        groups: names of groups or roles; None: all groups that the job may use. Several are granted
            as one, all or nothing.
        timeout: longest wait, seconds; 0: only if it can be granted now; None: no limit.
        phase: a name for reports and prediction.
        ranks: how many ranks must ask before all of them are granted (a round).
        arrive: `all` waits for all ranks, `first` grants when the first asks.

        Asking for groups that this client holds already takes no time; the outermost lease frees
        them. Entering raises AcquireTimeout, Refused, UnknownGroup, NotPermitted, or
        DaemonUnreachable.
        """
        return LeaseContext(self, self._ask(groups, timeout, phase, ranks, arrive))

    def acquire(
        self,
        groups: Names = None,
        timeout: float | None = None,
        phase: str | None = None,
        ranks: int | None = None,
        arrive: Arrive = "all",
    ) -> Lease:
        """Like `lease`, for code that cannot use `with`. Must be followed by `release`."""
        lease = self._acquire(self._ask(groups, timeout, phase, ranks, arrive))
        self._plain.add(lease)
        return lease

    def release(self, lease: Lease | None = None) -> Released | None:
        """Releases a lease that `acquire` returned, without one the latest. See `Lease.release`."""
        return self._plain.take(lease).release()

    @overload
    def on_accelerators(self, function: Function, /) -> Function: ...

    @overload
    def on_accelerators(
        self,
        *groups: str,
        timeout: float | None = None,
        phase: str | None = None,
        ranks: int | None = None,
        arrive: Arrive = "all",
    ) -> OnAccelerators: ...

    def on_accelerators(
        self,
        *groups: str | Callable[..., object],
        timeout: float | None = None,
        phase: str | None = None,
        ranks: int | None = None,
        arrive: Arrive = "all",
    ) -> object:
        """A lease around each call of a function, plain or async; or around a `with` block.

        The arguments are those of `lease`. In an async function the wait does not block the loop.
        """
        function = groups[0] if len(groups) == 1 and callable(groups[0]) else None
        names = cast("tuple[str, ...]", groups) if groups and function is None else None
        around = OnAccelerators(self, self._ask(names, timeout, phase, ranks, arrive))
        return around if function is None else around(function)

    def off_accelerators(self, *, timeout: float | None = None) -> OffAccelerators:
        """Lets others onto everything that this client holds. See `Lease.off_accelerators`."""
        with self._lock:
            return OffAccelerators(self, tuple(self._session.grants.values()), timeout)

    def pausable_step(
        self, *, agree: Agree | None = None, finish: Callable[[], object] | None = None
    ) -> PausableStep:
        """Returns a `with` block for each step of a loop whose ranks wait for one another.

        Where the daemon wants the devices for others, all ranks stop behind the same step, and
        their device work is done before it freezes them. Without this, or `on_pause` functions
        that do the same, ranks that run collectives cannot be moved in the middle of their work.
        Every rank of the job must make one and enter it equally often, with leases taken outside.

        agree: makes one number of all ranks' numbers, the largest; see `steps.Agree`. By default
            through torch.distributed, where that is initialized; else each rank stands for itself.
        finish: waits for the device work of this process; by default through torch on CUDA.
        """
        step = PausableStep(agree=agree, finish=finish)
        self.on_pause(step.pause)
        # What a job's own functions bring back must be there before the first step uses it.
        self._register(Resume, step.resume, last=True)
        return step

    # -- what a job tells

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names a phase that needs no devices, such as a reward function, for reports."""
        check_name("a phase", name)
        self._tell({"t": "phase", "name": name, "begin": True})
        try:
            yield
        finally:
            self._tell({"t": "phase", "name": name, "begin": False})

    def progress(self, **fields: object) -> None:
        """Tells figures of the job for reports: numbers, strings or booleans, `step` among them.

        Numbers of numpy and one-element tensors are taken too. Lost if the daemon is gone just now.
        """
        self._tell(progress_message(fields))

    def queue(self, name: str, *, depth: float, target: float | None = None) -> None:
        """Tells the backlog between two stages of the job, in its own items."""
        self._tell(queue_message(name, depth, target))

    def heartbeat(self) -> None:
        """Shows that this job goes on, if it promised to (`heartbeat_s`). Call it in its loop.

        It costs next to nothing: only what is needed for the promise is sent.
        """
        if self._heartbeat_is_due():
            self._tell({"t": "heartbeat"})

    def register(self) -> tuple[str, ...]:
        """Makes this process known as a rank of its job, and starts its agent.

        Optional: ranks are found anyway. Returns the groups on which the daemon sees it.
        """
        if not self._join():
            return ()
        answer = answer_of(self._line.call({"t": "register", "pid": None}))
        self._start_agent(registered=True)
        return tuple(answer.get("groups") or ())

    def status(self) -> Message:
        """The daemon's view of all groups: `{"groups": [...], ...}`."""
        if not self._join():
            return {"groups": []}
        status: Message = answer_of(self._line.call({"t": "status"})).get("status", {})
        return status

    def close(self) -> None:
        """Ends the session and releases what it holds. May be repeated.

        It waits for device work of this process that is under way. If others have the devices, and
        this process's state is parked, it then waits for a last turn (`last_turn_s` at most), which
        lasts until the process ends: what comes after this call may use the devices.
        """
        if self._closed:
            return
        self.close_now()
        leaving.come_back(self._line)

    def close_now(self) -> None:
        """Closes without waiting for a turn."""
        if self._closed:
            return
        self._closed = True
        if self._agent is not None:
            self._agent.stop()
        with self._lock:
            held = list(self._session.grants.values())
        try:
            for grant in held:
                self._finish_device_work(grant)
        finally:
            for grant in held:
                self._session.release(grant)
            self._finalizer()

    def take_last_turn(self, ask: Ask | None, *, leaving: bool) -> bool:
        """Has this process's state brought back, and keeps it there until the process is gone.

        Returns False if that is not needed. For `leaving`, on a client of its own. `ask`: what the
        job leased last, for a daemon that knows no last turns.
        """
        limit_s = self.settings.last_turn_s
        self._line.connected(time.monotonic() + self.settings.connect_timeout_s)
        if "last_turn" not in self._session.caps:
            if not leaving or ask is None:
                return False
            # Alone, not as a round: the other ranks may be gone, or have much to do.
            self._acquire(dataclasses.replace(ask, ranks=None, timeout_s=limit_s))
            return True
        try:
            self._obtain(self, Ask(leaving=leaving, timeout_s=limit_s), time.monotonic() + limit_s)
        except NotNeeded:
            return False
        return True

    # -- acquiring

    def _acquire(
        self,
        ask: Ask,
        context: LeaseContext | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Lease:
        """Returns a granted lease. Whatever is raised in here, nothing stays behind."""
        lease = Lease(self)
        if context is not None:
            context.lease = lease
        deadline = None if ask.timeout_s is None else time.monotonic() + ask.timeout_s
        try:
            if not self._nest(lease, ask, deadline, stop):
                lease._stand_on(self._obtain(lease, ask, deadline, stop))
            enter(lease._grants)
            return lease
        except BaseException:
            lease.release()
            raise
        finally:
            with self._lock:
                self._session.asking.pop(lease, None)
                if self._at_gate:
                    self._gate.notify_all()

    def _nest(
        self, lease: Lease, ask: Ask, deadline: float | None, stop: Callable[[], bool] | None
    ) -> bool:
        """Stands the lease on grants that this client has, or will have any moment.

        Returns False if there are none: then it is noted that the lease asks for them.
        """
        with self._lock:
            while True:
                found = self._session.covering(ask.groups)
                if found:
                    lease._nest_in(found)
                    return True
                if not self._session.is_asking(ask.groups):
                    self._session.asking[lease] = ask.groups
                    return False
                if stop is not None and stop():
                    raise cancelled(ask)
                left_s = remaining(deadline, most_s=TICK_S)
                if left_s == 0.0:
                    raise acquire_timeout(ask)
                self._at_gate += 1
                try:
                    self._gate.wait(left_s)
                finally:
                    self._at_gate -= 1

    def _obtain(
        self,
        holder: object,
        ask: Ask,
        deadline: float | None,
        stop: Callable[[], bool] | None = None,
    ) -> Grant:
        """Gets a fresh grant from the daemon; whatever is raised, none is left behind."""
        session = self._session
        if not self._join():
            with self._lock:
                return session.pretend(ask, holder)
        if (news := session.watchdog_news()) is not None:
            self._line.tell(news)
        message = ask.message(next(session.ids), inside_of(session.grants))
        if deadline is not None:
            message["timeout_s"] = max(0.0, deadline - time.monotonic())
        try:
            limit = None if deadline is None else deadline + TIMEOUT_SLACK_S
            answer = self._line.exchange(message, limit, stop=stop)
            if "lease" in answer:
                with self._lock:
                    grant = session.granted(ask, message["id"], answer, holder)
                if grant.ack_s is not None:
                    self._line.acknowledge(grant.lease)
                tell_contended(self.callbacks, grant)
                return grant
        except OutOfTime:
            self._withdraw(message, again=False)
            raise acquire_timeout(ask) from None
        except BaseException:
            self._withdraw(message, again=True)
            raise
        if "err" in answer:
            raise acquire_error(answer, ask)
        if answer:
            raise NotNeeded
        self._withdraw(message, again=False)
        raise cancelled(ask)

    def _withdraw(self, acquire: Message, *, again: bool) -> None:
        """Makes sure that an acquire leaves nothing behind, whether or not it was granted."""
        with self._lock:
            granted = [
                grant
                for grant in self._session.grants.values()
                if grant.request_id == acquire["id"]
            ]
        if granted:
            self._free(granted[0])
        elif self._session.session is not None:
            self._line.withdraw(acquire, again=again, limit_s=SETTLE_LIMIT_S)

    def _take_again(self, grant: Grant, timeout: float | None) -> None:
        """Gets a released grant back for the leases that still stand on it."""
        if not grant.holders or grant.state is not LeaseState.RELEASED:
            return
        ask = dataclasses.replace(grant.ask, timeout_s=timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            fresh = self._obtain(next(iter(grant.holders)), ask, deadline)
        except BaseException as error:
            grant.state, grant.reason = LeaseState.LOST, f"it could not be taken back: {error}"
            raise
        with self._lock:
            self._session.taken_again(grant, fresh)

    # -- releasing

    def _grants_of(self, lease: Lease) -> list[Grant]:
        """What a lease stands on, or was given for it when an interrupt came before it did."""
        self._session.asking.pop(lease, None)  # the same interrupt may have come before this, too
        given = [g for g in list(self._session.grants.values()) if lease in g.holders]
        return [*lease._grants, *(grant for grant in given if grant not in lease._grants)]

    def _release(self, lease: Lease) -> Released | None:
        answer = None
        for grant in reversed(self._grants_of(lease)):
            with self._lock:
                grant.holders.discard(lease)
            if not grant.holders:
                answer = self._free(grant)
        return answer

    def _release_in_haste(self, lease: Lease) -> None:
        """Finishes a release that was interrupted anywhere, without waiting for the answer."""
        for grant in self._grants_of(lease):
            with self._lock:
                grant.holders.discard(lease)
                if not grant.holders:
                    self._session.release(grant)
                open_releases = self._session.open_releases(grant.lease)
            for message in open_releases:
                self._line.send_or_drop(message)

    def _free(self, grant: Grant) -> Released | None:
        try:
            self._finish_device_work(grant)
        finally:
            answer = self._give_back(grant)
        return answer

    def _finish_device_work(self, grant: Grant) -> None:
        if self.settings.synchronize and grant.live and accelerator.synchronize():
            self._take_notices()
            if grant.waiters:
                accelerator.empty_cache()

    def _give_back(self, grant: Grant) -> Released | None:
        """Releases a grant. The session keeps repeating it on reconnects until it is answered."""
        with self._lock:
            message = self._session.release(grant)
        answer = None if message is None else self._line.exchange_now(message)
        if answer is None:
            return None
        if "err" in answer:
            logger.warning("lease %s had ended before: %s", grant.lease, answer["err"])
            return None
        return Released(int(answer.get("waiters", 0)), bool(answer.get("deferred", True)))

    # -- small things

    def _tell(self, message: Message) -> None:
        if self._join():
            self._line.tell(message)

    def _take_notices(self) -> None:
        self._line.drain()

    def _wake(self) -> None:
        """Makes threads that wait with a `stop` look at it."""
        with self._lock:
            self._gate.notify_all()
        self._line.wake()
