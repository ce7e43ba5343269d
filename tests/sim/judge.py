"""What must hold in all states of a search: judged by what clients know and where processes are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stills import Began, Outcome, Present, Stills

from tsliced.core.model import GroupName, JobKey, RankState


class Wrong(Exception):  # noqa: N818 - a finding
    """Something that must not be."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges states: by the number of each host's own one."""

    stills: Sequence[Stills]

    def processes(self, hosts: tuple[int, ...]) -> Iterator[Present]:
        """Yield the processes on all hosts."""
        for stills, number in zip(self.stills, hosts, strict=True):
            yield from stills.facts[number].processes

    def judge(
        self, before: tuple[int, ...], after: tuple[int, ...], host: int, outcome: Outcome
    ) -> None:
        """Judge what one host did; raises `Wrong`."""
        facts = self.stills[host].facts
        old, new = facts[before[host]], facts[after[host]]
        if old.processes != new.processes or old.held != new.held:
            self._judge_exclusion(after)
        for began in outcome.began:
            self._judge_begin(began, after)

    def _holders(self, hosts: tuple[int, ...]) -> dict[GroupName, JobKey]:
        holders: dict[GroupName, JobKey] = {}
        for stills, number in zip(self.stills, hosts, strict=True):
            for job, group in stills.facts[number].held:
                if holders.setdefault(group, job) != job:
                    raise Wrong(f"G1: {job.id} and {holders[group].id} hold {group}")
        return holders

    def _judge_exclusion(self, hosts: tuple[int, ...]) -> None:
        holders = self._holders(hosts)
        for process in self.processes(hosts):
            for group in process.groups:
                holder = holders.get(group, process.job)
                if process.state.holds_device and holder != process.job:
                    raise Wrong(f"G1: {process.job.id} is on {group}, which {holder.id} holds")

    def _judge_begin(self, began: Began, hosts: tuple[int, ...]) -> None:
        there = [p for p in self.processes(hosts) if not p.groups.isdisjoint(began.groups)]
        own = [process for process in there if process.job == began.job]
        name = began.job.id
        match began.what:
            case "grant":
                if any(process.state is not RankState.RUNNING for process in own):
                    raise Wrong(f"{name} is granted and does not run everywhere")
                if any(p.state.holds_device and p.job != began.job for p in there):
                    raise Wrong(f"G1: {name} is granted while another job is on its devices")
            case "thaw":
                # Who thaws alone knows nothing of the others.
                alone = any(process.alone for process in own)
                if not alone and any(p.state is RankState.PARKED for p in own):
                    raise Wrong(f"{name} is thawed before all of it is restored")
            case "snapshot":
                if any(p.state is RankState.RUNNING and not p.alone for p in own):
                    raise Wrong(f"{name} is snapshotted before all of it is frozen")
            case _:
                pass

    def is_unseen(self, host: int, before: int, outcome: Outcome | str) -> bool:
        """Whether nothing that is judged here depends on when a host does something."""
        if isinstance(outcome, str) or outcome.began:
            return False
        old, new = self.stills[host].facts[before], self.stills[host].facts[outcome.state]
        return old.processes == new.processes and old.held == new.held

    def unrest(self, hosts: tuple[int, ...], waiter: JobKey | None) -> str | None:
        """Return what is not at rest where nothing is under way any more; None: all is.

        `waiter`: who must have been granted what it waited for, if perhaps not in time.
        """
        facts = [stills.facts[number] for stills, number in zip(self.stills, hosts, strict=True)]
        if any(of_host.asks for of_host in facts):
            return "a client has no answer"
        holders = self._holders(hosts)
        answered = {*holders.values()}.union(*(of_host.let_down for of_host in facts))
        if waiter is not None and waiter not in answered:
            return f"{waiter.id} has not got what it waited for"
        for process in self.processes(hosts):
            if process.state is RankState.FROZEN:
                return f"{process.job.id} is frozen for good"
            for group in process.groups:
                is_holder = holders.get(group) == process.job
                if is_holder and process.state is not RankState.RUNNING:
                    return f"{process.job.id} holds {group} and does not run"
        return None
