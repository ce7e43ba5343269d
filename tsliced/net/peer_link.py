"""How a connection to the daemon of another host is made, and both sides know each other.

Of two hosts the one whose name comes first connects, so that there is one connection for each pair,
whoever starts first.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tsliced.config import PeerAddress, PeerSettings
from tsliced.core.model import HostName
from tsliced.net.munge import Munge
from tsliced.net.peer_auth import (
    Credentials,
    Exchange,
    Half,
    check_half,
    open_half_untrusted,
)
from tsliced.net.peer_messages import (
    NONCE_BYTES,
    PEER_VERSION,
    Challenge,
    Credential,
    Greeting,
    Hello,
    PeerRefused,
    Proof,
    Welcome,
    check_agreement,
    check_greeting,
)
from tsliced.net.peer_stream import Link, PeerGone, refused_by_tls


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this daemon is to others, and what it goes by."""

    host: HostName
    settings: PeerSettings
    credentials: Credentials
    #: What to say to a host.
    hello: Callable[[HostName], Hello]
    allowed: frozenset[str]


def new_incarnation() -> str:
    """Return what tells this run of the daemon from all others on this host."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}"


async def dial(identity: Identity, host: HostName, where: PeerAddress) -> tuple[Link, Hello]:
    """Connect to a host; return the link and what the host said of itself.

    Raises `PeerGone` or `PeerRefused`.
    """
    settings, context = identity.settings, identity.credentials.dialing
    link = Link(settings)
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            await asyncio.get_running_loop().create_connection(
                lambda: link, where.address, where.port, ssl=context
            )
    except TimeoutError as exc:
        limit_s = settings.connect_timeout_s
        raise PeerGone(f"{where} did not take a connection within {limit_s:g} s") from exc
    except ssl.SSLError as exc:
        raise refused_by_tls(exc) from exc
    except OSError as exc:
        raise PeerGone(f"{where}: {exc.strerror or exc}") from exc
    async with _limited(link, settings, f"{where} did not answer as a daemon"):
        link.check_certificate(host)
        return link, await _introduce(link, identity, host)


async def _introduce(link: Link, identity: Identity, host: HostName) -> Hello:
    """Say who this is, as the side that connected."""
    credentials, nonce = identity.credentials, secrets.token_bytes(NONCE_BYTES)
    link.send(
        Greeting(
            version=PEER_VERSION, auth=credentials.auth, host=identity.host, to=host, nonce=nonce
        )
    )
    exchange = None
    if credentials.auth == "psk":
        exchange = await _prove(link, identity, host, nonce)
    elif credentials.munge is not None:
        exchange = await _prove_by_munge(link, credentials.munge, identity.host, host, nonce)
    if exchange is not None:
        link.frames.use_keys(sending=exchange.key_of_dialer(), receiving=exchange.key_of_acceptor())
    link.trust()
    ours = identity.hello(host)
    link.send(ours)
    welcome = await link.expect(Welcome)
    assert isinstance(welcome, Welcome)
    _check_hello(ours, welcome.hello, host, identity.settings)
    return welcome.hello


async def _prove(link: Link, identity: Identity, host: HostName, nonce: bytes) -> Exchange:
    challenge = await link.expect(Challenge)
    assert isinstance(challenge, Challenge)
    exchange = Exchange(
        secret=identity.credentials.secret,
        dialer=identity.host,
        acceptor=host,
        dialer_nonce=nonce,
        acceptor_nonce=challenge.nonce,
    )
    exchange.check(challenge.proof, exchange.proof_of_acceptor(), host)
    link.send(Proof(proof=exchange.proof_of_dialer()))
    return exchange


async def _prove_by_munge(
    link: Link, munge: Munge, here: HostName, host: HostName, nonce: bytes
) -> Exchange:
    credential = await link.expect(Credential)
    assert isinstance(credential, Credential)
    theirs = await open_half_untrusted(munge, credential.text, host)
    expected = replace(theirs, part="acceptor", dialer=here, acceptor=host, dialer_nonce=nonce)
    check_half(theirs, expected, host)
    ours = replace(theirs, part="dialer", key=secrets.token_bytes(NONCE_BYTES))
    link.send(Credential(text=await ours.seal(munge)))
    return _exchange_of(theirs.key, ours)


def _exchange_of(acceptor_key: bytes, dialer: Half) -> Exchange:
    return Exchange(
        secret=acceptor_key + dialer.key,
        dialer=dialer.dialer,
        acceptor=dialer.acceptor,
        dialer_nonce=dialer.dialer_nonce,
        acceptor_nonce=dialer.acceptor_nonce,
    )


async def receive_link(identity: Identity, sock: socket.socket) -> tuple[Link, Hello]:
    """Find out who connected, and that it may; return the link and what it said of itself.

    Raises `PeerGone` or `PeerRefused`. The socket is closed then.
    """
    loop, settings = asyncio.get_running_loop(), identity.settings
    context = identity.credentials.accepting
    limit_s = settings.greeting_timeout_s if context is not None else None
    link = Link(settings)
    try:
        # With TLS, uvloop returns a protocol of its own.
        await loop.connect_accepted_socket(
            lambda: link, sock, ssl=context, ssl_handshake_timeout=limit_s
        )
    except ssl.SSLError as exc:
        raise refused_by_tls(exc) from exc
    except OSError as exc:
        # asyncio sends no TLS alert when it refuses a certificate, so this is all that is seen.
        text = "TLS: it ended the handshake; it may not accept the certificate of this host"
        raise PeerRefused("auth", text) from exc
    async with _limited(link, settings, "it did not say who it is"):
        return link, await _receive(link, identity)


async def _receive(link: Link, identity: Identity) -> Hello:
    """Hear who it is, as the side that was connected to."""
    credentials = identity.credentials
    greeting = await link.expect(Greeting)
    assert isinstance(greeting, Greeting)
    allowed = identity.allowed
    check_greeting(greeting, host=identity.host, auth=credentials.auth, allowed=allowed)
    link.check_certificate(greeting.host)
    host = HostName(greeting.host)
    exchange = None
    if credentials.auth == "psk":
        exchange = await _have_proved(link, identity, greeting)
    elif credentials.munge is not None:
        exchange = await _have_proved_by_munge(link, credentials.munge, greeting)
    if exchange is not None:
        link.frames.use_keys(sending=exchange.key_of_acceptor(), receiving=exchange.key_of_dialer())
    link.trust()
    try:
        theirs = await link.expect(Hello)
        assert isinstance(theirs, Hello)
        ours = identity.hello(host)
        _check_hello(ours, theirs, host, identity.settings)
    except PeerRefused as exc:
        exc.host = host
        raise
    link.send(Welcome(hello=ours))
    return theirs


async def _have_proved(link: Link, identity: Identity, greeting: Greeting) -> Exchange:
    exchange = Exchange(
        secret=identity.credentials.secret,
        dialer=greeting.host,
        acceptor=identity.host,
        dialer_nonce=greeting.nonce,
        acceptor_nonce=secrets.token_bytes(NONCE_BYTES),
    )
    link.send(Challenge(nonce=exchange.acceptor_nonce, proof=exchange.proof_of_acceptor()))
    answer = await link.expect(Proof)
    assert isinstance(answer, Proof)
    exchange.check(answer.proof, exchange.proof_of_dialer(), greeting.host)
    return exchange


async def _have_proved_by_munge(link: Link, munge: Munge, greeting: Greeting) -> Exchange:
    ours = Half(
        part="acceptor",
        dialer=greeting.host,
        acceptor=greeting.to,
        dialer_nonce=greeting.nonce,
        acceptor_nonce=secrets.token_bytes(NONCE_BYTES),
        key=secrets.token_bytes(NONCE_BYTES),
    )
    link.send(Credential(text=await ours.seal(munge)))
    credential = await link.expect(Credential)
    assert isinstance(credential, Credential)
    theirs = await open_half_untrusted(munge, credential.text, greeting.host)
    check_half(theirs, replace(ours, part="dialer"), greeting.host)
    return _exchange_of(ours.key, theirs)


def _check_hello(ours: Hello, theirs: Hello, host: HostName, settings: PeerSettings) -> None:
    if theirs.host != host:
        raise PeerRefused("auth", f"it said that it is {host}, and then {theirs.host}")
    check_agreement(ours, theirs, suspect_s=settings.suspect_s)


@asynccontextmanager
async def _limited(link: Link, settings: PeerSettings, what: str) -> AsyncIterator[None]:
    """Give both sides a limited time to know each other, and close the link if they do not."""
    limit_s = settings.greeting_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as exc:
        link.drop("")
        raise PeerGone(f"{what} within {limit_s:g} s") from exc
    except PeerRefused as exc:
        link.refuse(exc)
        raise
    except BaseException:
        link.drop("")
        raise
