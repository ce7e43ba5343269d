"""Links over real sockets: two sides of one process, what is between them, and who is not meant."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from in_process import until
from peer_lab import N1, N2, NOBODY, SETTINGS, Raw, Run, Side, ask, ask_events, state, stranger

from libtimeslice.protocol import EventsQuery, Message
from tsliced.config import PeerAddress
from tsliced.host.history import Event, Page
from tsliced.net.histories import Refuse, SendPage
from tsliced.net.listening import ListenError
from tsliced.net.peer_auth import Credentials
from tsliced.net.peer_messages import (
    NONCE_BYTES,
    PEER_VERSION,
    Answer,
    Ask,
    Bye,
    Greeting,
    Ping,
)
from tsliced.net.peers import Unanswered, listen_for_peers


def test_two_hosts_make_one_link_and_answer_each_other(run: Run) -> None:
    async def story() -> None:
        one = Side(N1, status=lambda: {"host": "n1"})
        two = Side(N2, status=lambda: {"host": "n2"})
        async with (
            two.serve(n1=NOBODY) as (peers2, address2),
            one.serve(n2=address2) as (peers1, _),
        ):
            await until(lambda: state(peers1) == state(peers2) == "connected", "a link")
            assert await ask(peers1, "n2") == {"host": "n2"}
            assert await ask(peers2, "n1") == {"host": "n1"}
            unknown = await ask(peers1, "n9")
            assert isinstance(unknown, Unanswered)
            assert unknown.code == "not_found"
            await until(lambda: peers1.shown()[0]["rtt_s"] is not None, "a ping is answered")
        assert [len(side.told("peer_up")) for side in (one, two)] == [1, 1]

    run(story())


def test_an_answer_that_is_too_large_is_an_error_and_the_link_stays(run: Run) -> None:
    async def story() -> None:
        large: Message = {"x": "y" * (1 << 20)}
        one, two = Side(N1), Side(N2, status=lambda: large)
        async with two.serve(n1=NOBODY) as (_, address), one.serve(n2=address) as (peers, _):
            await until(lambda: state(peers) == "connected", "a link")
            for _ in range(2):
                answer = await ask(peers, "n2")
                assert isinstance(answer, Unanswered)
                assert "limit" in answer.text
            assert state(peers) == "connected"

    run(story())


def test_questions_have_a_limit_in_number_and_time_and_end_with_the_link(run: Run) -> None:
    async def story() -> None:
        settings = replace(SETTINGS, answer_timeout_s=0.2, max_asks=2)
        side = Side(N2, settings=settings)
        async with side.serve(n1=NOBODY) as (peers, address), stranger(address) as raw:
            await raw.greet()
            raw.send(Side(N1).hello(N2))
            await until(lambda: state(peers) == "connected", "a link")
            answers: list[Message | Unanswered] = []
            for _ in range(3):
                peers.ask_status("n1", answers.append)
            assert [a.code for a in answers if isinstance(a, Unanswered)] == ["would_exceed_limit"]
            await until(lambda: len(answers) == 3, "the others are given up")
            assert {a.code for a in answers[1:] if isinstance(a, Unanswered)} == {"unavailable"}
            peers.ask_status("n1", answers.append)
            raw.send(Bye())
            await until(lambda: len(answers) == 4, "the link ends")
            last = answers[3]
            assert isinstance(last, Unanswered)
            assert "its daemon was stopped" in last.text

    run(story())


async def _wrong_key(raw: Raw) -> None:
    await raw.greet(secret=b"another key, and it has 32 bytes.")


async def _wrong_host(raw: Raw) -> None:
    raw.send(Greeting(version=PEER_VERSION, auth="psk", host="n1", to="n7", nonce=b"n" * 32))


async def _not_listed(raw: Raw) -> None:
    raw.send(Greeting(version=PEER_VERSION, auth="psk", host="n0", to="n2", nonce=b"n" * 32))


async def _version(raw: Raw) -> None:
    raw.send(Greeting(version=(9, 0), auth="psk", host="n1", to="n2", nonce=b"n" * 32))


async def _no_proof(raw: Raw) -> None:
    raw.send(Greeting(version=PEER_VERSION, auth="psk", host="n1", to="n2", nonce=b"n" * 32))
    await raw.receive()
    raw.send(Side(N1).hello(N2))


async def _garbage(raw: Raw) -> None:
    raw.writer.write(b"GET / HTTP/1.1\r\n\r\n")


async def _oversized(raw: Raw) -> None:
    raw.writer.write((1 << 24).to_bytes(4, "big"))


async def _large_greeting(raw: Raw) -> None:
    raw.writer.write((5000).to_bytes(4, "big"))


async def _tls(raw: Raw) -> None:
    raw.writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")


async def _other_host(raw: Raw) -> None:
    await raw.greet()
    raw.send(replace(Side(N1).hello(N2), host="n0"))


async def _out_of_turn(raw: Raw) -> None:
    await raw.greet()
    raw.send(Ask(id=1, what="status"))


@pytest.mark.parametrize(
    ("attack", "code"),
    [
        (_wrong_key, "auth"),
        (_wrong_host, "wrong_host"),
        (_not_listed, "not_allowed"),
        (_version, "version"),
        (_no_proof, "bad_message"),
        (_garbage, "bad_frame"),
        (_oversized, "bad_frame"),
        (_large_greeting, "bad_frame"),
        (_tls, "auth"),
        (_other_host, "auth"),
        (_out_of_turn, "bad_message"),
    ],
)
def test_who_is_not_meant_is_refused_before_it_learns_anything(
    run: Run, attack: Callable[[Raw], Awaitable[None]], code: str
) -> None:
    async def story() -> None:
        side = Side(N2)
        async with side.serve(n1=NOBODY) as (peers, address):
            async with stranger(address) as raw:
                await attack(raw)
                await until(lambda: side.told("peer_refused"), "it is told")
                assert side.told("peer_refused")[0]["code"] == code
                with contextlib.suppress(OSError):
                    await raw.reader.read()  # ends when the connection does
            assert state(peers) == "awaited"
            assert not side.told("peer_up")

    run(story())


def test_a_greeting_that_was_recorded_opens_nothing(run: Run) -> None:
    async def story() -> None:
        side = Side(N2)
        async with side.serve(n1=NOBODY) as (peers, address):
            async with stranger(address) as first:
                await first.greet()
                first.send(Side(N1).hello(N2))
                await until(lambda: state(peers) == "connected", "a link")
            await until(lambda: state(peers) == "suspect", "it ended")
            async with stranger(address) as raw:
                for frame in first.sent:
                    raw.writer.write(frame)
                await until(lambda: side.told("peer_refused"), "the same again is refused")
            assert side.told("peer_refused")[0]["code"] == "auth"
            assert len(side.told("peer_up")) == 1

    run(story())


@pytest.mark.parametrize("how", ["changed", "repeated", "left out"])
def test_frames_that_are_meddled_with_end_the_link_and_it_is_made_anew(run: Run, how: str) -> None:
    async def story() -> None:
        one, two = Side(N1), Side(N2)
        meddled = asyncio.Event()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Carries frames, and meddles with one after the greeting and the hello."""
            number = 0
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    header = await reader.readexactly(4)
                    frame = header + await reader.readexactly(int.from_bytes(header, "big"))
                    number += 1
                    if number == 5 and not meddled.is_set():
                        meddled.set()
                        changed = frame[:-1] + bytes([frame[-1] ^ 1])
                        frame = {"changed": changed, "repeated": frame * 2, "left out": b""}[how]
                    writer.write(frame)
            writer.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            other_reader, other_writer = await asyncio.open_connection(*address)
            await asyncio.gather(carry(reader, other_writer), carry_back(other_reader, writer))

        async def carry_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
            writer.close()

        async with two.serve(n1=NOBODY) as (peers2, address):
            proxy = await asyncio.start_server(between, "127.0.0.1", 0)
            way = PeerAddress(*proxy.sockets[0].getsockname()[:2])
            async with one.serve(n2=way) as (peers1, _):
                await until(lambda: len(two.told("peer_up")) == 2, "the link is made anew")
                await until(lambda: state(peers1) == state(peers2) == "connected", "it is up")
                refused = two.told("peer_refused")
                assert [facts["code"] for facts in refused] == ["bad_tag"]
            proxy.close()
            await until(lambda: state(peers2) == "suspect", "all has ended")
            await asyncio.sleep(0)

    run(story())


def test_a_host_that_gets_its_own_words_back_is_not_connected(run: Run) -> None:
    async def story() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    writer.write(data)
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        side = Side(N1)
        where = PeerAddress(*server.sockets[0].getsockname()[:2])
        async with side.serve(n2=where) as (peers, _):
            await until(lambda: side.told("peer_refused"), "it is refused")
            assert side.told("peer_refused")[0]["code"] == "bad_message"
            assert state(peers) == "awaited"
        server.close()
        await server.wait_closed()

    run(story())


def test_who_says_nothing_is_dropped_in_time_and_cannot_keep_the_host_that_is_meant_out(
    run: Run,
) -> None:
    async def story() -> None:
        one, two = Side(N1), Side(N2, settings=replace(SETTINGS, greeting_timeout_s=0.5))
        async with contextlib.AsyncExitStack() as stack:
            peers2, address = await stack.enter_async_context(two.serve(n1=NOBODY))
            silent = [await stack.enter_async_context(stranger(address)) for _ in range(3)]
            for raw in silent:
                raw.writer.write(b"\x00\x00")
            await asyncio.sleep(0)
            late = await stack.enter_async_context(stranger(address))
            assert await late.reader.read() == b"", "there are too many already"
            assert [facts["code"] for facts in two.told("peer_refused")] == ["too_many"]
            for raw in silent:
                assert await raw.reader.read() == b"", "dropped after greeting_timeout_s"
            await stack.enter_async_context(one.serve(n2=address))
            await until(lambda: state(peers2) == "connected", "n1 is let in")

    run(story())


def test_the_same_refusal_is_told_once_however_often_it_is_earned(run: Run) -> None:
    async def story() -> None:
        side = Side(N2)
        async with side.serve(n1=NOBODY) as (_, address):
            for _ in range(20):
                async with stranger(address) as raw:
                    await _not_listed(raw)
                    assert (await raw.refusal()).code == "not_allowed"
            assert len(side.told("peer_refused")) == 1

    run(story())


def test_a_host_that_connects_again_takes_the_place_of_its_old_connection(run: Run) -> None:
    async def story() -> None:
        side = Side(N2)
        async with (
            side.serve(n1=NOBODY) as (peers, address),
            stranger(address) as old,
            stranger(address) as new,
        ):
            await old.greet()
            old.send(Side(N1).hello(N2))
            await until(lambda: state(peers) == "connected", "a link")
            await new.greet()
            new.send(Side(N1).hello(N2))
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    await old.receive()
            while not isinstance(await new.receive(), Ping):
                pass
            assert state(peers) == "connected"

    run(story())


def test_a_host_that_does_not_read_loses_its_connection(run: Run) -> None:
    async def story() -> None:
        large: Message = {"x": "y" * 900_000}
        settings = replace(SETTINGS, max_unsent_bytes=1 << 16)
        side = Side(N2, settings=settings, status=lambda: large)
        async with side.serve(n1=NOBODY) as (peers, address), stranger(address) as raw:
            await raw.greet()
            raw.send(Side(N1).hello(N2))
            await until(lambda: state(peers) == "connected", "a link")
            for number in range(1, 60):
                raw.send(Ask(id=number, what="status"))
            await until(lambda: state(peers) == "suspect", "it is dropped")
            assert "has not read" in str(side.told("peer_suspect")[0]["reason"])

    run(story())


def test_a_question_of_a_later_version_is_answered_with_an_error(run: Run) -> None:
    async def story() -> None:
        side = Side(N2)
        async with side.serve(n1=NOBODY) as (_, address), stranger(address) as raw:
            await raw.greet()
            raw.send(Side(N1).hello(N2))
            raw.send(Ask(id=5, what="weather"))
            while not isinstance(message := await raw.receive(), Answer):
                pass
            assert (message.id, message.body) == (5, None)
            assert message.error == "this host knows nothing of 'weather'"

    run(story())


def test_a_host_tells_of_its_history_in_pages_that_fit(run: Run) -> None:
    async def story() -> None:
        asked: list[EventsQuery] = []

        def history(query: EventsQuery, send: SendPage, _refuse: Refuse) -> None:
            asked.append(query)
            events: list[Event] = [{"seq": seq, "text": "y" * 300_000} for seq in range(1, 9)]
            assert not send(Page(events, 9))
            assert send(Page(events[:2], 3, more=True))

        one, two = Side(N1), Side(N2, history=history)
        async with two.serve(n1=NOBODY) as (_, address), one.serve(n2=address) as (peers, _):
            await until(lambda: state(peers) == "connected", "a link")
            jobs = ("7/a", "7/b")
            page = await ask_events(peers, "n2", since=0, jobs=jobs, before=5.0)
            assert isinstance(page, dict)
            assert [event["seq"] for event in page["events"]] == [1, 2]
            assert (page["next"], page["more"]) == (3, True)
            (query,) = asked
            assert (query.since, query.limit, query.jobs, query.before) == (0, 10, jobs, 5.0)
            assert query.host is None, "it is asked itself"
            unknown = await ask_events(peers, "n9")
            assert isinstance(unknown, Unanswered)
            assert unknown.code == "not_found"

    run(story())


def test_a_host_that_does_not_know_of_histories_is_not_asked_for_one(run: Run) -> None:
    async def story() -> None:
        one, two = Side(N1), Side(N2, features=("status", "jobs"))
        async with two.serve(n1=NOBODY) as (_, address), one.serve(n2=address) as (peers, _):
            await until(lambda: state(peers) == "connected", "a link")
            answer = await ask_events(peers, "n2")
            assert isinstance(answer, Unanswered)
            assert answer == (
                "unavailable",
                "n2 runs 0, which does not tell of its events; update it",
            )

    run(story())


def test_questions_about_a_history_are_checked_and_have_a_limit(run: Run) -> None:
    async def story() -> None:
        waiting: list[Refuse] = []

        def history(_query: EventsQuery, _send: SendPage, refuse: Refuse) -> None:
            waiting.append(refuse)

        side = Side(N2, settings=replace(SETTINGS, max_asks=2), history=history)
        async with side.serve(n1=NOBODY) as (_, address), stranger(address) as raw:

            async def answered(ask: int) -> str | None:
                while not isinstance(message := await raw.receive(), Answer):
                    pass
                assert (message.id, message.body) == (ask, None)
                return message.error

            await raw.greet()
            raw.send(Side(N1).hello(N2))
            raw.send(Ask(id=1, what="events", query={"limit": "many"}))
            assert "limit" in str(await answered(1))
            for number in (2, 3, 4):
                raw.send(Ask(id=number, what="events"))
            assert await answered(4) == "3 questions wait for an answer"
            waiting.pop(0)("unavailable", "the disk is gone")
            assert await answered(2) == "the disk is gone"
            raw.send(Ask(id=5, what="events"))
            await until(lambda: len(waiting) == 2, "there is room again")

    run(story())


def test_a_bug_ends_one_connection_and_not_the_daemon(run: Run) -> None:
    async def story() -> None:
        def status() -> Message:
            raise ZeroDivisionError

        one, two = Side(N1), Side(N2, status=status)
        async with two.serve(n1=NOBODY) as (peers2, address), one.serve(n2=address) as (peers, _):
            await until(lambda: state(peers) == "connected", "a link")
            assert isinstance(await ask(peers, "n2"), Unanswered)
            await until(lambda: len(one.told("peer_up")) == 2, "the link is made anew")
            assert [f["code"] for f in two.told("peer_refused")] == ["internal"]
            await until(lambda: state(peers2) == "connected", "it is up")

    run(story())


def test_a_host_with_a_certificate_of_another_cannot_call_itself_that_one(
    run: Run, certified: Callable[[str], Credentials]
) -> None:
    async def story() -> None:
        side = Side(N2, credentials=certified("n2"))
        greeting = Greeting(
            version=PEER_VERSION, auth="tls", host="n1", to="n2", nonce=b"n" * NONCE_BYTES
        )
        async with side.serve(n1=NOBODY) as (peers, address):
            async with stranger(address, certified("n3").dialing) as raw:
                raw.send(greeting)
                assert (await raw.refusal()).code == "auth"
            told = side.told("peer_refused")
            assert told[0]["reason"] == "the certificate is for n3, and not for n1"
            assert state(peers) == "awaited"
            async with stranger(address, certified("n1").dialing) as raw:
                raw.send(greeting)
                raw.send(Side(N1).hello(N2))
                await until(lambda: state(peers) == "connected", "n1 itself is let in")

    run(story())


def test_who_answers_in_the_place_of_another_host_is_refused(
    run: Run, certified: Callable[[str], Credentials]
) -> None:
    async def story() -> None:
        one = Side(N1, credentials=certified("n1"))
        # It has the name of n2 in its words, and a certificate of n3.
        other = Side(N2, credentials=certified("n3"))
        async with other.serve(n1=NOBODY) as (_, address), one.serve(n2=address) as (peers, _):
            await until(lambda: one.told("peer_refused"), "it is refused")
            told = one.told("peer_refused")[0]
            assert told["reason"] == "the certificate is for n3, and not for n2"
            assert state(peers) == "awaited"
            assert not other.told("peer_up")

    run(story())


def test_without_a_certificate_nobody_gets_a_word_in(
    run: Run, certified: Callable[[str], Credentials]
) -> None:
    async def story() -> None:
        side = Side(N2, credentials=certified("n2"))
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        async with side.serve(n1=NOBODY) as (peers, address):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with stranger(address, bare) as raw:
                    await raw.receive()
            await until(lambda: side.told("peer_refused"), "it is told")
            assert side.told("peer_refused")[0]["code"] == "auth"
            assert state(peers) == "awaited"

    run(story())


def test_an_address_that_cannot_be_had_is_said_with_the_key_to_change() -> None:
    with pytest.raises(
        ListenError, match=r"cannot listen for other hosts at 192\.0\.2\.1:1.*listen"
    ):
        listen_for_peers(PeerAddress("192.0.2.1", 1))
