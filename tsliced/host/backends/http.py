"""Requests to serving engines, each in a thread of its own.

An engine may take minutes for an answer, and the standard library's client is all that a request
with a small answer needs. Nothing that is raised here has a credential in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
from typing import Any, Final
from urllib.parse import urlsplit

from tsliced.config.backends import EngineAddress

#: An answer is a few words; more of it is not read.
MAX_ANSWER_BYTES: Final = 64 * 1024
#: What is shown of an answer that is a refusal.
MAX_SHOWN: Final = 300


class HttpError(Exception):
    """A request was refused, or not answered; the text is fit to be shown."""

    def __init__(self, text: str, *, status: int | None = None, is_timeout: bool = False) -> None:
        super().__init__(text)
        #: Of the answer; None: there was none.
        self.status = status
        self.is_timeout = is_timeout


class HttpClient:
    """Speaks with one engine. `token` goes along as a bearer token, and is never shown."""

    def __init__(self, address: EngineAddress, token: str | None = None) -> None:
        self.address = address
        self._token = token

    async def request(
        self, method: str, path: str, *, timeout_s: float, body: object = None
    ) -> Any:
        """Return the answer's JSON, None if it has none. Raises `HttpError`.

        After the time-out the connection is closed; the engine may go on all the same.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[bytes] = loop.create_future()
        exchange = _Exchange(self.address, self._token, timeout_s)

        def deliver(answer: bytes, error: Exception | None) -> None:
            if answered.done():
                return
            if error is not None:
                answered.set_exception(error)
            else:
                answered.set_result(answer)

        def work() -> None:
            answer, error = b"", None
            try:
                answer = exchange.run(method, path, body)
            except Exception as exc:
                error = exc
            # A loop that was closed meanwhile has nobody who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver, answer, error)

        threading.Thread(target=work, name="engine request", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                return _parse(await answered)
        except TimeoutError as exc:
            text = f"{method} {path} was not answered within {timeout_s:g} s"
            raise HttpError(self._shown(text), is_timeout=True) from exc
        except HttpError as exc:
            raise HttpError(self._shown(str(exc)), status=exc.status) from None
        except (OSError, http.client.HTTPException, ValueError) as exc:
            text = f"{method} {path} failed: {str(exc) or type(exc).__name__}"
            raise HttpError(self._shown(text)) from None
        finally:
            exchange.cut_off()

    def _shown(self, text: str) -> str:
        """Return a text about this engine, without its token, on one line."""
        if self._token:
            text = text.replace(self._token, "***")
        words = " ".join(text.split())
        printable = "".join(char if char.isprintable() else "?" for char in words)
        return f"the engine at {self.address.url}: {printable}"


class _Exchange:
    """One request and its answer, in a thread; the loop may cut it off."""

    def __init__(self, address: EngineAddress, token: str | None, timeout_s: float) -> None:
        self._token = token
        self._prefix = urlsplit(address.url).path
        if address.is_tls:
            context = ssl.create_default_context()
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.host, address.port, timeout=timeout_s, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(
                address.host, address.port, timeout=timeout_s
            )

    def run(self, method: str, path: str, body: object) -> bytes:
        headers = {"Connection": "close", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        try:
            self._connection.request(method, self._prefix + path, body=data, headers=headers)
            with self._connection.getresponse() as response:
                answer = response.read(MAX_ANSWER_BYTES)
                if response.status // 100 == 2:
                    return answer
                said = answer.decode(errors="replace")[:MAX_SHOWN]
                raise HttpError(
                    f"{method} {path} was answered {response.status}: {said}",
                    status=response.status,
                )
        finally:
            self._connection.close()

    def cut_off(self) -> None:
        """Let a thread that still waits see the end of its connection."""
        # It is another thread's: it may be closed at this very moment.
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _parse(answer: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(answer)
    return None
