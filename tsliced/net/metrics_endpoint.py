"""Serves metrics over HTTP, on a TCP port or a Unix socket, without holding up the event loop.

A page is made one part a turn of the loop, and whoever asks while one is being made, or right
after, gets the same. Connections are few and short: one request each, and a limit to all of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final

from tsliced.config import MetricsSettings
from tsliced.net.listening import ListenError, listen

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: A request with its headers; Prometheus sends some 400 bytes.
MAX_REQUEST_BYTES: Final = 8192
#: A page is good for so long.
FRESH_S: Final = 0.25

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class MetricsEndpoint:
    """Answers GET /metrics. All methods belong to the event loop."""

    def __init__(
        self,
        settings: MetricsSettings,
        chunks: Callable[[], Iterable[bytes]],
        on_error: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._chunks = chunks
        self._on_error = on_error
        #: By the task that answers it.
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._page: asyncio.Task[bytes] | None = None
        self._page_at = float("-inf")

    @property
    def clients(self) -> int:
        """How many connections there are."""
        return len(self._clients)

    @asynccontextmanager
    async def serving(self, sock: socket.socket) -> AsyncIterator[None]:
        """Serve a listening socket meanwhile."""
        start = asyncio.start_unix_server if sock.family == socket.AF_UNIX else asyncio.start_server
        server = await start(self._serve, sock=sock, limit=MAX_REQUEST_BYTES)
        try:
            yield
        finally:
            server.close()
            if self._page is not None:
                self._page.cancel()
            # Their tasks end by that, each in its own time.
            for writer in self._clients.values():
                writer.transport.abort()
            await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._answer(reader, writer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError):
            # Whoever does not read or goes away has no use for an answer.
            pass
        finally:
            del self._clients[task]
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        most = self._settings.max_clients
        if len(self._clients) > 2 * most:
            return
        is_one_too_many = len(self._clients) > most
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            _write(writer, 400, f"a request has at most {MAX_REQUEST_BYTES} bytes\n")
            return
        if is_one_too_many:
            _write(writer, 503, f"{most} others ask already (metrics.max_clients)\n")
            return
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            _write(writer, 400, "this is not HTTP/1\n")
        elif words[0] not in (b"GET", b"HEAD"):
            _write(writer, 405, "there is only GET\n")
        elif words[1].split(b"?", 1)[0] != b"/metrics":
            _write(writer, 404, "there is only /metrics\n")
        else:
            try:
                page = await self._whole_page()
            except Exception as exc:
                # The edge of this task: a mistake of ours in a page must not end the daemon.
                self._on_error(repr(exc))
                _write(writer, 500, "the daemon's log says why\n")
            else:
                _write(writer, 200, page, with_body=words[0] == b"GET")

    async def _whole_page(self) -> bytes:
        loop = asyncio.get_running_loop()
        if self._page is None or (self._page.done() and loop.time() - self._page_at > FRESH_S):
            self._page = loop.create_task(self._make_page(), name="metrics page")
        # Whoever gives up takes nothing from the others.
        return await asyncio.shield(self._page)

    async def _make_page(self) -> bytes:
        parts: list[bytes] = []
        for part in self._chunks():
            parts.append(part)
            await asyncio.sleep(0)
        self._page_at = asyncio.get_running_loop().time()
        return b"".join(parts)


def _write(
    writer: asyncio.StreamWriter, status: int, body: bytes | str, *, with_body: bool = True
) -> None:
    content = body.encode() if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content if with_body else head.encode())


def listen_for_scrapes(where: str) -> socket.socket:
    """Return a listening socket for ``metrics.listen``. Raises `ListenError`."""
    if where.startswith("/"):
        return listen(where, backlog=16, key="metrics.listen")
    address, _, port = where.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    except (OSError, OverflowError) as exc:
        raise ListenError(f"metrics.listen: {where}: {exc}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(16)
    except OSError as exc:
        sock.close()
        text = f"metrics.listen: cannot listen at {where}: {os.strerror(exc.errno or 0)}"
        raise ListenError(text) from exc
    sock.setblocking(False)
    return sock
