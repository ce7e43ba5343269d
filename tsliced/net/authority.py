"""Who may do what: by uid and group membership, as the host's own databases have them."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterable

from tsliced.config import GroupSettings
from tsliced.core.model import GroupConfig, GroupName


class Authority:
    """Answers from the configuration and the host's user database."""

    def __init__(
        self,
        groups: Iterable[GroupConfig],
        settings: Iterable[GroupSettings],
        admin_group: str,
    ) -> None:
        self._groups = tuple(group.name for group in groups)
        self._users = {GroupName(group.name): group.users for group in settings}
        self._admin_group = admin_group

    def is_admin(self, uid: int) -> bool:
        """Whether a uid is root, the daemon's own, or in the admin group."""
        return uid in (0, os.geteuid()) or self._in_admin_group(uid)

    def may_act_for(self, uid: int, other: int) -> bool:
        """Whether a uid may speak for another's jobs and processes."""
        return uid == other or self.is_admin(uid)

    def groups_for(self, uid: int) -> tuple[GroupName, ...]:
        """Return the groups that a uid may lease, in the configured order."""
        return tuple(group for group in self._groups if self._may_lease(uid, group))

    def _may_lease(self, uid: int, group: GroupName) -> bool:
        users = self._users.get(group, ())
        if not users or self.is_admin(uid):
            return True
        return str(uid) in users or _user_name(uid) in users

    def _in_admin_group(self, uid: int) -> bool:
        try:
            group = grp.getgrnam(self._admin_group)
            user = pwd.getpwuid(uid)
        except KeyError:
            return False
        return user.pw_gid == group.gr_gid or user.pw_name in group.gr_mem


def _user_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
