"""Who may do what: by uid, group membership and device cgroup, none of which a client can choose.

A group's lists of users and of Slurm accounts say who may lease it; without any, everybody. The
account is the one that the Slurm job of a process runs on, as Slurm itself says. A list never makes
up for a device that the job's cgroup keeps from it: such a job could do nothing with the lease but
keep others off the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from tsliced.config import GroupSettings
from tsliced.core.model import DeviceId, GroupConfig, GroupName, ProcessId
from tsliced.host.device_access import AccessUnknownError, DeviceAccess
from tsliced.host.users import Users


class Authority:
    """Answers from the configuration and what was learned about users and processes."""

    def __init__(
        self,
        groups: Iterable[GroupConfig],
        settings: Iterable[GroupSettings],
        admin_group: str,
        *,
        access: DeviceAccess | None = None,
        own_only: bool = False,
        account_of: Callable[[ProcessId], str | None] = lambda _process: None,
    ) -> None:
        self._devices: dict[GroupName, frozenset[DeviceId]] = {
            group.name: frozenset(group.devices) for group in groups
        }
        #: Whether there are groups that have no devices on this host.
        self.any_elsewhere = not all(self._devices.values())
        self._users = {GroupName(group.name): group.users for group in settings}
        self._accounts = {GroupName(group.name): group.accounts for group in settings}
        self._account_of = account_of
        self._admin_group = admin_group
        self._access = access
        self._own_only = own_only
        listed = (name for names in self._users.values() for name in names)
        unix_groups = (name[1:] for name in listed if name.startswith("@"))
        self.users = Users([admin_group, *unix_groups])

    def become(self, other: Authority) -> None:
        """Answer as another one from now on, which is not to be used any more."""
        self.users.close()
        # All of them, as an answer is made of several.
        self.__dict__.update(other.__dict__)

    def knows(self, process: ProcessId, *uids: int) -> bool:
        """Whether the answers about a process and users need not be preceded by `learn`.

        Raises `AccessUnknownError`.
        """
        if not all(map(self.users.is_fresh, uids)):
            return False
        return self._access is None or self._access.denied(process) is not None

    async def learn(self, process: ProcessId, *uids: int) -> None:
        """Find out what all other methods answer from. Raises `AccessUnknownError`."""
        for uid in uids:
            await self.users.look_up(uid)
        if self._access is not None:
            await self._access.learn(process)

    def serves(self, uid: int) -> bool:
        """Whether a uid may be a client at all."""
        return not self._own_only or uid in (0, os.geteuid())

    def is_admin(self, uid: int) -> bool:
        """Whether a uid is root, the daemon's own, or in the admin group."""
        return uid in (0, os.geteuid()) or self._admin_group in self.users.known(uid).groups

    def may_act_for(self, uid: int, other: int) -> bool:
        """Whether a uid may speak for another's jobs and processes."""
        return uid == other or self.is_admin(uid)

    def groups_for(self, uid: int) -> tuple[GroupName, ...]:
        """Return the groups whose lists a uid is on, in the configured order."""
        return tuple(group for group in self._devices if self._is_listed(uid, group, None))

    def groups_of(self, process: ProcessId, uid: int) -> tuple[GroupName, ...]:
        """Return the groups that a process of a job of a uid may lease, in the configured order.

        Raises `AccessUnknownError`.
        """
        account = self._account_of(process) if any(self._accounts.values()) else None
        groups = tuple(g for g in self._devices if self._is_listed(uid, g, account))
        if self._access is None:
            return groups
        denied = self._access.denied(process)
        if denied is None:
            raise AccessUnknownError("its cgroup has changed meanwhile")
        return tuple(group for group in groups if denied.isdisjoint(self._devices[group]))

    def here(self, groups: Iterable[GroupName]) -> tuple[GroupName, ...]:
        """Return those of these groups that have devices on this host."""
        return tuple(group for group in groups if self._devices.get(group))

    def _is_listed(self, uid: int, group: GroupName, account: str | None) -> bool:
        names, accounts = self._users.get(group, ()), self._accounts.get(group, ())
        if self.is_admin(uid) or str(uid) in names or account in accounts:
            return True
        if not names:
            return not accounts
        user = self.users.known(uid)
        return user.name in names or any(f"@{name}" in names for name in user.groups)
