"""What operators, and users for their jobs, have done: retry, kill, qualify, drain and others.

Who may do what is decided here, by the peer's uid; what becomes of it, by the core. The answer to
an order says what stood before it, and goes out when the core has had it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from libtimeslice.protocol import (
    DrainOrder,
    HostDeath,
    JobOrder,
    Message,
    ShowQuery,
    error_reply,
    reply,
)
from tsliced.core.coordinator import Place
from tsliced.core.events import (
    DrainOrdered,
    Event,
    FaultCleared,
    HostDied,
    KillRequested,
    QualifyRequested,
    RetryRequested,
)
from tsliced.core.model import Drain, GroupName, HostName, JobKey
from tsliced.core.sessions import LeaseState
from tsliced.driver import Driver
from tsliced.net.authority import Authority
from tsliced.net.connection import Peer
from tsliced.net.enrolment import Refusal
from tsliced.net.replies import job_message
from tsliced.observe.details import Details, NotFound

Answer = Callable[[Message], object]


class Operations:
    """Checks and carries out operators' requests. All methods belong to the event loop."""

    def __init__(self, driver: Driver, authority: Authority, details: Details) -> None:
        self._driver = driver
        self._authority = authority
        self._details = details

    def show(self, peer: Peer, request: ShowQuery) -> Message:
        """Return all that is known of one thing."""
        try:
            if request.kind == "job":
                return reply(request.id, shown=self._details.job(self._job(peer, request.name)))
            return reply(request.id, shown=self._details.show(request.kind, request.name))
        except NotFound as exc:
            return error_reply(request.id, exc.code, str(exc))

    def on_job(self, peer: Peer, request: JobOrder, answer: Answer) -> None:
        """Do something about a job, and answer when it has begun."""
        try:
            job = self._job(peer, request.job)
        except NotFound as exc:
            answer(error_reply(request.id, exc.code, str(exc)))
            return
        if not self._authority.may_act_for(peer.uid, job.uid):
            text = f"job {job} is of uid {job.uid}; {_name(peer)} may {request.verb} own jobs only"
            answer(error_reply(request.id, "not_permitted", text))
            return
        if request.verb == "qualify" and (objection := self._not_to_be_qualified(job)) is not None:
            answer(error_reply(request.id, "refused", f"{job} {objection}"))
            return
        event: Event
        match request.verb:
            case "retry":
                event = RetryRequested(job=job)
            case "clear":
                event = FaultCleared(job=job)
            case "qualify":
                self._qualify(job, request, answer)
                return
            case "kill":
                event = KillRequested(job=job, by=_name(peer), grace_s=request.grace_s)
            case _:
                assert_never(request.verb)
        machine = self._driver.machine
        facts: Message = {"job": job_message(job), "stood": self._details.standstills(job)}
        if request.verb == "kill":
            facts["pids"] = [process.pid for process in machine.ending.processes_of(job)]
        else:
            self._driver.note(request.verb, "info", job=str(job), by=_name(peer))
        self._driver.post(event)
        self._driver.after_turn(lambda: answer(reply(request.id, **facts)))

    def _qualify(self, job: JobKey, request: JobOrder, answer: Answer) -> None:
        """Look at a job's processes, then have it leave its devices and come back."""
        around, driver = self._driver.around, self._driver

        async def begin() -> None:
            if around.qualifying is not None:
                await around.qualifying.look_at(job)
            driver.post(QualifyRequested(job=job))
            driver.after_turn(tell)

        def tell() -> None:
            tenancies = driver.machine.tenancies.tenancies_of(job)
            if not any(t.coordinator.qualifies and not t.coordinator.stable for t in tenancies):
                text = f"{job} has asked for its devices meanwhile: try it when it is idle"
                answer(error_reply(request.id, "refused", text))
                return
            facts = {"job": job_message(job), "stood": self._details.standstills(job)}
            answer(reply(request.id, **facts))

        around.tasks.create_task(begin(), name="qualify")

    def _not_to_be_qualified(self, job: JobKey) -> str | None:
        """Say why a job cannot be made to leave its devices and to come back just now, if so."""
        machine = self._driver.machine
        tenancies = [t for t in machine.tenancies.tenancies_of(job) if t.has_ranks]
        if not tenancies:
            return "has no state on devices, as far as is known"
        if not all(tenancy.led_here for tenancy in tenancies):
            return "is moved by another host: ask there"
        leases = (s.leases.values() for s in machine.leasing.sessions_of(job))
        if any(lease.state is LeaseState.HELD for of_session in leases for lease in of_session):
            return "holds a lease: try it when it has given that back"
        for tenancy in tenancies:
            coordinator = tenancy.coordinator
            if (stop := machine.leasing.stop_of(tenancy)) is not None:
                return f"stands still: {stop[0]}"
            if not coordinator.stable:
                return f"is being moved ({coordinator.place.value})"
            if coordinator.place is not Place.ON:
                return "is parked: it has left its devices, and comes back with its next turn"
        return None

    def on_drain(self, peer: Peer, request: DrainOrder, answer: Answer) -> None:
        """Close groups or open them, and answer when that is done."""
        if not self._authority.is_admin(peer.uid):
            text = f"{_name(peer)} may not drain groups; root and the admin group may"
            answer(error_reply(request.id, "not_permitted", text))
            return
        groups = self._groups(request)
        if isinstance(groups, Refusal):
            answer(error_reply(request.id, *groups))
            return
        drain = None
        if not request.open:
            by = _name_and_reason(peer, request.why)
            drain = Drain(park=request.park, by=by, since_unix=time.time())
        for group in groups:
            self._driver.post(DrainOrdered(group=group, drain=drain))

        def tell() -> None:
            shown = [self._details.show("group", group) for group in groups]
            answer(reply(request.id, groups=shown))

        self._driver.after_turn(tell)

    def on_host_death(self, peer: Peer, request: HostDeath, answer: Answer) -> None:
        """Take an operator's word that a host is dead, and answer when the core has it."""
        refusal = self._objection(peer, request)
        if refusal is not None:
            answer(error_reply(request.id, *refusal))
            return
        host = HostName(request.host)
        if host not in self._driver.machine.hosts.links.dead:
            by = _name_and_reason(peer, request.why)
            self._driver.note("host_dead", "warning", host=host, by=by)
            self._driver.post(HostDied(host=host, by=by))
        self._driver.after_turn(lambda: answer(reply(request.id, host=request.host)))

    def _objection(self, peer: Peer, request: HostDeath) -> Refusal | None:
        if not self._authority.is_admin(peer.uid):
            text = f"{_name(peer)} may not say that hosts are dead; root and the admin group may"
            return Refusal("not_permitted", text)
        try:
            host = self._details.show("host", request.host)
        except NotFound as exc:
            return Refusal(exc.code, str(exc))
        if host["state"] == "connected":
            text = f"{request.host} is connected: its daemon answers, so it is not dead"
            return Refusal("refused", text)
        if HostName(request.host) in self._driver.machine.hosts.links.up:
            text = (
                f"{request.host} is {host['state']}: its connection stands; wait until it is lost"
            )
            return Refusal("refused", text)
        return None

    def _groups(self, request: DrainOrder) -> list[GroupName] | Refusal:
        machine = self._driver.machine
        here = machine.config.host
        arbiters = {g.name: (g.hosts or (here,))[0] for g in machine.config.groups}
        if request.device is not None:
            try:
                wanted = [self._details.group_of(request.device)]
            except NotFound as exc:
                return Refusal(exc.code, str(exc))
        elif request.groups is None:
            wanted = [name for name, arbiter in arbiters.items() if arbiter == here]
        else:
            wanted = [GroupName(name) for name in request.groups]
        for name in wanted:
            if name not in arbiters:
                known = ", ".join(arbiters) or "none"
                text = f"there is no group {name!r}; there are: {known}"
                return Refusal("unknown_group", text)
            if arbiters[name] != here:
                there = arbiters[name]
                text = f"group {name} is arbitrated by {there}: type it on {there}"
                return Refusal("refused", text)
        return wanted

    def _job(self, peer: Peer, name: str) -> JobKey:
        """Return the job that a peer means. Raises `NotFound`."""
        known = self._details.jobs()
        named = [job for job in known if job.is_called(name)]
        own = [job for job in named if job.uid == peer.uid]
        if len(named) == 1 or len(own) == 1:
            return (own or named)[0]
        if not named:
            raise NotFound(f"there is no job {name!r} here; see tslicectl status")
        several = ", ".join(map(str, named))
        raise NotFound(f"several jobs are called {name!r}: say which of {several}", "bad_request")


def _name(peer: Peer) -> str:
    return "root" if peer.uid == 0 else f"uid {peer.uid}"


def _name_and_reason(peer: Peer, why: str | None) -> str:
    return f"{_name(peer)} ({why})" if why else _name(peer)
