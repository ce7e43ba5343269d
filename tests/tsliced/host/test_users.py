"""Users as the databases of this host have them, and what if these do not answer."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import threading

import pytest
from in_process import until

from tsliced.host.users import User, Users, find

NOBODY_HAS_IT = 54_321


def test_a_user_is_found_with_those_groups_that_were_asked_about() -> None:
    me = pwd.getpwuid(os.getuid())
    mine = grp.getgrgid(me.pw_gid).gr_name
    assert find(os.getuid(), [mine, "nobody-made-it"]) == User(me.pw_name, frozenset({mine}))
    assert find(NOBODY_HAS_IT, [mine]) == User()


def test_what_was_found_is_kept_for_a_while() -> None:
    async def run() -> None:
        users = Users([], max_age_s=600)
        uid = os.getuid()
        assert not users.is_fresh(uid)
        assert users.known(uid) == User()
        await asyncio.gather(users.look_up(uid), users.look_up(uid))
        assert users.is_fresh(uid)
        assert users.known(uid).name == pwd.getpwuid(uid).pw_name
        forgetful = Users([], max_age_s=0)
        await forgetful.look_up(uid)
        assert not forgetful.is_fresh(uid)
        assert forgetful.known(uid) == users.known(uid), "the latest word stands until the next"

    asyncio.run(run())


def test_a_database_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    real = pwd.getpwuid

    def hang(uid: int) -> pwd.struct_passwd:
        answer.wait(20)
        return real(uid)

    monkeypatch.setattr(pwd, "getpwuid", hang)

    async def run() -> None:
        users = Users([], limit_s=0.05, max_age_s=600)
        async with asyncio.timeout(20):
            await users.look_up(os.getuid())
            assert users.known(os.getuid()) == User()
            assert users.is_fresh(os.getuid()), "who comes right behind does not wait as well"
            await until(lambda: not users.is_fresh(os.getuid()), "it is asked for again")
            answer.set()
            for _ in range(1000):
                await users.look_up(os.getuid())
                if users.known(os.getuid()).name is not None:
                    return
                await asyncio.sleep(0.01)
            pytest.fail("the answer never came to be known")

    asyncio.run(run())
