"""Leases as the caller of the blocking client sees them."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from libtimeslice.errors import LeaseLost
from libtimeslice.session import Ask, Grant, LeaseState, Released

if TYPE_CHECKING:
    from libtimeslice.client import TimeSlice


class LeaseView:
    """What a lease tells, in either client. Several nested leases may stand on one grant."""

    __slots__ = ("_done", "_grants", "restored", "switch_s", "waited_s")

    def __init__(self) -> None:
        #: Empty until it is granted, which is before the caller sees it.
        self._grants: tuple[Grant, ...] = ()
        self._done = False
        #: Seconds from the request to the grant, by the daemon's clock; 0 for a nested lease.
        self.waited_s = 0.0
        #: Whether device state was brought back for it; False: it was still there, at no cost.
        self.restored = False
        #: Seconds of `waited_s` that went into moving device state.
        self.switch_s = 0.0

    def _stand_on(self, grant: Grant) -> None:
        """Becomes the first lease on a fresh grant."""
        self._grants = (grant,)
        self.waited_s, self.restored = grant.waited_s, grant.restored
        self.switch_s = grant.switch_s

    def _nest_in(self, grants: tuple[Grant, ...]) -> None:
        """Becomes one more lease on grants that are held already."""
        self._grants = grants
        for grant in grants:
            grant.holders.add(self)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.state.value} groups={self.groups} token={self.tokens}>"
        )

    @property
    def id(self) -> str:
        """The daemon's name for the lease, as in its log and events."""
        return "+".join(grant.lease for grant in self._grants)

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that are held."""
        return tuple(group for grant in self._grants for group in grant.groups)

    @property
    def tokens(self) -> dict[str, int]:
        """The fencing token of each group: strictly rising, new with each grant of the group."""
        return {group: token for grant in self._grants for group, token in grant.tokens.items()}

    @property
    def token(self) -> int:
        """The fencing token of the only group. Raises ValueError if the lease has several."""
        tokens = self.tokens
        if len(tokens) > 1:
            raise ValueError(f"the lease has {len(tokens)} groups; ask for `tokens`")
        return next(iter(tokens.values()), 0)

    @property
    def state(self) -> LeaseState:
        """HELD, UNCERTAIN (the daemon is gone, within grace) or LOST; RELEASED after its end."""
        states = {grant.state for grant in self._grants}
        if LeaseState.LOST in states:
            return LeaseState.LOST
        if self._done or LeaseState.RELEASED in states:
            return LeaseState.RELEASED
        return LeaseState.UNCERTAIN if LeaseState.UNCERTAIN in states else LeaseState.HELD

    @property
    def reason(self) -> str | None:
        """Why the lease was lost; None if it was not."""
        return next((grant.reason for grant in self._grants if grant.reason is not None), None)

    def check(self) -> None:
        """Raises LeaseLost if the lease is lost, else does nothing.

        For the moment before something that only the holder may do. An uncertain lease passes: the
        daemon grants nothing to others before the session's grace is over.
        """
        if self.state is LeaseState.LOST:
            raise LeaseLost(f"the lease was lost: {self.reason}", lease=self.id, groups=self.groups)

    @property
    def _waited_for(self) -> bool:
        return any(grant.waiters > 0 for grant in self._grants)


_View = TypeVar("_View", bound=LeaseView)


class PlainLeases(Generic[_View]):
    """The leases that a client's `acquire` returned, the latest last, until they are given back.

    Threads may use it at once: what they do to the list is done in one step each.
    """

    __slots__ = ("_leases",)

    def __init__(self) -> None:
        self._leases: list[_View] = []

    def add(self, lease: _View) -> None:
        """Takes a lease in."""
        self._forget_ended()
        self._leases.append(lease)

    def take(self, lease: _View | None) -> _View:
        """Takes a lease out to be given back; None: the latest. Raises ValueError without one."""
        self._forget_ended()
        if lease is None:
            try:
                return self._leases.pop()
            except IndexError:
                text = "nothing was acquired with acquire(), or all of it was released"
                raise ValueError(text) from None
        with contextlib.suppress(ValueError):  # a lease of lease(), or released by itself
            self._leases.remove(lease)
        return lease

    def _forget_ended(self) -> None:
        """Drops leases that were given back by themselves."""
        for lease in self._leases.copy():
            if lease._done or lease.state is LeaseState.RELEASED:
                with contextlib.suppress(ValueError):
                    self._leases.remove(lease)


class Lease(LeaseView):
    """A right to use the devices of its groups, until `release()` or the end of its `with`."""

    __slots__ = ("_client",)

    def __init__(self, client: TimeSlice) -> None:
        super().__init__()
        self._client = client

    @property
    def contended(self) -> bool:
        """Whether somebody waits for it right now. Cheap enough to ask between two steps."""
        self._client._take_notices()
        return self._waited_for

    def release(self) -> Released | None:
        """Gives the lease back; repeating it does nothing.

        Device work of this process is finished first. Returns the daemon's answer, or None where
        it need not or cannot be asked: the lease is nested in another, was lost, or the daemon is
        gone for the moment. A daemon that is gone is not waited for, but told when it is back.
        """
        if self._done:
            return None
        try:
            return self._client._release(self)
        except BaseException:
            # Whatever came in between, an interrupt or a fault on a device: it must get out.
            self._client._release_in_haste(self)
            raise
        finally:
            self._done = True

    def off_accelerators(self, *, timeout: float | None = None) -> OffAccelerators:
        """Lets others onto the devices inside a `with`, and takes them back at its end.

        For host-only work in the middle of a lease, such as reward functions. Everything that this
        client nests in the lease goes with it; tokens are new afterwards. `timeout` limits the wait
        to get back, seconds; if that fails the `with` raises, and the lease is lost.
        """
        return OffAccelerators(self._client, self._grants, timeout)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class LeaseContext:
    """`with ts.lease(...) as lease`: acquires on entry and releases on exit. For one use."""

    __slots__ = ("_ask", "_client", "lease")

    def __init__(self, client: TimeSlice, ask: Ask) -> None:
        self._client = client
        self._ask = ask
        #: Set from within the acquire, so that an interrupt cannot come between grant and body.
        self.lease: Lease | None = None

    def __enter__(self) -> Lease:
        try:
            return self._client._acquire(self._ask, self)
        except BaseException:
            if self.lease is not None:
                self.lease.release()
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            if self.lease is not None:
                self.lease.release()
        except BaseException:
            # An interrupt may have come before the release began; if it began, this does nothing.
            if self.lease is not None:
                self.lease.release()
            raise


class OffAccelerators:
    """The reverse of a lease: gives grants back on entry and takes them again on exit."""

    __slots__ = ("_client", "_given", "_grants", "_timeout")

    def __init__(self, client: TimeSlice, grants: tuple[Grant, ...], timeout: float | None) -> None:
        self._client = client
        self._grants = grants
        self._timeout = timeout
        self._given: list[Grant] = []

    def __enter__(self) -> None:
        for grant in reversed(self._grants):
            if grant.live:
                self._given.insert(0, grant)
                self._client._free(grant)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        given, self._given = self._given, []
        if kind is not None and not issubclass(kind, Exception):
            # The program is being stopped: it shall not queue up for a turn to do that in.
            return
        for grant in given:
            self._client._take_again(grant, self._timeout)
