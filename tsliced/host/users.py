"""Users and their groups, as the host's own databases have them.

These may be a directory service somewhere else that takes its time, so they are asked in a thread,
within a limit, and the answers are kept for a while.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from tsliced.host.call_thread import CallThread

_MAX_REMEMBERED: Final = 16_384


class User(NamedTuple):
    """What is known of a uid."""

    #: None: it has no name here, or that could not be found out.
    name: str | None = None
    #: Those of the groups asked about that it is in.
    groups: frozenset[str] = frozenset()


_NOBODY: Final = User()


class Users:
    """Remembers users. All methods belong to the event loop.

    `groups` are the Unix groups whose members matter.
    """

    def __init__(
        self, groups: Iterable[str], *, limit_s: float = 5.0, max_age_s: float = 60.0
    ) -> None:
        self._groups = tuple(dict.fromkeys(groups))
        self._limit_s = limit_s
        self._max_age_s = max_age_s
        self._known: dict[int, tuple[float, User]] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._thread = CallThread("users")

    def close(self) -> None:
        """Ask nobody any more."""
        if self._thread.is_running:
            self._thread.stop()

    def is_fresh(self, uid: int) -> bool:
        """Whether `known` need not be preceded by `look_up`."""
        at, _ = self._known.get(uid, (-self._max_age_s, _NOBODY))
        return time.monotonic() - at < self._max_age_s

    def known(self, uid: int) -> User:
        """Return a user as last looked up."""
        return self._known.get(uid, (0.0, _NOBODY))[1]

    async def look_up(self, uid: int) -> None:
        """Ask the databases; what they do not say in time stays as it was."""
        if self.is_fresh(uid):
            return
        if not self._thread.is_running:
            self._thread.start()
        task = self._asking.get(uid)
        if task is None:
            task = self._asking[uid] = asyncio.create_task(self._ask(uid), name="user")
            task.add_done_callback(lambda _: self._asking.pop(uid))
        # Others may wait for the same answer: who stops waiting does not take it from them.
        await asyncio.shield(task)

    async def _ask(self, uid: int) -> None:
        now = time.monotonic
        try:
            user = await self._thread.call(lambda: find(uid, self._groups), self._limit_s)
            at = now()
        except TimeoutError:
            # Not every client that comes should have to wait for so long.
            user, at = self.known(uid), now() - self._max_age_s + self._limit_s
        if len(self._known) >= _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known.pop(uid, None)
        self._known[uid] = (at, user)


def find(uid: int, groups: Iterable[str]) -> User:
    """Return a user, with those of the groups that it is in. Blocks."""
    try:
        user = pwd.getpwuid(uid)
        gids = set(os.getgrouplist(user.pw_name, user.pw_gid))
    except (KeyError, OSError):
        return _NOBODY
    return User(user.pw_name, frozenset(name for name in groups if _gid_of(name) in gids))


def _gid_of(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, OSError):
        return None
