"""A Unix socket between clients and a daemon that loses, delays or cuts chosen frames.

It understands frames, so a rule can name the very message whose fate it decides: a request by its
name, an answer by that of the request. To the daemon every client is the process that the proxy
runs in.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

from libtimeslice.protocol import FrameReader, Message, encode

LIMIT_S = 30.0

Side = Literal["client", "daemon"]


class Fate(Enum):
    """What becomes of a frame."""

    #: It vanishes; the connection goes on.
    DROP = "drop"
    #: It vanishes, and both sides find the connection closed.
    CUT = "cut"
    #: It arrives, and then the connection is closed.
    CUT_AFTER = "cut after"
    #: A part of it arrives, and then the connection is closed.
    TEAR = "tear"
    #: It arrives twice.
    REPEAT = "repeat"


@dataclass(slots=True)
class Rule:
    """Decides on the next `times` frames of a kind."""

    sender: Side
    #: A request or a notification; from the daemon also the name of the request that is answered.
    name: str
    fate: Fate | float
    times: int = 1
    #: Seen and dealt with.
    done: int = 0

    @property
    def left(self) -> int:
        return self.times - self.done


@dataclass(eq=False)
class _Pair:
    """One client's connection and the one to the daemon that belongs to it."""

    client: socket.socket
    daemon: socket.socket
    names: dict[int, str] = field(default_factory=dict)
    #: Of the daemon's own requests.
    asked: dict[int, str] = field(default_factory=dict)

    def close(self) -> None:
        for sock in (self.client, self.daemon):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class LossyProxy:
    """See the top of the module. Use it in a `with`."""

    def __init__(self, path: Path, upstream: Path) -> None:
        self.path = path
        self.changed = threading.Condition()
        #: What passed or was to pass, in order: who sent it, and its name.
        self.seen: list[tuple[Side, str]] = []
        #: Whole messages, as they came.
        self.messages: list[tuple[Side, Message]] = []
        #: Called with each frame before its rule is looked for, in the thread that carries it.
        self.on_frame: Callable[[Side, str, Message], object] | None = None
        self._upstream = upstream
        self._rules: list[Rule] = []
        self._pairs: list[_Pair] = []
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> LossyProxy:
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def rule(self, sender: Side, name: str, fate: Fate | float, times: int = 1) -> Rule:
        """Adds a rule; a number is a delay in seconds, also of all that comes behind."""
        rule = Rule(sender, name, fate, times)
        with self.changed:
            self._rules.append(rule)
        return rule

    def cut(self) -> None:
        """Closes all connections that are open now."""
        with self.changed:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.close()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Waits until something is true that a frame brings about."""
        with self.changed:
            assert self.changed.wait_for(condition, LIMIT_S), what

    def count(self, sender: Side, name: str) -> int:
        """How many messages of a kind came by."""
        with self.changed:
            return self.seen.count((sender, name))

    # --- carrying -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            daemon = socket.socket(socket.AF_UNIX)
            try:
                daemon.connect(str(self._upstream))
            except OSError:  # it is being started again; the client will come back
                client.close()
                daemon.close()
                continue
            pair = _Pair(client, daemon)
            with self.changed:
                self._pairs.append(pair)
            threads = [
                threading.Thread(target=self._carry, args=(pair, side), daemon=True)
                for side in ("client", "daemon")
            ]
            for thread in threads:
                thread.start()
            threading.Thread(target=self._end, args=(pair, threads), daemon=True).start()

    def _end(self, pair: _Pair, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join()
        pair.client.close()
        pair.daemon.close()
        with self.changed:
            self._pairs.remove(pair)

    def _carry(self, pair: _Pair, sender: Side) -> None:
        source, sink = pair.client, pair.daemon
        if sender == "daemon":
            source, sink = sink, source
        reader = FrameReader()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for message in reader.feed(data):
                    self._pass_on(pair, sender, sink, message)
        pair.close()

    def _pass_on(self, pair: _Pair, sender: Side, sink: socket.socket, message: Message) -> None:
        name = _name(pair, sender, message)
        if self.on_frame is not None:
            self.on_frame(sender, name, message)
        rule = self._note(sender, name, message)
        frame = encode(message)
        if rule is None:
            sink.sendall(frame)
            return
        fate = rule.fate
        if isinstance(fate, float):
            time.sleep(fate)
        if fate is Fate.TEAR:
            sink.sendall(frame[: len(frame) // 2])
        elif fate not in (Fate.DROP, Fate.CUT):
            sink.sendall(frame)
        if fate is Fate.REPEAT:
            sink.sendall(frame)
        if fate in (Fate.CUT, Fate.CUT_AFTER, Fate.TEAR):
            pair.close()
            raise OSError("cut")

    def _note(self, sender: Side, name: str, message: Message) -> Rule | None:
        with self.changed:
            self.seen.append((sender, name))
            self.messages.append((sender, message))
            rules = (r for r in self._rules if (r.sender, r.name) == (sender, name) and r.left > 0)
            rule = next(rules, None)
            if rule is not None:
                rule.done += 1
            self.changed.notify_all()
            return rule


def _name(pair: _Pair, sender: Side, message: Message) -> str:
    """Returns the name of a message, and remembers what its answer will answer."""
    own, others = (pair.names, pair.asked) if sender == "client" else (pair.asked, pair.names)
    answered = message.get("re")
    if isinstance(answered, int):
        return others.get(answered, "?")
    name = str(message.get("t"))
    number = message.get("id")
    if isinstance(number, int):
        own[number] = name
    return name
