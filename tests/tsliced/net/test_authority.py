"""Who may lease what, and for whom (G10), by a user database of the test's own."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
from types import SimpleNamespace

import pytest

from tsliced.config import GroupSettings
from tsliced.core.model import DeviceId, GroupConfig, GroupName, ProcessId
from tsliced.net.authority import Authority

ROOT, ALICE, BOB, OPERATOR, MEMBER, UNNAMED = 0, 1001, 1002, 1003, 1004, 1005
ADMINS, LAB = 90, 91
MEMBERS = {ADMINS: ["member"], LAB: ["bob"]}
ME = ProcessId(1, 1)
OTHER = ProcessId(2, 1)


@pytest.fixture(autouse=True)
def _users(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {ALICE: "alice", BOB: "bob", OPERATOR: "operator", MEMBER: "member"}

    def user(uid: int) -> SimpleNamespace:
        group = ADMINS if uid == OPERATOR else 100
        return SimpleNamespace(pw_name=names[uid], pw_gid=group)

    def group(name: str) -> SimpleNamespace:
        return SimpleNamespace(gr_gid={"tsliced": ADMINS, "lab": LAB}[name])

    monkeypatch.setattr(pwd, "getpwuid", user)
    monkeypatch.setattr(grp, "getgrnam", group)

    def groups_of(name: str, gid: int) -> list[int]:
        return [gid, *(gid for gid, members in MEMBERS.items() if name in members)]

    monkeypatch.setattr(os, "getgrouplist", groups_of)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def authority(*, admin_group: str = "tsliced", **users: tuple[str, ...]) -> Authority:
    groups = [
        GroupConfig(name=GroupName(name), devices=(DeviceId(f"GPU-{name}"),), order=order)
        for order, name in enumerate(users)
    ]
    settings = [GroupSettings(name=name, users=listed) for name, listed in users.items()]
    found = Authority(groups, settings, admin_group)
    asyncio.run(found.learn(ME, ROOT, ALICE, BOB, OPERATOR, MEMBER, UNNAMED))
    return found


@pytest.mark.parametrize(
    ("uid", "admin"),
    [(ROOT, True), (OPERATOR, True), (MEMBER, True), (ALICE, False), (UNNAMED, False)],
)
def test_root_and_the_members_of_the_admin_group_are_admins_g10(uid: int, admin: bool) -> None:
    assert authority(g1=()).is_admin(uid) is admin


def test_without_the_admin_group_only_root_is_admin_g10() -> None:
    nobody_else = authority(admin_group="nobody-made-it", g1=())
    assert nobody_else.is_admin(ROOT)
    assert not nobody_else.is_admin(OPERATOR)


def test_who_runs_the_daemon_is_its_admin_g10(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ALICE)
    assert authority(g1=()).is_admin(ALICE)
    assert not authority(g1=()).is_admin(BOB)


def test_a_user_speaks_for_themselves_and_an_admin_for_all_g10() -> None:
    who = authority(g1=())
    assert who.may_act_for(ALICE, ALICE)
    assert not who.may_act_for(ALICE, BOB)
    assert not who.may_act_for(ALICE, ROOT)
    assert who.may_act_for(OPERATOR, BOB)


def test_a_group_that_lists_nobody_is_for_all_and_one_that_does_is_for_them_g10() -> None:
    who = authority(open=(), named=("alice",), numbered=("1002", "1005"))
    assert who.groups_for(ALICE) == ("open", "named")
    assert who.groups_for(BOB) == ("open", "numbered")
    assert who.groups_for(UNNAMED) == ("open", "numbered")
    assert who.groups_for(MEMBER) == ("open", "named", "numbered")


def test_a_unix_group_may_be_listed_g10() -> None:
    who = authority(theirs=("@lab",), no_such=("@nobody-made-it",), both=("@lab", "alice"))
    assert who.groups_for(BOB) == ("theirs", "both")
    assert who.groups_for(ALICE) == ("both",)
    assert who.groups_for(UNNAMED) == ()


def test_of_a_user_who_was_never_asked_about_only_the_number_counts_g10() -> None:
    groups = [GroupConfig(name=GroupName("g1"), devices=(DeviceId("GPU-1"),), order=0)]
    who = Authority(groups, [GroupSettings(name="g1", users=("alice",))], "tsliced")
    assert not who.knows(ME, ALICE)
    assert who.groups_for(ALICE) == ()
    assert not who.is_admin(OPERATOR)
    asyncio.run(who.learn(ME, ALICE))
    assert who.knows(ME, ALICE)
    assert who.groups_for(ALICE) == ("g1",)


def test_a_group_that_lists_accounts_is_not_for_all_g10() -> None:
    groups = [GroupConfig(name=GroupName("g1"), devices=(DeviceId("GPU-1"),), order=0)]
    who = Authority(groups, [GroupSettings(name="g1", accounts=("rl",))], "tsliced")
    assert who.groups_for(ALICE) == ()
    assert who.groups_for(ROOT) == ("g1",)


def test_a_job_of_a_listed_account_may_lease_a_group_whoever_its_user_is_g10() -> None:
    groups = [GroupConfig(name=GroupName("g1"), devices=(DeviceId("GPU-1"),), order=0)]
    listed = [GroupSettings(name="g1", accounts=("rl", "vision"), users=("alice",))]
    accounts: dict[ProcessId, str | None] = {ME: "vision", OTHER: "other"}
    who = Authority(groups, listed, "tsliced", account_of=accounts.get)
    assert who.groups_of(ME, BOB) == ("g1",)
    assert who.groups_of(OTHER, BOB) == ()
    assert who.groups_for(BOB) == (), "without a job there is no account"
    asyncio.run(who.learn(OTHER, ALICE))
    assert who.groups_of(OTHER, ALICE) == ("g1",), "a user who is listed needs no account"


def test_groups_come_in_the_order_in_which_they_are_reserved() -> None:
    assert authority(z=(), a=(), m=()).groups_for(ALICE) == ("z", "a", "m")
