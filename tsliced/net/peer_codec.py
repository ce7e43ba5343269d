"""What the cores of two hosts tell each other <-> the fields of a `Say`.

Fields go by position. Within a major version a kind may get more fields, at its end and with
defaults: a side that does not know them leaves them out or does not look at them.

Some fields never travel: who says a report and whom an order is for is known by the link, and the
secret of a session is nobody else's.

Safety rule: whatever comes in, `decode_untrusted` returns or raises `PeerRefused`, and nothing
else. Names, texts, numbers and rows that come out of it are as bounded as those of clients.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgpack

from libtimeslice.fields import MAX_ID, MAX_PID, MAX_SECRET, MAX_TEXT, MAX_TIMEOUT_S, MAX_UID
from tsliced.codec import (
    Codec,
    CodecError,
    Codecs,
    Convert,
    fetch_of,
    items_of,
    packer_of,
    product,
    shown,
    value_of_member,
)
from tsliced.core.events import SessionOpened
from tsliced.core.messages import PeerMessage
from tsliced.core.model import Counter, HostName, JobKey, ProcessId
from tsliced.core.signals import Order, Report
from tsliced.core.value import maker
from tsliced.net.peer_messages import PeerRefused, Say

#: Entries of one row, for example ranks of a host.
MAX_ITEMS: Final = 65_536
#: Values of one kind that are kept, because they come again and again.
MAX_KNOWN: Final = 65_536
#: Characters of a text that explains something; what is longer is cut off.
MAX_REASON: Final = 4096

#: Fields that do not travel, and what they are to the side that hears of them.
_UNSAID: Final[Mapping[type[Any], tuple[str, Callable[[HostName, HostName], object]]]] = {
    Order: ("host", lambda _speaker, listener: listener),
    Report: ("host", lambda speaker, _listener: speaker),
    SessionOpened: ("secret", lambda _speaker, _listener: b""),
}


class _PeerCodecs(Codecs):
    """Lets through what is within the limits that clients have too."""

    def of(self, hint: Any) -> Codec:
        if isinstance(hint, typing.NewType) and hint.__supertype__ is str:
            return _name()
        return super().of(hint)

    def field(self, owner: type, name: str, hint: Any) -> Codec:
        special = _FIELDS.get((owner, name))
        return special if special is not None else super().field(owner, name, hint)

    def scalar(self, kind: type) -> Codec:
        match kind.__name__:
            case "str":
                return Codec(None, _text_untrusted)
            case "int":
                return _whole(0, MAX_ID)
            case "bytes":
                return _bytes()
            case _:
                return super().scalar(kind)

    def number(self) -> Codec:
        return Codec(None, _number_untrusted)

    def items(self, value: object) -> Sequence[object]:
        items = items_of(value)
        if len(items) > MAX_ITEMS:
            raise CodecError(f"{len(items)} entries, and {MAX_ITEMS} are the most")
        return items

    def product(self, codecs: Sequence[Codec], make: Callable[..., Any]) -> Codec:
        return _remembering(product(codecs, None, make))

    def of_dataclass(self, kind: type[Any]) -> Codec:
        row = self.row(kind, [field.name for field in dataclasses.fields(kind)])
        return Codec(row.pack, lambda value: kind(**row.unpack(value)))

    def row(self, kind: type[Any], names: Sequence[str]) -> Codec:
        """Return the codec of these fields of a dataclass, which unpacks to a map of them."""
        codecs = self.fields(kind, names)
        defaults = {
            f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING
        }
        least = max((i for i, name in enumerate(names, 1) if name not in defaults), default=0)
        unpackers = [(name, codec.unpack) for name, codec in zip(names, codecs, strict=True)]

        def unpack(value: object) -> dict[str, object]:
            items = items_of(value)
            if len(items) < least:
                raise CodecError(f"{len(items)} fields of at least {least}")
            pairs = zip(unpackers, items, strict=False)
            return {name: convert(item) for (name, convert), item in pairs}

        return Codec(packer_of(codecs, fetch_of(names)), unpack)


def _remembering(codec: Codec) -> Codec:
    """Return a codec that knows values again: jobs, stamps and ranks with their states.

    To look a value up costs a tenth of what it costs to check and make it. `True` is then taken for
    a 1 that came before it, which is what it becomes: what comes out was checked.
    """
    known: dict[object, object] = {}
    unpack = codec.unpack

    def recall(value: object) -> object:
        try:
            return known[value]
        except KeyError:
            pass
        except TypeError:
            # Lists, of another implementation, or what should not be there.
            return unpack(value)
        found = unpack(value)
        if len(known) >= MAX_KNOWN:
            known.clear()
        known[value] = found
        return found

    return Codec(codec.pack, recall)


def _name(*, least: int = 1) -> Codec:
    """Return the codec of a string that something is found by: it comes as it is, or not at all."""

    def unpack(value: object) -> str:
        if isinstance(value, str) and least <= len(value) <= MAX_TEXT and value.isprintable():
            return value
        raise CodecError(f"{shown(value)} where a name was expected")

    return Codec(None, unpack)


def _text_untrusted(value: object) -> str:
    # For people: an odd character in an error's text is no reason to leave each other.
    if not isinstance(value, str):
        raise CodecError(f"{shown(value)} where a text was expected")
    text = value[:MAX_REASON]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _number_untrusted(value: object) -> float:
    if value.__class__ in (float, int) and math.fabs(typing.cast("float", value)) <= MAX_TIMEOUT_S:
        return float(typing.cast("float", value))
    raise CodecError(f"{shown(value)} where a number was expected")


def _whole(least: int, most: int) -> Codec:
    def unpack(value: object) -> int:
        # Exact, because a bool is an int.
        if type(value) is int and least <= value <= most:
            return value
        raise CodecError(f"{shown(value)} where a whole number {least}..{most} was expected")

    return Codec(None, unpack)


def _bytes() -> Codec:
    def unpack(value: object) -> bytes:
        if isinstance(value, bytes) and len(value) <= MAX_SECRET:
            return value
        raise CodecError(f"{shown(value)} where at most {MAX_SECRET} bytes were expected")

    return Codec(None, unpack)


_HALF: Final = _whole(0, (1 << 32) - 1)
#: Fields with limits of their own.
_FIELDS: Final[Mapping[tuple[type, str], Codec]] = {
    (JobKey, "cluster"): _name(least=0),
    # -1: the user of a stranger that ended before it was looked at.
    (JobKey, "uid"): _whole(-1, MAX_UID),
    (JobKey, "id"): _name(),
    (ProcessId, "pid"): _whole(1, MAX_PID),
    # Clients are told both as one number.
    (Counter, "generation"): _HALF,
    (Counter, "number"): _HALF,
}


class _Kind(NamedTuple):
    name: str
    pack: Convert
    unpack: Callable[[object, HostName, HostName], PeerMessage]


def _kind(codecs: _PeerCodecs, kind: type[Any]) -> _Kind:
    unsaid, tell = _UNSAID.get(kind, ("", None))
    names = [field.name for field in dataclasses.fields(kind) if field.name != unsaid]
    row = codecs.row(kind, names)
    assert row.pack is not None
    make = maker(kind)

    def unpack(value: object, speaker: HostName, listener: HostName) -> PeerMessage:
        fields = row.unpack(value)
        if tell is not None:
            fields[unsaid] = tell(speaker, listener)
        message: PeerMessage = make(**fields)
        return message

    # On the wire `SessionOpened` is "session_opened".
    name = re.sub(r"\B(?=[A-Z])", "_", kind.__name__).lower()
    return _Kind(name, row.pack, unpack)


_KINDS: Final = {kind: _kind(_PeerCodecs(), kind) for kind in typing.get_args(PeerMessage)}
_BY_NAME: Final = {kind.name: kind for kind in _KINDS.values()}
#: Texts of errors may hold what the operating system gave us in no known encoding.
_pack: Final[Callable[[object], bytes]] = msgpack.Packer(
    default=value_of_member, unicode_errors="replace"
).pack


def encode(message: PeerMessage) -> bytes:
    """Return the body of the frame of a `Say`."""
    name, pack, _ = _KINDS[type(message)]
    return _pack({"t": "say", "k": name, "f": pack(message)})


class Encoder:
    """Encodes what many hosts are told once."""

    def __init__(self) -> None:
        self._order: Order | None = None
        self._body = b""

    def encode(self, message: PeerMessage) -> bytes:
        """Return the body of the frame of a `Say`."""
        if message.__class__ is not Order:
            return encode(message)
        last = self._order
        # Equal orders of one barrier are of the same objects; to look deeper costs as much as
        # encoding.
        if (
            last is None
            or last.stamp is not message.stamp
            or last.tenancy is not message.tenancy
            or last.goal is not message.goal
        ):
            self._order, self._body = message, encode(message)
        return self._body


def decode_untrusted(said: Say, *, speaker: HostName, listener: HostName) -> PeerMessage:
    """Return what a host said. Raises `PeerRefused` (``bad_message``)."""
    kind = _BY_NAME.get(said.kind)
    if kind is None:
        raise PeerRefused("bad_message", f"there is nothing called {said.kind!r:.80} to be said")
    try:
        return kind.unpack(said.fields, speaker, listener)
    except CodecError as exc:
        raise PeerRefused("bad_message", f"{said.kind}: {exc}") from exc
