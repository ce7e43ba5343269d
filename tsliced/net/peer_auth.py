"""How two daemons prove to each other who they are: certificates, or a key that both have or use.

With a shared key both sides answer a challenge, over fresh random numbers of both and the names and
parts of both, so that no answer fits anywhere else. From the same numbers comes a key for each
direction. Whoever has the key may call itself any host; and what is sent can be read on the way.

With MUNGE each side sends a credential that only a daemon's user can make and open, over the same
and with a half of a key in it: what comes of both halves takes the place of the shared key.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import msgpack

from tsliced.config import PeerSettings
from tsliced.net.munge import Munge, MungeError
from tsliced.net.peer_messages import NONCE_BYTES, PEER_VERSION, PeerRefused

MIN_SECRET_BYTES: Final = 32
MAX_SECRET_BYTES: Final = 4096
#: So that what is made here fits nothing else.
_PURPOSE: Final = "tsliced peers"


class PeerAuthError(Exception):
    """Keys or certificates cannot be used; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What this host proves itself with."""

    auth: str
    secret: bytes = b""
    dialing: ssl.SSLContext | None = None
    accepting: ssl.SSLContext | None = None
    munge: Munge | None = None

    def close(self) -> None:
        """Take leave of what was opened."""
        if self.munge is not None:
            self.munge.close()


def load_credentials(peers: PeerSettings, host: str) -> Credentials:
    """Read keys and certificates, and see that they are good for this host.

    Raises `PeerAuthError`.
    """
    assert peers.auth is not None
    if peers.auth == "psk":
        return Credentials(auth="psk", secret=_read_secret(peers.secret_file))
    if peers.auth == "munge":
        try:
            # A call that takes longer has used up the time of the greeting.
            munge = Munge(peers.munge_socket, timeout_s=peers.greeting_timeout_s / 2)
        except MungeError as exc:
            raise PeerAuthError(str(exc)) from exc
        return Credentials(auth="munge", munge=munge)
    if peers.auth == "none":
        return Credentials(auth="none")
    _check_private(peers.key_file)
    dialing = _context(peers, ssl.PROTOCOL_TLS_CLIENT)
    accepting = _context(peers, ssl.PROTOCOL_TLS_SERVER)
    names = _names_by_trial(dialing, accepting, peers.cert_file)
    if host not in names:
        has = ", ".join(sorted(names)) or "nobody"
        raise PeerAuthError(
            f"{peers.cert_file} is a certificate for {has}, and this host is {host}: "
            "set daemon.host, or make one with tslicectl cluster init"
        )
    return Credentials(auth="tls", dialing=dialing, accepting=accepting)


def _read_secret(path: str) -> bytes:
    _check_private(path)
    try:
        with open(path, "rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as exc:
        raise PeerAuthError(f"{path} cannot be read: {exc.strerror}") from exc
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise PeerAuthError(
            f"{path} has {len(secret)} bytes; a key has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}: "
            "make one with tslicectl cluster init --auth psk"
        )
    return secret


def _check_private(path: str) -> None:
    try:
        found = os.stat(path)
    except OSError as exc:
        raise PeerAuthError(f"{path} cannot be read: {exc.strerror}") from exc
    # A group may read it, as with the keys of other services; only its owner may change it.
    if found.st_mode & (stat.S_IWGRP | stat.S_IRWXO) or found.st_uid not in (0, os.geteuid()):
        raise PeerAuthError(f"{path} is open to others, or theirs: chmod 600 and chown it")


def _context(peers: PeerSettings, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Names of hosts are compared here, the same way on both sides: see `check_certificate`.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(peers.cert_file, peers.key_file)
    except (OSError, ssl.SSLError) as exc:
        what = f"{peers.cert_file} and {peers.key_file}"
        raise PeerAuthError(f"{what} are no certificate with its key: {exc}") from exc
    try:
        context.load_verify_locations(peers.ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise PeerAuthError(f"{peers.ca_file} is no certificate of an authority: {exc}") from exc
    return context


def _names_by_trial(
    dialing: ssl.SSLContext, accepting: ssl.SSLContext, cert_file: str
) -> frozenset[str]:
    """Return whom this host's certificate is for, after it has passed in a handshake with itself.

    What others would refuse (an end that has come, another authority) is found out here.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = dialing.wrap_bio(to_client, to_server, server_side=False)
    server = accepting.wrap_bio(to_server, to_client, server_side=True)
    try:
        # Each side waits for the other at most twice in TLS 1.3.
        for _ in range(4):
            done = [_go_on(side) for side in (client, server)]
            if all(done):
                return names_in(client.getpeercert())
    except ssl.SSLError as exc:
        reason = getattr(exc, "verify_message", None) or exc.reason or str(exc)
        raise PeerAuthError(f"{cert_file} would be refused by other hosts: {reason}") from exc
    raise PeerAuthError(f"{cert_file} cannot be tried: the handshake does not end")


def _go_on(side: ssl.SSLObject) -> bool:
    """Take a handshake as far as it goes; return whether it has ended."""
    with suppress(ssl.SSLWantReadError):
        side.do_handshake()
        return True
    return False


def names_in(certificate: Any) -> frozenset[str]:
    """Return the names of hosts that a certificate is for, as `ssl` describes it."""
    names = (certificate or {}).get("subjectAltName", ())
    return frozenset(value for kind, value in names if kind == "DNS")


def check_certificate(certificate: Any, host: str) -> None:
    """Raise `PeerRefused` (``auth``) if a certificate that passed is not for this host."""
    names = names_in(certificate)
    if host not in names:
        has = ", ".join(sorted(names)) or "nobody"
        raise PeerRefused("auth", f"the certificate is for {has}, and not for {host}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What both sides of one connection put into the proofs that they have the key."""

    secret: bytes
    dialer: str
    acceptor: str
    dialer_nonce: bytes
    acceptor_nonce: bytes

    def proof_of_acceptor(self) -> bytes:
        """Return what shows that the side that was connected to has the key."""
        return self._derive("acceptor proves")

    def proof_of_dialer(self) -> bytes:
        """Return what shows that the side that connected has it."""
        return self._derive("dialer proves")

    def check(self, proof: bytes, expected: bytes, host: str) -> None:
        """Raise `PeerRefused` (``auth``) if a proof is not what it has to be."""
        if not hmac.compare_digest(proof, expected):
            raise PeerRefused("auth", f"{host} has another key: see peers.secret_file on both")

    def key_of_dialer(self) -> bytes:
        """Return the key for frames of the side that connected."""
        return self._derive("dialer sends")

    def key_of_acceptor(self) -> bytes:
        """Return the key for frames of the other side."""
        return self._derive("acceptor sends")

    def _derive(self, purpose: str) -> bytes:
        names = [self.dialer, self.acceptor, self.dialer_nonce, self.acceptor_nonce]
        text = msgpack.packb([_PURPOSE, list(PEER_VERSION)[:1], purpose, *names])
        return hmac.digest(self.secret, text, "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """What one side of a connection puts into its credential."""

    part: str
    dialer: str
    acceptor: str
    dialer_nonce: bytes
    acceptor_nonce: bytes
    key: bytes

    async def seal(self, munge: Munge) -> str:
        """Return the credential. Raises `PeerRefused` (``auth``)."""
        values = [getattr(self, field.name) for field in fields(self)]
        try:
            return await munge.seal(msgpack.packb([_PURPOSE, *values]))
        except MungeError as exc:
            raise PeerRefused("auth", f"munge: {exc}") from exc


async def open_half_untrusted(munge: Munge, credential: str, host: str) -> Half:
    """Return what a credential holds. Raises `PeerRefused` (``auth``)."""
    try:
        data = await munge.open(credential)
    except MungeError as exc:
        raise PeerRefused("auth", f"munge: {exc}") from exc
    try:
        purpose, part, dialer, acceptor, dialer_nonce, acceptor_nonce, key = msgpack.unpackb(data)
    except Exception as exc:  # of msgpack, which has no root, or of another shape
        raise PeerRefused("auth", f"the credential of {host} holds something else") from exc
    numbers = (dialer_nonce, acceptor_nonce, key)
    if purpose != _PURPOSE or not all(
        isinstance(number, bytes) and len(number) == NONCE_BYTES for number in numbers
    ):
        raise PeerRefused("auth", f"the credential of {host} is for something else")
    return Half(
        part=part,
        dialer=dialer,
        acceptor=acceptor,
        dialer_nonce=dialer_nonce,
        acceptor_nonce=acceptor_nonce,
        key=key,
    )


def check_half(half: Half, expected: Half, host: str) -> None:
    """Raise `PeerRefused` (``auth``) if a half is not of this connection and the other side."""
    if replace(half, key=b"") != replace(expected, key=b""):
        raise PeerRefused("auth", f"the credential of {host} is of another connection")
