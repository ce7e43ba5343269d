"""The endpoint of metrics: few, short, bounded, and never in the way of others."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import pytest
from in_process import until

from tsliced.config import MetricsSettings
from tsliced.net.listening import ListenError
from tsliced.net.metrics_endpoint import MAX_REQUEST_BYTES, MetricsEndpoint, listen_for_scrapes

GET = b"GET /metrics HTTP/1.1\r\nHost: n1\r\n\r\n"
LIMIT_S = 20.0


class Place:
    """An endpoint at work, and what it was asked to make."""

    def __init__(
        self, path: Path, chunks: Callable[[], Iterable[bytes]], settings: MetricsSettings
    ) -> None:
        self.path = path
        self.errors: list[str] = []
        self.pages = 0
        self.endpoint = MetricsEndpoint(settings, self._count(chunks), self.errors.append)

    def _count(self, chunks: Callable[[], Iterable[bytes]]) -> Callable[[], Iterable[bytes]]:
        def counted() -> Iterable[bytes]:
            self.pages += 1
            return chunks()

        return counted

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self.path))

    async def ask(self, request: bytes = GET) -> tuple[int, bytes]:
        """Send a request; return status and body. (0, b""): it was hung up on."""
        reader, writer = await self.connect()
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
        if not answer:
            return 0, b""
        head, _, body = answer.partition(b"\r\n\r\n")
        if not request.startswith(b"HEAD"):
            assert f"Content-Length: {len(body)}\r\n".encode() in head + b"\r\n"
        return int(head.split()[1]), body


def at_work(
    tmp_path: Path,
    work: Callable[[Place], Awaitable[None]],
    chunks: Callable[[], Iterable[bytes]] = lambda: (b"a 1\n", b"b 2\n"),
    *,
    max_clients: int = 8,
    timeout_s: float = LIMIT_S,
) -> None:
    """Let an endpoint serve while `work` goes on."""

    async def serve() -> None:
        path = tmp_path / "metrics.sock"
        settings = MetricsSettings(max_clients=max_clients, timeout_s=timeout_s)
        place = Place(path, chunks, settings)
        with listen_for_scrapes(str(path)) as sock:
            async with place.endpoint.serving(sock):
                await work(place)

    asyncio.run(serve())


async def until_it_says(place: Place, request: bytes, status: int) -> None:
    end = asyncio.get_running_loop().time() + LIMIT_S
    while (await place.ask(request))[0] != status:
        assert asyncio.get_running_loop().time() < end


def test_a_page_is_whole_and_of_its_length(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        assert stat.S_ISSOCK(place.path.stat().st_mode)
        assert await place.ask() == (200, b"a 1\nb 2\n")
        assert await place.ask(GET.replace(b"GET", b"HEAD")) == (200, b"")
        assert await place.ask(GET.replace(b"metrics", b"metrics?x=1")) == (200, b"a 1\nb 2\n")

    at_work(tmp_path, work)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
        (b"GET /metrics SPDY/3\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST_BYTES + b"\r\n\r\n", 400),
    ],
)
def test_what_is_no_scrape_is_refused_with_a_word_of_why(
    tmp_path: Path, request_: bytes, status: int
) -> None:
    async def work(place: Place) -> None:
        found, body = await place.ask(request_)
        assert found == status
        assert body
        assert place.pages == 0

    at_work(tmp_path, work)


def test_the_loop_goes_on_between_the_parts_of_a_page(tmp_path: Path) -> None:
    turns: list[str] = []

    def chunks() -> Iterator[bytes]:
        loop = asyncio.get_running_loop()
        for part in range(5):
            turns.append(f"part {part}")
            loop.call_soon(turns.append, "other")
            yield b"x 1\n"

    async def work(place: Place) -> None:
        await place.ask()
        assert turns == [turn for part in range(5) for turn in (f"part {part}", "other")]

    at_work(tmp_path, work, chunks)


def test_those_who_ask_at_once_get_one_page(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        answers = await asyncio.gather(*(place.ask() for _ in range(5)))
        assert answers == [(200, b"a 1\nb 2\n")] * 5
        assert place.pages == 1

    at_work(tmp_path, work)


def test_there_are_so_many_connections_and_the_next_one_is_turned_away(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        kept = [await place.connect() for _ in range(2)]
        status, body = await place.ask()
        assert status == 503
        assert b"metrics.max_clients" in body
        for _, writer in kept:
            writer.close()
        await until_it_says(place, GET, 200)

    at_work(tmp_path, work, max_clients=2)


def test_whoever_says_nothing_is_hung_up_on(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        reader, writer = await place.connect()
        writer.write(b"GET /metrics HT")
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()
        assert (await place.ask())[0] == 200

    at_work(tmp_path, work, timeout_s=0.2)


def test_whoever_does_not_read_is_hung_up_on(tmp_path: Path) -> None:
    async def work(place: Place) -> None:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, str(place.path))
            await loop.sock_sendall(deaf, GET)
            # The place that it takes is free again before it has read anything.
            await until_it_says(place, b"GET / HTTP/1.1\r\n\r\n", 404)

    at_work(tmp_path, work, lambda: (b"x" * (64 << 20),), max_clients=1, timeout_s=0.3)


def test_whoever_goes_away_leaves_the_page_to_others(tmp_path: Path) -> None:
    gate: list[bool] = []

    def chunks() -> Iterator[bytes]:
        while not gate:
            yield b""
        yield b"x 1\n"

    async def work(place: Place) -> None:
        _, writer = await place.connect()
        writer.write(GET)
        await until(lambda: place.pages, "a page is being made")
        writer.transport.abort()
        # Who only shuts down its side may still read: this one is known by the limit on time.
        await until(lambda: not place.endpoint.clients, "it is gone")
        other = asyncio.create_task(place.ask())
        await until(lambda: place.endpoint.clients, "the other one asks")
        gate.append(True)
        assert await other == (200, b"x 1\n")
        assert place.pages == 1

    at_work(tmp_path, work, chunks, timeout_s=3.0)


def test_a_mistake_in_a_page_is_told_and_ends_nothing(tmp_path: Path) -> None:
    broken = [True]

    def chunks() -> Iterator[bytes]:
        yield b"a 1\n"
        if broken:
            raise LookupError("g1")

    async def work(place: Place) -> None:
        assert (await place.ask())[0] == 500
        assert place.errors == ["LookupError('g1')"]
        broken.clear()
        assert (await place.ask())[0] == 200

    at_work(tmp_path, work, chunks)


def test_it_listens_on_a_port_and_says_what_is_wrong_with_one() -> None:
    with listen_for_scrapes("127.0.0.1:0") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ListenError, match=rf"metrics.listen: .*127.0.0.1:{port}: .*in use"):
            listen_for_scrapes(f"127.0.0.1:{port}")
    with pytest.raises(ListenError, match=r"metrics\.listen: no\.such\.host\.invalid:1: "):
        listen_for_scrapes("no.such.host.invalid:1")
    with listen_for_scrapes("[::1]:0") as six:
        assert six.family == socket.AF_INET6
