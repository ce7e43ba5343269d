"""Credentials of munged: a real one, and what is not good enough for a daemon."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tsliced.net.munge import Munge, MungeError
from tsliced.net.peer_auth import Half, check_half, open_half_untrusted
from tsliced.net.peer_messages import PeerRefused

Found = TypeVar("Found")
LIMIT_S = 20.0
HALF = Half(
    part="dialer",
    dialer="n1",
    acceptor="n2",
    dialer_nonce=b"1" * 32,
    acceptor_nonce=b"2" * 32,
    key=b"k" * 32,
)


@pytest.fixture
def place(make_munged: Callable[[], str]) -> str:
    return make_munged()


@pytest.fixture
def munge(place: str) -> Iterator[Munge]:
    munge = Munge(place, timeout_s=LIMIT_S)
    yield munge
    munge.close()


def run(work: Awaitable[Found]) -> Found:
    async def limited() -> Found:
        async with asyncio.timeout(LIMIT_S):
            return await work

    return asyncio.run(limited())


def code_of(work: Awaitable[object]) -> str:
    with pytest.raises(PeerRefused) as caught:
        run(work)
    return f"{caught.value.code}: {caught.value}"


def test_a_half_arrives_as_it_was_sealed(munge: Munge) -> None:
    async def story() -> None:
        for _ in range(20):
            text = await HALF.seal(munge)
            assert len(text) < 1024, "as long as a message takes it"
            assert await open_half_untrusted(munge, text, "n1") == HALF

    run(story())


def test_the_longest_names_of_hosts_fit(munge: Munge) -> None:
    async def story() -> None:
        half = replace(HALF, dialer="a" * 64, acceptor="b" * 64)
        text = await half.seal(munge)
        assert len(text) < 1024
        assert await open_half_untrusted(munge, text, "n1") == half

    run(story())


def test_a_credential_is_good_once(munge: Munge) -> None:
    async def story() -> None:
        text = await HALF.seal(munge)
        await open_half_untrusted(munge, text, "n1")
        await open_half_untrusted(munge, text, "n1")

    assert code_of(story()) == "auth: munge: Replayed credential"


def test_a_credential_of_another_key_or_none_at_all_is_refused(
    munge: Munge, make_munged: Callable[[], str]
) -> None:
    other = Munge(make_munged(), timeout_s=LIMIT_S)

    async def foreign() -> None:
        await open_half_untrusted(munge, await HALF.seal(other), "n1")

    assert code_of(foreign()) == "auth: munge: Invalid credential"
    assert code_of(open_half_untrusted(munge, "MUNGE:nonsense:", "n1")).startswith("auth: munge: ")
    other.close()


def test_a_credential_for_something_else_is_refused(munge: Munge) -> None:
    async def story(payload: bytes) -> None:
        await open_half_untrusted(munge, await munge.seal(payload), "n1")

    assert code_of(story(b"")).endswith("holds something else")
    assert code_of(story(b"\x93\x01\x02\x03")).endswith("holds something else")
    assert code_of(story(b"\x97\x01\x02\x03\x04\x05\x06\x07")).endswith("is for something else")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_another_user_seals_is_refused_and_nobody_else_opens_what_is_sealed(
    munge: Munge, place: str
) -> None:
    program, runuser = shutil.which("munge"), shutil.which("setpriv")
    if program is None or runuser is None:
        pytest.skip("needs munge(1) and setpriv(1)")
    as_nobody = [runuser, "--reuid=65534", "--regid=65534", "--clear-groups"]
    made = subprocess.run(
        [*as_nobody, program, f"--socket={place}", "--string=x"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    refusal = code_of(open_half_untrusted(munge, made.stdout.strip(), "n1"))
    assert refusal == "auth: munge: a credential of uid 65534, who runs no daemon here"
    opened = subprocess.run(
        [*as_nobody, Path(program).with_name("unmunge"), f"--socket={place}"],
        input=run(HALF.seal(munge)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "Unauthorized" in opened.stderr
    assert "n2" not in opened.stdout


def test_a_munged_that_is_not_there_is_an_error_that_says_so(
    make_munged: Callable[[], str], tmp_path: Path
) -> None:
    make_munged()  # for the library, which comes with it
    absent = Munge(str(tmp_path / "s"), timeout_s=LIMIT_S)
    with pytest.raises(MungeError, match="Did you start munged"):
        run(absent.seal(b"x"))
    absent.close()


@pytest.mark.parametrize("change", [f.name for f in fields(Half) if f.name != "key"])
def test_a_half_is_of_one_connection_and_one_side(change: str) -> None:
    check_half(HALF, replace(HALF, key=b"x" * 32), "n1")
    value = getattr(HALF, change)
    changed: dict[str, Any] = {change: b"x" * 32 if isinstance(value, bytes) else "x"}
    with pytest.raises(PeerRefused, match="of another connection"):
        check_half(HALF, replace(HALF, **changed), "n1")
