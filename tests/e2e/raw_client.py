"""A client that sends whatever bytes a test wants, and reads what comes back."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness import LIMIT_S
from history import Recorder, directory_of

from libtimeslice.protocol import FrameReader, Message, encode

HELLO: Message = {"t": "hello", "version": [1, 0], "client": "raw", "caps": [], "job": "raw"}


class RawClient:
    """One connection. Its session outlives it: a test that holds something says bye."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(str(path))
        self._reader = FrameReader()
        self._messages: list[Message] = []
        self._ids = 0
        self._recorder = Recorder(directory_of(path))
        self._job = ""
        #: Numbers in the history of the acquires that have no answer yet, by request.
        self._asked: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._recorder.write("left")
        self._recorder.close()
        self.socket.close()

    def hello(self, **fields: object) -> Message:
        """Says hello, and returns the welcome or the error."""
        self.send({**HELLO, **fields})
        return self.receive()

    def send(self, message: Message) -> None:
        match message:
            case {"t": "acquire", "id": int(number), "groups": [*groups]}:
                ranks = message.get("ranks") or 1
                self._asked[number] = self._recorder.invoke(self._job, groups, ranks)
            case {"t": "release", "lease": str(lease)}:
                self._recorder.release(lease)
            case _:
                pass
        self.socket.sendall(encode(message))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def start(self, name: str, **fields: object) -> int:
        """Sends a request and returns its id."""
        self._ids += 1
        self.send({"t": name, "id": self._ids, **fields})
        return self._ids

    def ask(self, name: str, **fields: object) -> Message:
        """Sends a request and returns its answer; what comes before it is dropped."""
        return self.answer_to(self.start(name, **fields))

    def answer_to(self, request: int) -> Message:
        """Waits for an answer; what comes before it is dropped."""
        while (message := self.receive()).get("re") != request:
            pass
        return message

    def refusal(self, name: str, **fields: object) -> tuple[str, str]:
        """Sends a request that must be refused; returns the code and the message."""
        error: dict[str, Any] = self.ask(name, **fields)["err"]
        return error["code"], error["message"]

    def receive(self) -> Message:
        """Waits for a message; raises EOFError if the daemon hung up."""
        while not self._messages:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._messages = self._reader.feed(data)
        message = self._messages.pop(0)
        self._record(message)
        return message

    def _record(self, message: Message) -> None:
        match message:
            case {"t": "welcome", "job": {"uid": uid, "id": name}}:
                self._job = f"{uid}/{name}"
            case {"t": "lost", "lease": lease, "reason": reason}:
                self._recorder.lost(lease, reason)
            case {"re": request, "lease": lease, "tokens": tokens} if request in self._asked:
                self._recorder.ok(self._asked.pop(request), self._job, lease, tokens)
            case {"re": request, "err": {"code": code}} if request in self._asked:
                self._recorder.fail(self._asked.pop(request), code)
            case _:
                pass

    def is_hung_up(self) -> bool:
        """Waits for the daemon to close, and returns whether nothing came before that."""
        try:
            self.receive()
        except (EOFError, ConnectionResetError):
            return True
        return False
