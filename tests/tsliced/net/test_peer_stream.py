"""One connection as messages, over real sockets: however the bytes come, and however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from in_process import until
from peer_lab import SETTINGS, Run

from tsliced.net.peer_messages import Bye, Frames, PeerMessage, PeerRefused, Ping
from tsliced.net.peer_stream import MOST_UNHEARD, Link, PeerGone

PINGS = [Ping(seq=number) for number in range(200)]


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A link, and the other end of its connection in a test's hands."""
    ours, theirs = socket.socketpair()
    link = Link(SETTINGS)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    reader, writer = await asyncio.open_connection(sock=theirs)
    try:
        yield link, reader, writer
    finally:
        link.close()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def frames_of(*messages: PeerMessage) -> bytes:
    frames = Frames(max_bytes=1 << 20)
    return b"".join(map(frames.encode, messages))


@pytest.mark.parametrize("size", [1, 3, 7, 64, 1 << 16])
def test_messages_are_the_same_in_whatever_pieces_their_bytes_come(run: Run, size: int) -> None:
    async def story() -> None:
        async with linked() as (link, _, writer):
            data = frames_of(*PINGS, Bye())
            first, got = await _first(link, writer, data[:40]), list[PeerMessage]()
            served = asyncio.ensure_future(link.serve(_until_bye(got)))
            for at in range(40, len(data), size):
                writer.write(data[at : at + size])
                await writer.drain()
            await served
            assert [*first, *got] == [*PINGS, Bye()]

    run(story())


async def _first(link: Link, writer: asyncio.StreamWriter, data: bytes) -> list[PeerMessage]:
    """Asks for the messages that are whole in `data`, one by one, as in a greeting."""
    writer.write(data)
    whole = len(frames_of(PINGS[0]))
    return [await link.receive() for _ in range(len(data) // whole)]


def _until_bye(got: list[PeerMessage]) -> Callable[[PeerMessage], bool]:
    def take(message: PeerMessage) -> bool:
        got.append(message)
        return not isinstance(message, Bye)

    return take


def test_what_comes_behind_the_last_message_is_not_heard(run: Run) -> None:
    async def story() -> None:
        async with linked() as (link, _, writer):
            got: list[PeerMessage] = []
            writer.write(frames_of(Ping(seq=1), Bye(), Ping(seq=2)))
            await link.serve(_until_bye(got))
            writer.write(frames_of(Ping(seq=3)))
            writer.close()
            await until(lambda: link.transport.is_closing(), "the end is seen")
            assert got == [Ping(seq=1), Bye()]

    run(story())


def test_what_was_said_before_the_end_is_heard_and_then_the_end(run: Run) -> None:
    async def story() -> None:
        async with linked() as (link, _, writer):
            writer.write(frames_of(Ping(seq=1), Ping(seq=2), Ping(seq=3)))
            writer.close()
            await until(lambda: link.transport.is_closing(), "the end is seen")
            assert await link.receive() == Ping(seq=1)
            got: list[PeerMessage] = []
            with pytest.raises(PeerGone, match="it closed the connection"):
                await link.serve(_until_bye(got))
            assert got == [Ping(seq=2), Ping(seq=3)]
            with pytest.raises(PeerGone):
                await link.receive()

    run(story())


def test_a_link_that_was_dropped_hears_nothing_more_and_says_why(run: Run) -> None:
    async def story() -> None:
        async with linked() as (link, _, writer):
            got: list[PeerMessage] = []

            def take(message: PeerMessage) -> bool:
                got.append(message)
                link.drop("it is of no more use")
                return True

            writer.write(frames_of(*PINGS))
            with pytest.raises(PeerGone, match="it is of no more use"):
                await link.serve(take)
            assert got == PINGS[:1]

    run(story())


def test_what_is_no_frame_and_what_a_listener_cannot_take_end_it(run: Run) -> None:
    async def story() -> None:
        async with linked() as (link, _, writer):
            writer.write(frames_of(Ping(seq=1)) + b"\xff" * 8)
            got: list[PeerMessage] = []
            with pytest.raises(PeerRefused, match="limit"):
                await link.serve(_until_bye(got))
            assert got == [Ping(seq=1)]
        async with linked() as (link, _, writer):

            def stumble(message: PeerMessage) -> bool:
                raise ZeroDivisionError

            writer.write(frames_of(Ping(seq=1)))
            with pytest.raises(ZeroDivisionError):
                await link.serve(stumble)

    run(story())


def test_who_is_not_heard_yet_cannot_fill_the_memory_g9(run: Run) -> None:
    async def story() -> None:
        async with linked() as (link, _, writer):
            data = frames_of(*PINGS)
            total = 0
            # Until the other side, and the kernel, take no more.
            with contextlib.suppress(TimeoutError):
                while total < 64 << 20:
                    writer.write(data * 50)
                    total += 50 * len(data)
                    async with asyncio.timeout(0.5):
                        await writer.drain()
            assert total < 64 << 20
            assert len(link._buffer) < 4 * MOST_UNHEARD
            # What was held back comes when it is asked for.
            for _ in range(100):
                for expected in PINGS:
                    assert await link.receive() == expected
            writer.transport.abort()

    run(story())
